"""Validation of a handler's outcome: rows, state, results, messages to publish."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.admission import admit
from rmq_pipeline.errors import RequestError
from rmq_pipeline.handling.handler import OUTCOMES, RESULT, OutcomeError
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import Topic

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
        raise OutcomeError(f"Outcome {outcome!r} is none of ack, retry, dead_letter.")
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
