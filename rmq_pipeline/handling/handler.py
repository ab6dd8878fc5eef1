"""The interface of a handler: a function from a table of messages to an Outcome. Needs no Spark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.admission import admit
from rmq_pipeline.errors import RequestError
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import Topic

#: Columns of a handler's messages: a received message without its receipt handle.
MESSAGES: Final = pa.schema([f for f in schema.RECEIVED if f.name != "receipt_handle"])

#: Columns of ``Outcome.results``; ``retry_after_ms`` and ``reason`` are optional.
RESULT: Final = pa.schema(
    [
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
    ]
)

OUTCOMES: Final = frozenset({"ack", "retry", "dead_letter"})


class OutcomeError(Exception):
    """A handler's outcome is invalid; the message counts as failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one handler call; all of it is settled in one frame."""

    #: Rows for the sink, with the consumer's sink schema; None for no rows.
    rows: pa.Table | None = None
    #: The message group's state after these messages, 1 row of the consumer's state schema; 0 rows
    #: remove the state, None leaves it unchanged.
    state: pa.Table | None = None
    #: RESULT rows for messages of this call; a message without a row is acked.
    results: pa.Table | None = None
    #: Messages to publish: topic -> table with columns of schema.SEND (at least ``body``).
    publish: Mapping[str, pa.Table] | None = None


#: ``handler(messages, state) -> Outcome``. ``messages`` has the columns of MESSAGES. With
#: ``order_by="message_group"`` these are messages of ONE group in offset order; their number
#: depends on the batch. Otherwise they are any messages. ``state`` is the group's state, 0 or 1
#: rows of the state schema.
#:
#: A handler must have no side effects, because calls are repeated. If a call raises, or retries one
#: of several messages, it is repeated with one message at a time, in order. The first message that
#: fails is retried, and its other results are discarded. The results of earlier messages stand;
#: later messages are delivered again. Without order, the later messages are tried too, and each
#: that fails is retried. A call without order that returned only results is not repeated. The
#: output of a consumer therefore does not depend on the bounds of batches or on killed processes.
#:
#: With an idempotency key a handler may have side effects. A call then has one message and is not
#: repeated. Without order, sink and topics to publish to, a call may have several messages and is
#: repeated if it raises. Such a handler must return ``retry`` for a message that fails
#: (docs/idempotency.md).
Handler = Callable[[pa.Table, pa.Table], Outcome]


#: Value of ``what`` in ``conform`` for a state.
STATE: Final = "state"
_TEXTS: Final = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


class Result(NamedTuple):
    """Result of a message that is not simply acked; ``place`` is its row in the call."""

    place: int
    outcome: str
    retry_after_ms: int | None
    reason: str | None


Published = tuple[str, pa.Table]


def conform(
    table: pa.Table,
    wanted: pa.Schema | None,
    *,
    what: str,
    filled: str = "",
    most: int | None = None,
) -> pa.Table | None:
    """Return the table with exactly the wanted columns and types; None if it has no content.

    Args:
        table: a table of the handler's outcome.
        wanted: the declared schema; None if the consumer declares none, so the table must be None.
        what: name of the table in errors; STATE is validated as strictly as the broker does.
        filled: a column that may have no nulls.
        most: maximum number of rows; with a maximum, a table of 0 rows has a meaning and is
            returned.

    Raises:
        OutcomeError: the table does not fit, or has texts that are not UTF-8; the error names the
            column.
    """
    if not isinstance(table, pa.Table):
        raise OutcomeError(f"{what} is a {type(table).__name__}, not a pyarrow Table.")
    if wanted is None:
        raise OutcomeError(f"{what} were returned, but the consumer declares no schema for them.")
    if not table.schema.equals(wanted):
        table = _cast(table, wanted, what=what)
    _check_sound(table, what=what)
    if most is not None and table.num_rows > most:
        raise OutcomeError(f"{what} has {table.num_rows} rows, not 0 or {most}.")
    if filled and table[filled].null_count:
        raise OutcomeError(f"Column {filled} of {what} chooses the partition and has nulls.")
    return table if table.num_rows or most is not None else None


def _cast(table: pa.Table, wanted: pa.Schema, *, what: str) -> pa.Table:
    names = set(table.column_names)
    if missing := [n for n in wanted.names if n not in names]:
        raise OutcomeError(f"{what} lack the column {', '.join(missing)}.")
    if len(table.column_names) != len(wanted) or names - set(wanted.names):
        extra = sorted(names - set(wanted.names)) or table.column_names
        raise OutcomeError(f"{what} have columns that are not declared: {', '.join(extra)}.")
    try:
        return table.select(wanted.names).cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise OutcomeError(f"{what} do not fit their schema: {error}") from error


def _check_sound(table: pa.Table, *, what: str) -> None:
    """Refuse values that their own type does not allow, such as a string that is not UTF-8.

    The broker would refuse the settle of the whole batch, and a sink with such strings could not be
    read. Parquet checks other values of a sink.
    """
    try:
        for column in table.columns:
            if what == STATE or _has_texts(column.type):
                for chunk in column.chunks:
                    _validate(chunk)
    except pa.ArrowInvalid as error:
        raise OutcomeError(f"{what} cannot be kept: {error}") from error


def _validate(values: pa.Array) -> None:
    if pa.types.is_nested(values.type):
        # Arrow validates the whole parent of a slice: that would be the batch, once per call.
        values.validate()
        values = pa.concat_arrays([values, values.slice(0, 0)])
    values.validate(full=True)


def _has_texts(of_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(of_type):
        return _has_texts(of_type.value_type)
    if pa.types.is_nested(of_type):
        return any(_has_texts(of_type.field(i).type) for i in range(of_type.num_fields))
    return any(is_one(of_type) for is_one in _TEXTS)


def results_of(results: pa.Table, messages: pa.Table) -> list[Result]:
    """Return the results other than ack, in the order of the messages.

    Raises:
        OutcomeError: a column is missing, an outcome or a message is unknown, or a message occurs
            twice.
    """
    if not isinstance(results, pa.Table):
        raise OutcomeError(f"results is a {type(results).__name__}, not a pyarrow Table.")
    for name in ("retry_after_ms", "reason"):
        if name not in results.column_names:
            empty = pa.nulls(results.num_rows, RESULT.field(name).type)
            results = results.append_column(name, empty)
    results = _cast(results, RESULT, what="results") if results.schema != RESULT else results
    places = {
        place: i
        for i, place in enumerate(
            zip(
                messages["queue_id"].to_pylist(),
                messages["queue_offset"].to_pylist(),
                strict=True,
            )
        )
    }
    found = [
        _result(row, places) for row in zip(*(c.to_pylist() for c in results.columns), strict=True)
    ]
    if len({r.place for r in found}) != len(found):
        raise OutcomeError("results name a message twice.")
    return sorted(r for r in found if r.outcome != "ack")


def _result(
    row: tuple[int, int, str, int | None, str | None], places: dict[tuple[int, int], int]
) -> Result:
    queue_id, queue_offset, outcome, retry_after_ms, reason = row
    place = places.get((queue_id, queue_offset))
    if place is None:
        raise OutcomeError(
            f"results name queue {queue_id} offset {queue_offset}, which is not in this call."
        )
    if outcome not in OUTCOMES:
        raise OutcomeError(f"Outcome {outcome!r} is not one of ack, retry, dead_letter.")
    if retry_after_ms is not None and not 0 <= retry_after_ms <= limits.INVISIBLE_MAX_MS:
        raise OutcomeError(f"retry_after_ms {retry_after_ms} is not within 12 hours.")
    return Result(place, outcome, retry_after_ms, reason)


def published(tables: Mapping[str, pa.Table], allowed: Mapping[str, str]) -> list[Published]:
    """Return the messages to publish, with every column of schema.SEND.

    Args:
        tables: topic -> messages, as the handler returned them.
        allowed: the topics that the consumer declares, and the type of each.

    Raises:
        OutcomeError: a topic is not declared, or does not accept a message. The broker would refuse
            the settle of the whole batch.
    """
    if not isinstance(tables, Mapping):
        raise OutcomeError(f"publish is a {type(tables).__name__}, not a mapping of tables.")
    return [
        (topic, _sendable(table, topic, allowed=allowed))
        for topic, table in tables.items()
        if not (isinstance(table, pa.Table) and table.num_rows == 0)
    ]


def _sendable(table: pa.Table, topic: str, *, allowed: Mapping[str, str]) -> pa.Table:
    what = f"messages for {topic}"
    if topic not in allowed:
        raise OutcomeError(f"Topic {topic} is not among those the consumer publishes.")
    if not isinstance(table, pa.Table):
        raise OutcomeError(f"{what} are a {type(table).__name__}, not a pyarrow Table.")
    if not table.schema.equals(schema.SEND):
        table = _cast(_padded(table), schema.SEND, what=what)
    if table["queue_id"].null_count < table.num_rows:
        raise OutcomeError(
            f"{what} have a queue_id; the broker chooses the queue of what is published."
        )
    # An invalid message must fail its own call only: the broker would refuse the settle of the
    # whole batch.
    described = Topic(
        topic,
        0,
        allowed[topic],  # type: ignore[arg-type]  # as the broker describes it
        queues=1,
        partition_time="stored",
        created_at_ms=0,
    )
    try:
        admit(described, columns_of(table, schema.SEND))
    except RequestError as error:
        raise OutcomeError(f"{what}: {error.message}") from error
    return table


def _padded(table: pa.Table) -> pa.Table:
    """Return the table with the missing columns of schema.SEND as nulls."""
    for wanted in schema.SEND:
        if wanted.nullable and wanted.name not in table.column_names:
            table = table.append_column(wanted.name, pa.nulls(table.num_rows, wanted.type))
    return table


PLACE: Final = pa.schema([("queue_id", pa.int32()), ("queue_offset", pa.int64())])
ORIGIN: Final = pa.schema([("topic", pa.string()), *PLACE])


def with_origin_columns(sink_schema: pa.Schema) -> pa.Schema:
    """Return the schema with the missing columns of ORIGIN.

    Raises:
        ValueError: the schema has such a column with another type.
    """
    for field in ORIGIN:
        at = sink_schema.get_field_index(field.name)
        if at >= 0 and sink_schema.field(at).type != field.type:
            raise ValueError(f"Column {field.name} of the sink must be {field.type}.")
        if at < 0:
            sink_schema = sink_schema.append(field)
    return sink_schema


def with_origin(rows: pa.Table, messages: pa.Table, *, topic: str) -> pa.Table:
    """Return the rows of a call with the missing columns of ORIGIN.

    With queue_id and queue_offset a handler names the message of each row. If rows lack these
    columns and the call has one message, the rows belong to that message. A call of several
    messages fails, and is repeated with one message at a time.

    Raises:
        OutcomeError: rows lack a column, and the call has several messages.
    """
    if not isinstance(rows, pa.Table) or not rows.num_rows:
        return rows
    for field in PLACE:
        if field.name not in rows.column_names:
            if messages.num_rows != 1:
                raise OutcomeError(f"Rows of several messages lack the column {field.name}.")
            value = messages[field.name][0].cast(field.type)
            rows = rows.append_column(field.name, pa.repeat(value, rows.num_rows))
    if "topic" not in rows.column_names:
        rows = rows.append_column("topic", pa.repeat(topic, rows.num_rows))
    return rows


def identified(published: pa.Table, messages: pa.Table, *, publication: str) -> pa.Table:
    """Return published messages with ids; a missing id is derived from the origin.

    The id names the message for which it was published, and its number among them. It does not
    depend on the content.

    Args:
        published: schema.SEND.
        messages: the one message of the call.
        publication: prefix that distinguishes ids of different replays, groups and topics.
    """
    at = published.column_names.index("message_id")
    own = published.column(at)
    if not own.null_count:
        return published
    place = "-".join(str(messages[name][0].as_py()) for name in PLACE.names)
    made = pa.array([f"{publication}-{place}-{n}" for n in range(len(own))], own.type)
    return published.set_column(at, "message_id", pc.coalesce(own, made))
