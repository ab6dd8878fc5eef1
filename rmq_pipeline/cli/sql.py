"""``rmq sql``: one SELECT over the documented views."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, TypeAlias

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, seconds, stdin
from rmq_pipeline.cli.output import (
    body_fields,
    body_line,
    print_json,
    replacing,
    rows_of,
    show_rows,
)
from rmq_pipeline.errors import IllegalOffsetError, RequestError, TopicNotFoundError
from rmq_pipeline.limits import FIND_BYTES, QUERY_TIMEOUT_S

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_pipeline.flight.client import Client

#: Topic, queue and offset.
_Place: TypeAlias = tuple[str, int, int]
#: Columns that say more about the place and the message of a row.
_DEAD_LETTER_TOPIC: Final = "dead_letter_topic"
_MESSAGE_ID: Final = "message_id"
_TOPIC_ID: Final = "topic_id"
#: Messages of one result, and of one read: bodies of 4 MiB stay below FIND_BYTES.
_BODIES: Final = 10_000
_READ_ROWS: Final = 16
Format = Literal["table", "json", "csv", "parquet"]


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One SELECT; - reads stdin.")],
    *,
    format: Annotated[Format, typer.Option(help="Format of the result.")] = "table",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write csv or parquet to this file."),
    ] = None,
    body: Annotated[
        bool,
        typer.Option(
            "--body", help="Add the bodies of the messages at topic, queue_id, queue_offset."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Cancel the query after this time.")
    ] = QUERY_TIMEOUT_S,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Run one SELECT over the broker's views.

    topics, consumer_groups, messages, lite_subscriptions, queue_locks, in_flight, waiting,
    retrying, parked, quarantined_groups, dead_letters, redrives, progress, lag, scheduled, half,
    windows, events, message_trace, window_history, segments, sink_files, sink_replacements; and at
    a past time in_flight_at(t), progress_at(t), lag_at(t), …: docs/sql.md lists their columns.
    condemned is quarantined_groups by its earlier name, for one release.
    """
    form = "json" if as_json else format
    _check(form, output=output, body=body, as_json=as_json)
    timeout = seconds(timeout, "--timeout")
    text = stdin().read() if query == "-" else query
    with connected(home, flight) as client:
        answer = client.sql(text, timeout_s=timeout)
        if body:
            answer = with_bodies(client, answer)
    if form in _WRITERS:
        _write(answer, form, output=output)
        return
    as_json = form == "json"
    rows = rows_of(answer)
    for row in rows if body else ():
        row.update(_told(row["body"], as_json=as_json))
    if as_json:
        print_json(rows)
    else:
        show_rows(rows, as_json=False, empty="No rows.")


def _check(form: Format, *, output: Path | None, body: bool, as_json: bool) -> None:
    """Refuse options that do not fit together, before the query runs."""
    if output is not None and form not in _WRITERS:
        raise RequestError(
            f"--output cannot be used with format {form}.",
            remedy=f"{'Omit --json, and add' if as_json else 'Add'} --format csv or parquet.",
        )
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise RequestError(
            "Parquet cannot be printed on a terminal.", remedy="Give --output, or redirect stdout."
        )
    if body and form == "csv":
        raise RequestError(
            "--body cannot be used with format csv: a body is bytes.",
            remedy="Use --format json or parquet.",
        )


def _told(body: bytes | None, *, as_json: bool) -> dict[str, str | None]:
    if body is None:
        return {"body": None}
    return body_fields(body) if as_json else {"body": body_line(body)}


def with_bodies(client: "Client", answer: "pa.Table") -> "pa.Table":
    """Append the bodies of the messages that the rows of a result name by their place.

    It reads each topic as ``client.read`` does, so the caller needs the rights to describe it and
    to read its messages. The body is null where the place is null or has no message any more, and
    where the row's message_id or topic_id is another one than that of the message.

    Raises:
        RequestError: the result has no places, a column ``body``, or too many rows or bytes.
    """
    import pyarrow as pa

    rows = _rows_by_place(client, answer)
    ids = _column(answer, _MESSAGE_ID)
    bodies: list[bytes | None] = [None] * answer.num_rows
    size = 0
    for span in _spans(sorted(rows)):
        for place, message_id, body in _messages(client, span):
            # A body counts once per row: the result has it that often.
            size += len(body) * len(rows[place])
            if size > FIND_BYTES:
                raise RequestError(
                    f"The bodies of the result have more than {FIND_BYTES >> 20} MiB.",
                    remedy="Add WHERE or LIMIT to the query, or read the topic's segments.",
                )
            for row in rows[place]:
                if ids is None or ids[row] == message_id:
                    bodies[row] = body
    return answer.append_column("body", pa.array(bodies, pa.binary()))


def _rows_by_place(client: "Client", answer: "pa.Table") -> dict[_Place, list[int]]:
    """Return the rows of each place that still has a message of the row's topic."""
    topics: dict[str, dict[str, Any] | None] = {}
    topic_ids = None if _DEAD_LETTER_TOPIC in answer.column_names else _column(answer, _TOPIC_ID)
    rows: dict[_Place, list[int]] = {}
    for row, place in enumerate(_places(answer)):
        if place is None:
            continue
        topic, queue_id, offset = place
        if topic not in topics:
            topics[topic] = _described(client, topic)
        described = topics[topic]
        if described is None:
            continue
        if topic_ids is not None and topic_ids[row] != described["topic_id"]:
            continue  # the row is of a deleted topic of this name
        low, high = _bounds(described, queue_id)
        if low <= offset < high:
            rows.setdefault(place, []).append(row)
    return rows


def _places(answer: "pa.Table") -> "list[_Place | None]":
    """Return the place that each row names; None: a part of it is null."""
    names = answer.column_names
    topic = _DEAD_LETTER_TOPIC if _DEAD_LETTER_TOPIC in names else "topic"
    needed = (topic, "queue_id", "queue_offset")
    if "body" in names or any(names.count(name) != 1 for name in needed):
        raise RequestError(
            f"--body needs the columns {', '.join(needed)} once, and no column body; the result has"
            f" {', '.join(names)}.",
            remedy="Name these columns in the query. The view messages has them.",
        )
    if answer.num_rows > _BODIES:
        raise RequestError(
            f"--body reads at most {_BODIES} messages; the result has {answer.num_rows} rows.",
            remedy="Add WHERE or LIMIT to the query.",
        )
    columns = (answer.column(name).to_pylist() for name in needed)
    places: list[_Place | None] = []
    for topic, queue_id, offset in zip(*columns, strict=True):
        place = (topic, queue_id, offset)
        if None in place:
            places.append(None)
        elif type(topic) is str and type(queue_id) is int and type(offset) is int:
            places.append(place)
        else:
            raise RequestError(
                f"{place!r} is not the place of a message.",
                remedy="A topic is a text; queue_id and queue_offset are whole numbers.",
            )
    return places


def _column(answer: "pa.Table", name: str) -> list[Any] | None:
    return answer.column(name).to_pylist() if name in answer.column_names else None


def _described(client: "Client", topic: str) -> dict[str, Any] | None:
    try:
        return client.describe_topic(topic)
    except TopicNotFoundError:  # a topic that was deleted has no messages
        return None


def _bounds(described: dict[str, Any], queue_id: int) -> tuple[int, int]:
    """Return the retained offsets [low, high) of a queue; an unknown queue has none."""
    for each in described["offsets"]:
        if each["queue_id"] == queue_id:
            return each["min_offset"], each["max_offset"]
    return 0, 0


def _spans(places: list[_Place]) -> Iterator[tuple[str, int, int, int]]:
    """Yield ranges of offsets [start, stop) of a queue that cover the sorted places."""
    span: tuple[str, int, int, int] | None = None
    for topic, queue_id, offset in places:
        if span is not None and (span[0], span[1], span[3]) == (topic, queue_id, offset):
            span = (topic, queue_id, span[2], offset + 1)
            continue
        if span is not None:
            yield span
        span = (topic, queue_id, offset, offset + 1)
    if span is not None:
        yield span


def _messages(
    client: "Client", span: tuple[str, int, int, int]
) -> Iterator[tuple[_Place, str, bytes]]:
    """Yield place, message_id and body of the messages of a span that are still there."""
    topic, queue_id, start, stop = span
    while start < stop:
        limit = min(_READ_ROWS, stop - start)
        try:
            page = client.read(topic, queue_id, offset=start, limit=limit)
        except TopicNotFoundError:
            return
        except IllegalOffsetError:
            # Messages have expired since the topic was described.
            described = _described(client, topic)
            low, _ = (0, 0) if described is None else _bounds(described, queue_id)
            if low <= start:
                return  # the topic was deleted, and perhaps created again
            start = low
            continue
        for message in page.select(["queue_offset", _MESSAGE_ID, "body"]).to_pylist():
            yield (topic, queue_id, message["queue_offset"]), message[_MESSAGE_ID], message["body"]
        start += limit


def _write(answer: "pa.Table", form: str, *, output: Path | None) -> None:
    """Write the result to a file or to stdout.

    Raises:
        RequestError: the file cannot be written, or the format cannot represent a value.
    """
    import pyarrow as pa

    writer = _WRITERS[form]
    try:
        if output is None:
            writer(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with replacing(output) as file:
            writer(answer, file)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise RequestError(
            f"The result cannot be written as {form}: {error}.",
            remedy="Cast the column to text.",
        ) from error
    except OSError as error:
        if output is None:
            raise
        raise RequestError(
            f"{output} cannot be written: {error.strerror or error}.",
            remedy="Check the path, its permissions, and the free space of the disk.",
        ) from error


def _write_csv(answer: "pa.Table", file: BinaryIO) -> None:
    from pyarrow import csv

    csv.write_csv(_without_nesting(answer), file)


def _write_parquet(answer: "pa.Table", file: BinaryIO) -> None:
    from rmq_pipeline import checked_parquet

    checked_parquet.write(answer, file)


def _without_nesting(answer: "pa.Table") -> "pa.Table":
    """Convert nested columns to JSON text, because CSV has no lists."""
    import pyarrow as pa

    for index, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            texts = [_json_text(value) for value in answer.column(index).to_pylist()]
            answer = answer.set_column(index, field.name, pa.array(texts, pa.string()))
    return answer


def _json_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


_WRITERS: Final[dict[str, Callable[["pa.Table", BinaryIO], None]]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
}
