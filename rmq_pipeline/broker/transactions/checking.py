"""The check job: half messages that stay open are counted and offered, and given up in the end."""

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
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import GIVEN_UP_TOPIC_ID, HALF_TOPIC_ID

log = logging.getLogger(__name__)

#: Half messages that one frame counts at most, and that one frame gives up (limits.STEP_BYTES).
_AT_ONCE: Final = 50_000
_GIVEN_UP_AT_ONCE: Final = 10_000
#: How long those are let be that are to be given up and cannot be read.
_AGAIN_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Swept:
    """What a count has found."""

    #: To be asked about, and those of each producer group.
    asked: Rows
    producers: dict[str, Mask]
    #: Asked about often enough, and the producer groups of these.
    exhausted: Rows
    exhausted_of: dict[str, Mask]
    #: Rolled back, because their topic is gone.
    dropped: int
    next_due_ms: int | None
    #: When that was, and whether nothing is left that was due by then.
    at_ms: int
    is_all: bool

    def __len__(self) -> int:
        return len(self.asked) + len(self.exhausted) + self.dropped


@dataclass(frozen=True, slots=True)
class Sweep(Request):
    """Count the checks that are due.

    One that waits is offered again as it is, not counted and not given up: whoever asks about its
    topic has more to do than there was time for. It is written all the same, with its new time.
    """

    limit: int
    check_max: int
    interval_ms: int
    window: tuple[str, int] | None
    #: Offsets of those that wait, of which some may be due.
    waiting: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """The answer is Swept."""
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
    """Copy half messages that nobody decided, and end them, in one step."""

    rows: Rows
    copies: Send

    def decide(self, state: State, now_ms: int) -> Decision:
        """All of it, or nothing when one was ended meanwhile; the answer is how many."""
        _, still = state.halves.find(self.rows["queue_offset"], self.rows["message_id_hash"])
        if not still.all():
            return Decision(0)
        placed, _ = place(self.copies, state, now_ms=now_ms, heads={})
        events = end_events(state, Kind.HALF_GIVEN_UP, rows=self.rows, now_ms=now_ms)
        return Decision(len(self.rows), placed=placed, events=events)


@dataclass(frozen=True, slots=True)
class PutOff(Request):
    """Half messages that cannot be given up stay open; nothing is stored, they are only let be."""

    queue_offset: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """The answer is how many of them never were put off."""
        until_ms = now_ms + _AGAIN_MS
        return Decision(state.halves.put_off(self.queue_offset, until_ms=until_ms))


def check_transactions(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Count and offer the checks that are due, and that become due within ``wait_ms``.

    Returns:
        checked (offered, whether counted or again), given_up, dropped, next_due_ms.

    Raises:
        FencedError: the window has been taken over.
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
        # Before the look: what has fallen due since is looked for once more.
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
        engine.offers.offer(name, swept.asked[mask])
    if swept.is_all:  # what is left of older offers is of half messages that have ended
        engine.offers.forget(swept.at_ms)
    if len(swept.asked):
        engine.arrivals.ring([NEW_OFFERS])
    return swept


def _give_up(engine: Engine, swept: Swept) -> int:
    """Give up what was asked about often enough; how many that were."""
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
    """Parts of these half messages, a frame each; what cannot be read is put off."""

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
    """The send of what these half messages become."""
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


def with_properties(properties: pa.MapArray, added: dict[str, pa.Array]) -> pa.MapArray:
    """Properties with more of them, a value each row; whole columns, no loop over rows."""
    n, more = len(properties), len(added)
    counts = np.diff(properties.offsets.to_numpy()).astype(np.int64)
    counts[properties.is_null().to_numpy(zero_copy_only=False)] = 0
    own = int(counts.sum())
    assert own == len(properties.keys), "properties of null rows"
    stops = np.cumsum(counts + more)
    # The pool is the rows' own entries and then the added ones, name by name.
    pick: Int64s = np.empty(own + n * more, dtype=np.int64)
    is_own = np.ones(len(pick), dtype=np.bool_)
    for i in range(more):
        at = stops - more + i
        pick[at] = own + i * n + np.arange(n)
        is_own[at] = False
    pick[is_own] = np.arange(own)
    names = [pa.repeat(pa.scalar(name, pa.string()), n) for name in added]
    keys = pa.concat_arrays([properties.keys, *names]).take(pa.array(pick))
    items = pa.concat_arrays([properties.items, *added.values()]).take(pa.array(pick))
    offsets = np.concatenate(([0], stops)).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(offsets), keys, items)
