"""State of a broker at a moment, as the pages show it: rows read through a client's verbs."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from rmq_pipeline.errors import IllegalOffsetError, NotFoundError, RocketMQError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.store.statements import select
from rmq_pipeline.tracing import trace_id_of, trace_url

Row = dict[str, Any]

#: Views that have a macro of a moment; the statements of web.sql name them as placeholders.
_AT: Final = (
    "lag",
    "progress",
    "scheduled",
    "half",
    "in_flight",
    "retrying",
    "parked",
    "quarantined_groups",
)
#: Length of the time that charts cover, and number of its steps.
CHART_MS: Final = 60 * 60_000
STEPS: Final = 60
#: Steps of the lag chart: each is a state that the broker computes.
LAG_STEPS: Final = 20
#: Longest time of a statement. A page that takes longer is of no use.
_QUERY_S: Final = 20.0
#: Messages that a page shows.
MESSAGES: Final = 50
#: Bodies that a list of messages reads; the other messages have none in it.
BODIES_BYTES: Final = 16 << 20
#: Messages of one call.
_STRETCH: Final = 8


@dataclass(frozen=True)
class Series:
    """One line of a chart: a value for each step of the time."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines over the same time."""

    title: str
    from_ms: int
    to_ms: int
    lines: Sequence[Series]


@dataclass(frozen=True)
class Search:
    """Choice of messages of a topic; without any field, the newest."""

    key: str = ""
    message_id: str = ""
    from_ms: int | None = None
    #: One queue; None: all.
    queue_id: int | None = None


@dataclass(frozen=True)
class Found:
    """Messages of a topic, and why some or all could not be read."""

    rows: list[Row]
    refused: RocketMQError | None = None


class State:
    """Reads the state at one moment; each method is one part of a page."""

    def __init__(self, client: Client, *, at_ms: int | None = None, now_ms: int = 0) -> None:
        """Prepare a reader.

        Args:
            client: of the broker, with the rights of the user.
            at_ms: the moment; None: now.
            now_ms: the present time of the broker; 0: that of this machine.
        """
        self._client = client
        self.is_past = at_ms is not None
        self.at_ms = at_ms if at_ms is not None else now_ms or self.present_ms()
        self._first_ms: int | None = None
        self._has_looked = False
        self._views = {name: name if at_ms is None else f"{name}_at({at_ms})" for name in _AT}

    @staticmethod
    def present_ms() -> int:
        """Return the time of this machine, in ms since 1970."""
        return time.time_ns() // 1_000_000

    def _rows(self, statement: str, **values: str | int | None) -> list[Row]:
        query = select(statement, views=self._views, **values)
        rows: list[Row] = self._client.sql(query, timeout_s=_QUERY_S).to_pylist()
        return rows

    # ------------------------------------------------------------------------------- all of it

    def first_ms(self) -> int | None:
        """Return the first millisecond of the retained history; None while there is none."""
        if not self._has_looked:
            self._first_ms = self._rows("web_first_moment")[0]["first_ms"]
            self._has_looked = True
        return self._first_ms

    def groups(self) -> list[Row]:
        """Return a row for each consumer group and topic that it reads."""
        return self._rows("web_groups", at_ms=self.at_ms)

    def topics(self) -> list[Row]:
        """Return a row for each topic, without system topics and dead letters."""
        return self._rows("web_topics", at_ms=self.at_ms)

    def windows(self) -> list[Row]:
        """Return the last owner of each kind of background work."""
        return self._rows("web_windows", at_ms=self.at_ms)

    def broker(self) -> Row:
        """Return the broker's own numbers; they exist for now only."""
        return {} if self.is_past else self._client.status()

    def activity(self, *, topic: str | None = None, group: str | None = None) -> Chart:
        """Return messages stored, acked and failed in each minute of the hour before the moment.

        Args:
            topic: count messages stored in this topic only.
            group: count the settled messages of this group only, and none that were stored.
        """
        from_ms, step_ms = self.at_ms - CHART_MS, CHART_MS // STEPS
        span = {"from_ms": from_ms, "to_ms": self.at_ms, "step_ms": step_ms}
        lines = []
        if group is None:
            stored = self._rows("web_stored", topic=topic, **span)
            lines.append(_line("stored", stored))
        if topic is None:
            settled = self._rows("web_settled", consumer_group=group, **span)
            lines += [_line(name, settled) for name in ("acked", "failed")]
        return Chart("Messages per minute", from_ms, self.at_ms, lines)

    def lag_over_time(self, group: str | None = None) -> Chart:
        """Return the lag of each group over the hour before the moment.

        A retained history that is shorter shortens the chart.
        """
        first_ms = self.first_ms() or self.at_ms
        from_ms = max(self.at_ms - CHART_MS, first_ms)
        step_ms = max(1, (self.at_ms - from_ms) // LAG_STEPS)
        rows = self._rows(
            "web_lag_over_time",
            consumer_group=group,
            from_ms=from_ms,
            to_ms=self.at_ms,
            step_ms=step_ms,
        )
        moments = range(from_ms, self.at_ms + 1, step_ms)
        found: dict[str, dict[int, int]] = {}
        for row in rows:
            found.setdefault(row["consumer_group"], {})[row["at_ms"]] = row["lag"]
        lines = [
            Series(name, [lags.get(at_ms, 0) for at_ms in moments])
            for name, lags in sorted(found.items())
        ]
        return Chart("Lag", from_ms, self.at_ms, lines)

    # ---------------------------------------------------------------------------------- a topic

    def topic(self, name: str) -> Row:
        """Return a topic's fields, and the range of offsets of each queue at the moment."""
        described: Row = self._client.describe_topic(name)
        if self.is_past:
            for queue in described["offsets"]:
                queue["max_offset"] = self._end(name, queue)
        return described

    def _end(self, topic: str, queue: Mapping[str, int]) -> int:
        """Return the end of a queue at the moment; its beginning if nothing of then is left."""
        end = self._client.offset_at(topic, queue["queue_id"], at_ms=self.at_ms + 1)
        return max(queue["min_offset"], end)

    def messages(self, topic: str, search: Search) -> Found:
        """Return messages of a topic: the newest of the moment, unless the search has a choice.

        A user without the right to read the topic gets the newest without bodies.
        """
        if search.key or search.message_id or search.from_ms is not None:
            return self._found(topic, search)
        rows = self._rows(
            "web_newest",
            topic=topic,
            queue_id=search.queue_id,
            at_ms=self.at_ms,
            limit=MESSAGES,
        )
        for row in rows:
            row["body"] = None
        by_place = {(row["queue_id"], row["queue_offset"]): row for row in rows}
        left = BODIES_BYTES
        try:
            for queue_id, start, stop in _stretches(by_place):
                if left <= 0:
                    break
                # What has expired since has no body.
                with suppress(IllegalOffsetError):
                    read = self._client.read(topic, queue_id, offset=start, limit=stop - start)
                    left -= read.nbytes
                    for each in read.select(["queue_offset", "body"]).to_pylist():
                        by_place[queue_id, each["queue_offset"]]["body"] = each["body"]
        except RocketMQError as error:
            return Found(rows, error)
        return Found(rows)

    def _found(self, topic: str, search: Search) -> Found:
        try:
            found = self._client.find(
                topic,
                key=search.key or None,
                message_id=search.message_id or None,
                from_ms=search.from_ms,
                to_ms=self.at_ms + 1 if self.is_past else None,
                limit=MESSAGES,
                with_body=True,
            )
        except RocketMQError as error:
            return Found([], error)
        rows = found.to_pylist()
        return Found([row for row in rows if search.queue_id in (None, row["queue_id"])])

    # ---------------------------------------------------------------------------------- a group

    def group(self, name: str) -> Row:
        """Return a group's fields, with members and locks of now."""
        return self._client.describe_group(name)

    def queues(self, group: str) -> list[Row]:
        """Return a group's progress in each queue."""
        return self._rows("web_queues", consumer_group=group)

    def holders(self, group: str) -> list[Row]:
        """Return who holds a group's messages."""
        return self._rows("web_holders", consumer_group=group)

    def retrying(self, group: str) -> list[Row]:
        """Return a group's failed messages by signature."""
        return self._rows("web_retrying", consumer_group=group)

    def parked(self, group: str) -> list[Row]:
        """Return a group's parked messages and quarantined message groups."""
        return self._rows("web_parked", consumer_group=group)

    def dead_letters(self, group: str) -> list[Row]:
        """Return a group's dead letters by signature."""
        return self._rows("web_dead_letters", consumer_group=group, at_ms=self.at_ms)

    def redrives(self, group: str) -> list[Row]:
        """Return a group's redrives, the newest first."""
        return self._rows("web_redrives", consumer_group=group, at_ms=self.at_ms)

    def sink(self, group: str) -> Row:
        """Return the number of files and rows of a group's sink, and its last commit."""
        return self._rows("web_sink_files", consumer_group=group, at_ms=self.at_ms)[0]

    # -------------------------------------------------------------------------------- a message

    def life(self, message_id: str) -> list[Row]:
        """Return the steps of a message until the moment, in order.

        Raises:
            NotFoundError: no retained message has the id, or it was stored later.
        """
        steps = self._rows("web_life", message_id=message_id, at_ms=self.at_ms)
        if not steps:
            then = " at that moment" if self.is_past else ""
            raise NotFoundError(
                f"No message has the id {message_id}{then}.",
                remedy="Look for it on the page of its topic, by key or by time.",
            )
        return steps

    def sink_rows(self, message_id: str) -> list[Row]:
        """Return the sink files that may hold rows of a message."""
        return self._rows("web_sink_rows", message_id=message_id, at_ms=self.at_ms)

    def stored(self, steps: Iterable[Mapping[str, Any]]) -> Row:
        """Return a message with its body, read at the place where it was stored last.

        Without the right to read it, or after its expiry, the row has the reason as ``missing``.
        """
        places = [step for step in steps if step["what"] in ("stored", "scheduled")]
        if not places or places[-1]["topic"] is None:
            return {"missing": "The message is not stored any more."}
        place = places[-1]
        try:
            read = self._client.read(
                place["topic"], place["queue_id"], offset=place["queue_offset"], limit=1
            )
        except RocketMQError as error:
            return {"missing": str(error)}
        rows = _plain(read.to_pylist())
        return rows[0] if rows else {"missing": "The message is not stored any more."}

    def trace(self, message: Mapping[str, Any]) -> Row:
        """Return id and url of the trace in which a message was sent, each None if unknown.

        Only a user who may see the broker's settings gets the url.
        """
        trace_id, template = trace_id_of(message.get("properties") or {}), None
        if trace_id is not None:
            with suppress(RocketMQError):
                template = self._client.status()["settings"].get("trace_url")
        return {"id": trace_id, "url": trace_url(template, trace_id)}


def _stretches(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield queue, first offset and end of stretches of offsets that follow each other."""
    queue_id = start = stop = -1
    for queue, offset in sorted(places):
        if (queue, offset) != (queue_id, stop) or stop - start >= _STRETCH:
            if stop > start:
                yield queue_id, start, stop
            queue_id, start = queue, offset
        stop = offset + 1
    if stop > start:
        yield queue_id, start, stop


def _line(name: str, rows: Iterable[Mapping[str, Any]]) -> Series:
    values = [0.0] * STEPS
    for row in rows:
        if 0 <= row["step"] < STEPS:
            values[row["step"]] += row[name]
    return Series(name, values)


def _plain(rows: Iterable[Row]) -> list[Row]:
    """Return messages with properties as a dict."""
    return [{**row, "properties": dict(row["properties"] or ())} for row in rows]
