"""``rmq sql``: one SELECT over the documented views."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
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
from rmq_pipeline.errors import RequestError, TopicNotFoundError
from rmq_pipeline.limits import FIND_BYTES, QUERY_TIMEOUT_S

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_pipeline.flight.client import Client

#: Topic, queue and offset.
_Place: TypeAlias = tuple[str, int, int]
_PLACE: Final = ("topic", "queue_id", "queue_offset")
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
    if output is not None and form not in _WRITERS:
        raise RequestError(
            f"--output cannot be used with format {form}.",
            remedy=f"{'Omit --json, and add' if as_json else 'Add'} --format csv or parquet.",
        )
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise RequestError(
            "Parquet cannot be printed on a terminal.", remedy="Give --output, or redirect stdout."
        )
    timeout = seconds(timeout, "--timeout")
    text = stdin().read() if query == "-" else query
    with connected(home, flight) as client:
        answer = client.sql(text, timeout_s=timeout)
        if body:
            answer = with_bodies(client, answer, form=form)
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


def _told(body: bytes | None, *, as_json: bool) -> dict[str, str | None]:
    if body is None:
        return {"body": None}
    return body_fields(body) if as_json else {"body": body_line(body)}


def with_bodies(client: "Client", answer: "pa.Table", *, form: Format) -> "pa.Table":
    """Append the bodies of the messages that the rows of a result name by their place.

    It reads each topic as ``client.read`` does, so the caller needs the right to read its messages.
    The body is null where the place is null, or has no message any more.

    Raises:
        RequestError: the result has no places, a column ``body``, or too many rows or bytes; or
            the format has no bytes.
    """
    import pyarrow as pa

    if form == "csv":
        raise RequestError(
            "--body cannot be used with format csv: a body is bytes.",
            remedy="Use --format json or parquet.",
        )
    places = _places(answer)
    bodies: dict[_Place, bytes] = {}
    size = 0
    for topic, queue_id, start, stop in _retained(client, places):
        for offset in range(start, stop, _READ_ROWS):
            page = client.read(topic, queue_id, offset=offset, limit=min(_READ_ROWS, stop - offset))
            for message in page.select(["queue_offset", "body"]).to_pylist():
                bodies[topic, queue_id, message["queue_offset"]] = message["body"]
            size += page["body"].nbytes
            if size > FIND_BYTES:
                raise RequestError(
                    f"The bodies of the result have more than {FIND_BYTES >> 20} MiB.",
                    remedy="Add WHERE or LIMIT to the query, or read the topic's segments.",
                )
    found = [None if place is None else bodies.get(place) for place in places]
    return answer.append_column("body", pa.array(found, pa.binary()))


def _places(answer: "pa.Table") -> "list[_Place | None]":
    """Return the place that each row names; None: a part of it is null."""
    names = answer.column_names
    if "body" in names or any(names.count(name) != 1 for name in _PLACE):
        raise RequestError(
            f"--body needs the columns {', '.join(_PLACE)} once, and no column body; the result has"
            f" {', '.join(names)}.",
            remedy="Name these columns in the query. The view messages has them.",
        )
    if answer.num_rows > _BODIES:
        raise RequestError(
            f"--body reads at most {_BODIES} messages; the result has {answer.num_rows} rows.",
            remedy="Add WHERE or LIMIT to the query.",
        )
    columns = (answer.column(name).to_pylist() for name in _PLACE)
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


def _retained(
    client: "Client", places: "Iterable[_Place | None]"
) -> "Iterator[tuple[str, int, int, int]]":
    """Yield the offsets [start, stop) of the places that still have a message, by queue."""
    bounds: dict[str, dict[int, tuple[int, int]]] = {}
    last: tuple[str, int, int, int] | None = None
    for topic, queue_id, offset in sorted({place for place in places if place is not None}):
        if topic not in bounds:
            bounds[topic] = _bounds(client, topic)
        low, high = bounds[topic].get(queue_id, (0, 0))
        if not low <= offset < high:
            continue
        if last is not None and last[:2] == (topic, queue_id) and last[3] == offset:
            last = (topic, queue_id, last[2], offset + 1)
            continue
        if last is not None:
            yield last
        last = (topic, queue_id, offset, offset + 1)
    if last is not None:
        yield last


def _bounds(client: "Client", topic: str) -> dict[int, tuple[int, int]]:
    try:
        queues = client.describe_topic(topic)["offsets"]
    except TopicNotFoundError:  # a topic that was deleted has no messages
        return {}
    return {each["queue_id"]: (each["min_offset"], each["max_offset"]) for each in queues}


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
