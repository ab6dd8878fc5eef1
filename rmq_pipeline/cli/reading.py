"""``rmq tail`` and ``rmq peek``: messages of a topic, read without consuming them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Group, Home, Topic, connected
from rmq_pipeline.cli.output import (
    body_fields,
    body_line,
    printable,
    rows_of,
    show_message,
    show_rows,
)
from rmq_pipeline.store.statements import select
from rmq_pipeline.text import format_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_pipeline.flight.client import Client

#: Interval of the looks for new messages.
LOOK_S: Final = 0.5
#: Messages of one call.
_BATCH: Final = 1_000
#: Columns before the body in a line of text; those without a value are omitted.
_SHOWN: Final = ("message_group", "tag", "keys")
#: Most messages of one peek.
_PEEKED: Final = 1_000
_PEEKED_COLUMNS: Final = (
    "queue_id",
    "queue_offset",
    "delivery_attempt",
    "message_id",
    *_SHOWN,
    "body",
)


def tail(
    topic: Topic,
    *,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=0, help="Messages that are already stored.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with new messages until Ctrl-C.")
    ] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest messages of a topic, without a consumer group: nothing is consumed.

    With --json each message is one line.
    """
    from rmq_pipeline.flight.process import Interruption

    # Python leaves SIGINT ignored where a shell started it in the background.
    interruption = Interruption() if follow else None
    with connected(home, flight) as client, suppress(KeyboardInterrupt):
        reader = _Tail(client, topic)
        _show(reader.newest(limit), as_json=as_json)
        while interruption is not None and not interruption.wait(LOOK_S):
            _show(reader.new(), as_json=as_json)


def peek(
    group: Group,
    topic: Topic,
    *,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, max=_PEEKED, help="Maximum messages.")
    ] = 10,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Print the messages that a consumer group would get next, without leasing them.

    First come messages whose retry is due or whose lease has ended, and messages that waited for
    an earlier one of their message group, which is settled now. Then come messages from the
    group's cursor on, the oldest first; a receive takes the queues in turns.

    The answer ends early behind 4 MiB of bodies from the cursor of a queue on.

    A receive may get fewer of them. Apart from the above, peek ignores order by message group and
    by queue, filters, queue locks, rate limits, quarantine, and subscriptions to lite topics.
    """
    with connected(home, flight) as client:
        client.describe_group(group)  # refuses an unknown one
        rows = _again(client, group, topic=topic, limit=limit)
        if len(rows) < limit:
            rows += _from_cursors(client, group, topic=topic, limit=limit - len(rows))
    for row in rows:
        row.update(_as_json(row) if as_json else {"body": body_line(row["body"])})
    empty = f"{topic} has nothing for {group} now."
    show_rows(rows, as_json=as_json, columns=_PEEKED_COLUMNS, empty=empty)


def _again(client: "Client", group: str, *, topic: str, limit: int) -> list[dict[str, Any]]:
    """Return messages before the cursors that can be delivered now."""
    query = select("cli_peek_again", consumer_group=group, topic=topic)
    found = []
    for place in rows_of(client.sql(f"{query} LIMIT {limit}")):
        read = client.read(topic, place["queue_id"], offset=place["queue_offset"], limit=1)
        found += [{**row, "delivery_attempt": place["delivery_attempt"]} for row in rows_of(read)]
    return found


def _from_cursors(client: "Client", group: str, *, topic: str, limit: int) -> list[dict[str, Any]]:
    """Return messages that were never delivered, those that were stored first."""
    query = select("cli_peek_cursors", consumer_group=group, topic=topic)
    cursors = {row["queue_id"]: row["cursor"] for row in rows_of(client.sql(query))}
    found: list[dict[str, Any]] = []
    ends: list[tuple[int, int, int]] = []
    for queue in client.describe_topic(topic)["offsets"]:
        # A group begins a queue at its first message, and goes on there after retention.
        start = max(queue["min_offset"], cursors.get(queue["queue_id"], 0))
        if start >= queue["max_offset"]:
            continue
        # A pull bounds the bytes of its bodies.
        pulled = client.pull(topic, {queue["queue_id"]: start}, limit=limit)
        rows = rows_of(pulled.messages)
        if 0 < len(rows) < limit and pulled.next_offsets[queue["queue_id"]] < queue["max_offset"]:
            ends.append(_place(rows[-1]))
        found = _in_order(found + rows)[:limit]
    # Behind the last message of a cut queue, older messages of this queue would be missing.
    found = [row for row in found if not ends or _place(row) <= min(ends)]
    return [{**row, "delivery_attempt": 1} for row in found]


class _Tail:
    """Reads a topic from its end on."""

    def __init__(self, client: "Client", topic: str) -> None:
        self._client = client
        self._topic = topic
        self._first: dict[int, int] = {}
        #: By queue: the next offset to read.
        self._next: dict[int, int] = {}
        for queue, first, end in self._queues():
            self._first[queue], self._next[queue] = first, end

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest stored messages, the oldest of them first."""
        found: list[dict[str, Any]] = []
        for queue, end in self._next.items():
            start = max(self._first[queue], end - limit)
            for offset in range(start, end, _BATCH):
                n = min(_BATCH, end - offset)
                found += rows_of(self._client.read(self._topic, queue, offset=offset, limit=n))
        return _in_order(found)[-limit:] if limit else []

    def new(self) -> list[dict[str, Any]]:
        """Return the messages stored since the last call."""
        found: list[dict[str, Any]] = []
        for queue, first, end in self._queues():
            # A new queue is read from its beginning; retention may have deleted what comes next.
            for read in self._read(queue, max(first, self._next.get(queue, 0)), end=end):
                found += rows_of(read)
        return _in_order(found)

    def _queues(self) -> Iterator[tuple[int, int, int]]:
        """Yield id, first and end offset of each queue."""
        for queue in self._client.describe_topic(self._topic)["offsets"]:
            yield queue["queue_id"], queue["min_offset"], queue["max_offset"]

    def _read(self, queue: int, offset: int, *, end: int) -> Iterator["pa.Table"]:
        while offset < end:
            yield self._client.read(self._topic, queue, offset=offset, limit=_BATCH)
            offset = min(end, offset + _BATCH)
            self._next[queue] = offset


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=_place)


def _place(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the place of a message in the order of storing."""
    return row["stored_at_ms"], row["queue_id"], row["queue_offset"]


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    for row in rows:
        show_message(json.dumps(_as_json(row)) if as_json else printable(_line(row)))


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for --json."""
    filled = {"keys": row["keys"] or [], "properties": row["properties"] or {}}
    return {**row, **filled, **body_fields(row["body"])}


def _line(row: Mapping[str, Any]) -> str:
    place = f"{format_ms(row['stored_at_ms'])}  {row['queue_id']}:{row['queue_offset']}"
    told = [f"{name}={row[name]}" for name in _SHOWN if row[name]]
    return "  ".join([place, *told, body_line(row["body"])])
