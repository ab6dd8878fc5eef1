"""``rmq send``, ``receive``, ``recall``, ``find`` and ``trace``."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from rmq_pipeline import limits
from rmq_pipeline.cli import ndjson
from rmq_pipeline.cli.options import (
    MOMENT,
    AsJson,
    Flight,
    Group,
    Home,
    Topic,
    connected,
    stdin,
    to_ms,
)
from rmq_pipeline.cli.output import (
    body_fields,
    body_line,
    print_json,
    progress,
    rows_of,
    show_message,
    show_progress,
    show_rows,
)
from rmq_pipeline.errors import FilterExpressionError, NotFoundError, RequestError, RocketMQError
from rmq_pipeline.store.statements import select
from rmq_pipeline.text import parse_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_pipeline.flight.client import Client

RECEIVED_FIELDS: Final = (
    "body",
    "tag",
    "keys",
    "message_group",
    "queue_id",
    "queue_offset",
    "delivery_attempt",
    "message_id",
    "receipt_handle",
    "properties",
)
QueueId = Annotated[
    int | None, typer.Option(help="Message queue; by default the broker chooses one.")
]
Keys = Annotated[list[str] | None, typer.Option(help="Key for `rmq find`; repeatable.")]
RECEIVED_COLUMNS: Final = (
    "queue_id",
    "queue_offset",
    "delivery_attempt",
    "message_id",
    "message_group",
    "tag",
    "keys",
    "body",
)
#: Lease of a receive without --ack: time to inspect the messages and to settle them.
INVISIBLE_S: Final = 60.0
#: Client id of the command line. Its lite topics are those of the last `--lite-topic`.
CLIENT_ID: Final = "rmq"
#: Characters that suggest a SQL92 condition, although a tag may have them.
_SQL_SIGNS: Final = frozenset("'=<>()")
FOUND_COLUMNS = (
    "queue_id",
    "queue_offset",
    "message_id",
    "message_group",
    "tag",
    "keys",
    "stored_at_ms",
    "body",
)


def send(
    topic: Topic,
    *,
    body: Annotated[str | None, typer.Option(help="Text of one message.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="NDJSON",
            help="One message per line, each a JSON object: body or body_base64, and optionally "
            f"{', '.join(ndjson.OPTIONAL)}. - is stdin. "
            "The options below apply to lines that omit the field.",
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag, for filters of consumers.")] = None,
    key: Keys = None,
    message_group: Annotated[
        str | None, typer.Option(help="Messages of one group are consumed in order.")
    ] = None,
    lite_topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Lite topic, in a topic of type lite.")
    ] = None,
    delay_level: Annotated[
        int | None, typer.Option(help="Deliver after a delay: level 1 (1 s) to 18 (2 h).")
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Deliver at this time: {MOMENT}.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Higher priorities come first.")] = None,
    queue_id: QueueId = None,
    property: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Property; repeatable.")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Send a message, or a file of messages in batches. A batch is stored completely or not."""
    defaults = {
        "tag": tag,
        "keys": key or None,
        "message_group": message_group,
        "lite_topic": lite_topic,
        "delay_level": delay_level,
        "deliver_at_ms": parse_ms(deliver_at) if deliver_at else None,
        "priority": priority,
        "queue_id": queue_id,
        "properties": _properties(property or []),
    }
    _check_source(body, file)
    ndjson.check_all(defaults)
    with connected(home, flight) as client:
        if file is None:
            table = ndjson.to_table([{**defaults, "body": _encoded(body or "")}])
            sent = rows_of(client.send(topic, table))
        else:
            sent = _send_file(client, topic, file=file, defaults=defaults, keep=as_json)
            if not as_json:
                return
    show_rows(sent, as_json=as_json, columns=_sent_columns(sent), empty="")


def _sent_columns(sent: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the columns to show: recall_handle and duplicate only if some message has one."""
    places = ("message_id", "queue_id", "queue_offset")
    return (
        *places,
        *(name for name in ("recall_handle", "duplicate") if any(row[name] for row in sent)),
    )


def receive(
    topic: Topic,
    group: Group,
    *,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Maximum messages.")] = 32,
    ack: Annotated[
        bool, typer.Option("--ack", help="Acknowledge the messages after printing them.")
    ] = False,
    filter: Annotated[
        str,
        typer.Option(metavar="EXPR", help="Tags joined by ||, or a SQL92 condition; * is all."),
    ] = "*",
    filter_type: Annotated[
        str | None, typer.Option(metavar="tag|sql92", help="Type of --filter. Default: tag.")
    ] = None,
    lite_topic: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Lite topic, in a topic of type lite; repeatable."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait this long for the first message.")
    ] = 0.0,
    invisible: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Without --ack, messages are redelivered after this time."
        ),
    ] = INVISIBLE_S,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Receive messages of a topic for a consumer group."""
    _check_filter(filter, filter_type)
    invisible_ms, wait_ms = to_ms(invisible, "--invisible"), to_ms(wait, "--wait")
    with connected(home, flight) as client:
        _subscribe(client, topic, group=group, lite_topics=lite_topic or [])
        received = client.receive(
            group,
            topic,
            limit=limit,
            invisible_duration_ms=invisible_ms,
            filter=filter,
            filter_type=filter_type or "tag",
            wait_ms=wait_ms,
            client_id=CLIENT_ID,
        )
        rows = rows_of(received)
        if as_json:
            print_json([_as_json(row) for row in rows])
        else:
            empty = f"{topic} has no messages for {group} now."
            show_rows(rows, as_json=False, columns=RECEIVED_COLUMNS, empty=empty)
        # Print before the ack: messages that the reader did not get are redelivered.
        sys.stdout.flush()
        if ack and rows:
            client.ack(received)


def ack(
    receipts: Annotated[
        list[str],
        typer.Argument(metavar="RECEIPT", help="The receipt_handle that `rmq receive` printed."),
    ],
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Acknowledge received messages: all of them, or none."""
    with connected(home, flight) as client:
        client.ack(receipts)
    if as_json:
        print_json({"acked": len(receipts)})
    else:
        show_message(f"{len(receipts):,} messages are acknowledged.")


def _check_source(body: str | None, file: Path | None) -> None:
    if (body is None) == (file is None):
        raise RequestError(
            "The command needs one of --body and --file.", remedy="Give either --body or --file."
        )


def _check_filter(filter: str, filter_type: str | None) -> None:
    if filter_type is None and _SQL_SIGNS.intersection(filter):
        # As a tag expression it would match nothing and skip every message permanently.
        raise FilterExpressionError(
            f"The filter {filter!r} may be SQL92 or a tag.",
            remedy="Add --filter-type sql92, or --filter-type tag.",
        )


def _subscribe(client: "Client", topic: str, *, group: str, lite_topics: list[str]) -> None:
    if lite_topics:
        client.sync_lite_subscription(
            group, topic, client_id=CLIENT_ID, action="replace", lite_topics=lite_topics
        )


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for --json."""
    fields = {name: row[name] for name in RECEIVED_FIELDS}
    return {**fields, "keys": row["keys"] or [], **body_fields(row["body"])}


def _encoded(text: str) -> bytes:
    # Arguments that are not UTF-8 are sent as the bytes that the shell passed.
    return text.encode("utf-8", "surrogateescape")


def _properties(pairs: list[str]) -> dict[str, str] | None:
    """Parse KEY=VALUE pairs.

    Raises:
        RequestError: a pair has no =.
    """
    properties = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise RequestError(
                f"--property {pair!r} has no =.", remedy="Write --property KEY=VALUE."
            )
        properties[name] = value
    return properties or None


def _send_file(
    client: "Client", topic: str, *, file: Path, defaults: Mapping[str, Any], keep: bool
) -> list[dict[str, Any]]:
    """Send all lines; return the reply for each message if ``keep`` is set."""
    answers: list[dict[str, Any]] = []
    stored = 0
    with _opened(file) as lines, progress(unit="messages") as bar:
        size = file.stat().st_size if file.is_file() else None
        task = bar.add_task(f"sending to {topic}", total=size, done=0)
        try:
            for batch in ndjson.batches(lines, defaults):
                if batch.rows:
                    sent = _send_batch(client, topic, batch=batch)
                    answers += sent if keep else []
                    stored += len(sent)
                bar.update(task, advance=batch.bytes, done=stored)
        except RocketMQError as error:
            if not stored:
                raise
            raise type(error)(
                f"{error.message} The first {stored:,} messages of the file are stored."
            ) from error
    if not keep:
        show_message(f"{stored:,} messages are stored in {topic}.")
    return answers


def _send_batch(client: "Client", topic: str, *, batch: ndjson.Batch) -> list[dict[str, Any]]:
    try:
        return rows_of(client.send(topic, batch.table()))
    except RocketMQError as error:
        lines = f"In lines {batch.first_line} to {batch.last_line}"
        raise type(error)(f"{lines}: {error.message}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Iterable[bytes]]:
    """Open a file of messages, or stdin for -.

    Raises:
        RequestError: the file cannot be read.
    """
    if str(file) == "-":
        yield _lines(file, stdin().buffer)
        return
    try:
        opened = file.open("rb")
    except OSError as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror}.", remedy="Check the path and its rights."
        ) from error
    with opened:
        yield _lines(file, opened)


def _lines(file: Path, opened: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raises:
        RequestError: reading failed.
    """
    try:
        yield from opened
    except OSError as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror}.", remedy="Check the path and its rights."
        ) from error


def recall(
    topic: Topic,
    handles: Annotated[
        list[str],
        typer.Argument(metavar="HANDLE", help="The recall_handle that `rmq send` printed."),
    ],
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Recall scheduled messages before their delivery: all of them, or none."""
    import pyarrow as pa

    from rmq_pipeline.schema import RECALL

    with connected(home, flight) as client:
        recalled = rows_of(client.recall(topic, pa.table([handles], schema=RECALL)))
    show_rows(recalled, as_json=as_json, empty="")


class MessageNotFoundError(NotFoundError):
    """No message with this id is in the broker."""

    remedy = "Check the id, and that this broker still has the message."


def find(
    topic: Topic,
    *,
    key: Annotated[str | None, typer.Option(help="One of the message's keys.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="The message id.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help=f"Stored at or after: {MOMENT}.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help=f"Stored before: {MOMENT}.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Maximum messages.")] = 100,
    body: Annotated[bool, typer.Option("--body/--no-body", help="Show bodies, too.")] = True,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Find messages of a topic by key, by id, or by the time they were stored.

    The answer ends early if the bodies exceed 64 MiB; a line on stderr says so. With --json a
    body that is not UTF-8 is body_base64, as in a file for rmq send.
    """
    if key is None and message_id is None and from_ is None and to is None:
        raise RequestError(
            "The search has no condition.", remedy="Give --key, --id, --from or --to."
        )
    with connected(home, flight) as client:
        found = client.find(
            topic,
            key=key,
            message_id=message_id,
            from_ms=parse_ms(from_) if from_ else None,
            to_ms=parse_ms(to) if to else None,
            limit=limit,
            with_body=body,
        )
    _warn_of_the_end(found, limit)
    rows = [{"topic": topic, **row} for row in rows_of(found)]
    for row in rows:
        if body:
            row.update(body_fields(row["body"]) if as_json else {"body": body_line(row["body"])})
    columns = [name for name in FOUND_COLUMNS if body or name != "body"]
    show_rows(rows, as_json=as_json, columns=columns, empty=f"{topic} has no such message.")


def _warn_of_the_end(found: "pa.Table", limit: int) -> None:
    """Say that an answer may have ended early because of its bodies."""
    size = found["body"].nbytes
    if found.num_rows < limit and size + limits.BODY_BYTES > limits.FIND_BYTES:
        show_progress(
            f"The bodies take {size >> 20} MiB, so the answer may have ended early."
            " Use --no-body, or a shorter time."
        )


def trace(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID")],
    *,
    sink: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Also show the message's rows in this sink, or its URI."
        ),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Show the history of a message: stored, delivered and by which run, failed and why, settled.

    The last rows are the sink files that may contain its results.
    """
    with connected(home, flight) as client:
        rows = rows_of(client.sql(select("cli_trace", message_id=message_id)))
        if not rows:
            raise MessageNotFoundError(f"No message has the id {message_id}.")
        rows = _with_trace(client, rows)
    if sink is not None:
        rows += _rows_in(sink, rows)
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    show_rows(rows, as_json=as_json, columns=told, empty="")


def _with_trace(client: "Client", rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the columns trace_id and trace_url: the OpenTelemetry trace in which it was sent."""
    from rmq_pipeline.tracing import trace_id_of, trace_url

    stored = [row for row in rows if row["what"] in ("stored", "scheduled") and row["topic"]]
    trace_id = template = None
    for place in stored[-1:]:
        # Without the right to read the message, or to see the settings, the columns stay empty.
        with suppress(RocketMQError):
            read = client.read(
                place["topic"], place["queue_id"], offset=place["queue_offset"], limit=1
            )
            properties = dict(read["properties"][0].as_py() or ()) if read.num_rows else {}
            trace_id = trace_id_of(properties)
            template = client.status()["settings"].get("trace_url") if trace_id else None
    told = {"trace_id": trace_id, "trace_url": trace_url(template, trace_id)}
    none = dict.fromkeys(told)
    return [{**row, **(told if stored and row is stored[-1] else none)} for row in rows]


def _rows_in(sink: str, stations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history row for each sink row of the message, from the sink's current files."""
    from rmq_pipeline.lake.rows import rows_of_message

    places = {(s["queue_id"], s["queue_offset"]): s for s in stations if s["what"] == "sink_file"}
    found = []
    for (queue_id, queue_offset), station in places.items():
        rows = rows_of_message(sink, queue_id=queue_id, queue_offset=queue_offset)
        for row in rows.to_pylist() if rows is not None else ():
            told = json.dumps(row, default=repr)
            found.append({**station, "what": "sink_row", "detail": told})
    return found
