"""The check job: count and offer the checks of open half messages, and end exhausted ones."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.scheduling.readable import LeftOut, read_parts
from rmq_pipeline.broker.sending.publish import Send, checked, place
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.transactions.ending import COPIED, plain_columns, stored_halves
from rmq_pipeline.broker.transactions.halves import Rows
from rmq_pipeline.broker.transactions.offers import NEW_OFFERS
from rmq_pipeline.broker.transactions.transaction import Mask, end_events, producers
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.message import Int64s
from rmq_pipeline.properties import with_properties
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import GIVEN_UP_TOPIC_ID, HALF_TOPIC_ID

log = logging.getLogger(__name__)

#: Most half messages that one frame counts, and that one frame ends as exhausted
#: (limits.STEP_BYTES).
_AT_ONCE: Final = 50_000
_GIVEN_UP_AT_ONCE: Final = 10_000
#: Delay of the next try for exhausted half messages that cannot be read.
_AGAIN_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of one sweep."""

    #: Half messages to offer for a check, and the mask of each producer group.
    asked: Rows
    producers: dict[str, Mask]
    #: Half messages without a check left, and the mask of each producer group.
    exhausted: Rows
    exhausted_of: dict[str, Mask]
    #: Number rolled back because their topic was deleted.
    dropped: int
    next_due_ms: int | None
    #: Time of the sweep; and True if nothing more was due at that time.
    at_ms: int
    is_all: bool

    def __len__(self) -> int:
        return len(self.asked) + len(self.exhausted) + self.dropped


@dataclass(frozen=True, slots=True)
class Sweep(Request):
    """Request that counts the checks that are due.

    A check that still waits to be fetched is offered again but not counted, because its callers are
    merely busy. Its new time is stored all the same.
    """

    limit: int
    check_max: int
    interval_ms: int
    window: tuple[str, int] | None
    #: Offsets of the checks that still wait; some of them may be due.
    waiting: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Count the checks that are due; the answer is Swept."""
        state.fence(self.window)
        halves = state.halves
        rows = halves.due(now_ms, self.limit)
        there = np.isin(rows["target_topic_id"], list(state.topics))
        waits = np.isin(rows["queue_offset"], self.waiting)
        left = waits | (rows["checks"] < self.check_max)
        gone, exhausted, asked = rows[~there], rows[there & ~left], rows[there & left]
        asked["checks"] += ~waits[there & left]
        asked["due_ms"] = now_ms + self.interval_ms
        of_producer = producers(halves, asked)
        events = [
            _half_event(asked[mask], name, now_ms=now_ms) for name, mask in of_producer.items()
        ]
        events += end_events(state, Kind.HALF_ROLLED_BACK, rows=gone, now_ms=now_ms)
        answer = Swept(
            asked=asked,
            producers=of_producer,
            exhausted=exhausted,
            exhausted_of=producers(halves, exhausted),
            dropped=len(gone),
            next_due_ms=halves.next_due_ms(),
            at_ms=now_ms,
            is_all=len(rows) < self.limit,
        )
        return Decision(answer, events=events)


def _half_event(rows: Rows, producer_group: str, *, now_ms: int) -> EventRows:
    return EventRows(
        kind=Kind.HALF,
        at_ms=now_ms,
        topic_id=HALF_TOPIC_ID,
        queue_id=0,
        queue_offset=rows["queue_offset"],
        attempt=rows["checks"],
        visible_at_ms=rows["due_ms"],
        delivery=rows["immunity_ms"],
        message_group_hash=rows["message_id_hash"],
        client_id=producer_group,
    )


@dataclass(frozen=True, slots=True)
class GiveUp(Request):
    """Request that moves exhausted half messages to TRANS_CHECK_MAX_TIME_TOPIC, in one step."""

    rows: Rows
    copies: Send

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store all or nothing; the answer is the number stored, 0 if one was ended meanwhile."""
        # Use the current rows: after a rebuild other codes stand for producer groups.
        rows, still = state.halves.find(self.rows["queue_offset"], self.rows["message_id_hash"])
        if not still.all():
            return Decision(0)
        placed, _ = place(self.copies, state, now_ms=now_ms, heads={})
        events = end_events(state, Kind.HALF_GIVEN_UP, rows=rows, now_ms=now_ms)
        return Decision(len(self.rows), placed=placed, events=events)


@dataclass(frozen=True, slots=True)
class PutOff(Request):
    """Request that delays exhausted half messages that cannot be read; nothing is stored."""

    queue_offset: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the number of messages delayed for the first time as the answer."""
        until_ms = now_ms + _AGAIN_MS
        return Decision(state.halves.put_off(self.queue_offset, until_ms=until_ms))


def check_transactions(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Count and offer the checks that are due now or within ``wait_ms``.

    Returns:
        checked (offered, counted or not), given_up, dropped, next_due_ms.

    Raises:
        FencedError: a newer epoch has opened the window.
    """
    done = {"checked": 0, "given_up": 0, "dropped": 0}
    deadline = engine.clock.now_ms() + wait_ms
    while True:
        version, now_ms = engine.arrivals.version(HALF_TOPIC_ID), engine.clock.now_ms()
        left = limit - sum(done.values())
        swept = _sweep(engine, left, window=window)
        done["checked"] += len(swept.asked)
        done["dropped"] += swept.dropped
        done["given_up"] += _give_up(engine, swept)
        if len(swept) and sum(done.values()) < limit:
            continue
        # now_ms is from before the sweep: checks due since then get another sweep.
        if sum(done.values()) >= limit or now_ms >= deadline or engine.arrivals.closed:
            return {**done, "next_due_ms": swept.next_due_ms}
        wake = deadline if swept.next_due_ms is None else min(deadline, swept.next_due_ms)
        engine.arrivals.wait(HALF_TOPIC_ID, version, at_ms=wake)


def _sweep(engine: Engine, limit: int, *, window: tuple[str, int] | None) -> Swept:
    settings = engine.settings
    request = Sweep(
        limit=min(_AT_ONCE, limit),
        check_max=settings.transaction_check_max,
        interval_ms=settings.transaction_check_interval_ms,
        window=window,
        waiting=engine.offers.waiting(engine.clock.now_ms(), windows=engine.state.windows),
    )
    swept: Swept = engine.submit(request)
    for name, mask in swept.producers.items():
        engine.offers.offer(name, swept.asked[mask], now_ms=swept.at_ms)
    if swept.is_all:  # the older offers left belong to half messages that have ended
        engine.offers.forget(swept.at_ms)
    if len(swept.asked):
        engine.arrivals.ring([NEW_OFFERS])
    return swept


def _give_up(engine: Engine, swept: Swept) -> int:
    """End the exhausted half messages; return how many."""
    given_up = 0
    names = np.full(len(swept.exhausted), "", dtype=object)
    for name, mask in swept.exhausted_of.items():
        names[mask] = name
    for start in range(0, len(swept.exhausted), _GIVEN_UP_AT_ONCE):
        at_once = slice(start, start + _GIVEN_UP_AT_ONCE)
        some, of_some = swept.exhausted[at_once], names[at_once]
        for part, messages in _read_parts(engine, some):
            copies = _copies(engine, some[part], messages=messages, producer_groups=of_some[part])
            given_up += engine.submit(GiveUp(some[part], copies))
    return given_up


def _read_parts(engine: Engine, rows: Rows) -> Iterator[tuple[npt.NDArray[np.intp], pa.Table]]:
    """Yield parts of these half messages, a frame each; delay the unreadable ones."""

    def put_off(left_out: LeftOut) -> None:
        if new := engine.submit(PutOff(rows["queue_offset"][left_out.rows])):
            log.error(
                "%d half messages cannot be read, and are given up when they can be",
                new,
                exc_info=left_out.why,
            )

    return read_parts(
        engine,
        stored_halves(rows),
        columns=COPIED,
        bound_bytes=limits.STEP_BYTES,
        leave_out=put_off,
    )


def _copies(engine: Engine, rows: Rows, *, messages: pa.Table, producer_groups: np.ndarray) -> Send:
    """Return the send that copies these half messages to TRANS_CHECK_MAX_TIME_TOPIC."""
    columns = plain_columns(messages)
    topics = engine.state.topics
    names = {t: topics[t].topic.name for t in np.unique(rows["target_topic_id"]) if t in topics}
    targets = [names.get(topic_id, "") for topic_id in rows["target_topic_id"].tolist()]
    added = {
        "REAL_TOPIC": pa.array(targets, pa.string()),
        "PGROUP": pa.array(producer_groups, pa.string()),
        "TRANSACTION_CHECK_TIMES": pa.array(rows["checks"]).cast(pa.string()),
    }
    columns["properties"] = with_properties(columns["properties"], added)
    return checked(
        topics[GIVEN_UP_TOPIC_ID].topic,
        columns,
        ids=engine.ids,
        delay_max_ms=engine.settings.delay_max_ms,
        now_ms=engine.clock.now_ms(),
    )
