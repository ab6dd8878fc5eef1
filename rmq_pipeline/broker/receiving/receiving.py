"""The work of a receive outside the writer: loading and waiting."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.burying import AT_ONCE, bury
from rmq_pipeline.broker.receiving.consumption import KNOWN_PER_GROUP
from rmq_pipeline.broker.receiving.deliver import BacklogWanted, Delivery, PageWanted, Receive
from rmq_pipeline.broker.receiving.filtering import judge, wanted_of
from rmq_pipeline.broker.receiving.sieve import Sieve, SqlSieve
from rmq_pipeline.broker.receiving.unreadable import give_back, readable
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.queue_index import IndexRows
from rmq_pipeline.broker.writer import Decision, Request


@dataclass(frozen=True, slots=True)
class _FillIndex(Request):
    """Read-ahead that was loaded, to be put in by the writer, who reads it."""

    topic_id: int
    queue_id: int
    rows: IndexRows

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored: the read-ahead is no state."""
        topic = state.topics.get(self.topic_id)
        if topic is not None:
            topic.queues[self.queue_id].index.fill(self.rows)
        return Decision()


@dataclass(frozen=True, slots=True)
class _FillBacklog(Request):
    """Waiting messages of message groups, found in the consume queue."""

    wanted: BacklogWanted
    #: For each group what was found, and from where there may be more.
    offsets: list[list[int]]
    more_from: list[int | None]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Take them in; groups that turn out to have none have caught up."""
        wanted = self.wanted
        consumption = state.consumptions.get(wanted.key)
        if consumption is None or consumption.resets != wanted.resets:
            return Decision()
        consumption.found(
            wanted.groups,
            self.offsets,
            starts=wanted.starts,
            more_from=self.more_from,
            stop=wanted.stop,
        )
        return Decision(events=wanted.key.events(consumption.empty_backlogs(), now_ms))


def receive(engine: Engine, request: Receive, *, wait_ms: int) -> pa.Table:
    """Lease messages and read them; waits up to ``wait_ms`` for the first."""
    deadline = engine.clock.now_ms() + wait_ms
    topic_id = engine.state.topic(request.topic).topic.topic_id
    while True:
        version = engine.arrivals.version(topic_id)
        begin(request)
        delivery: Delivery = engine.submit(request)
        try:
            loaded = load_missing(engine, delivery, sieve=request.sieve)
            if len(delivery):
                return readable(engine, delivery, request=request)
        except BaseException:  # nobody gets it
            give_back(engine, delivery)
            raise
        if loaded or delivery.scanned_out:
            continue
        if engine.clock.now_ms() >= deadline or engine.arrivals.closed:
            return schema.RECEIVED.empty_table()
        wake = deadline
        if delivery.next_visible_ms is not None:
            wake = min(wake, delivery.next_visible_ms)
        engine.arrivals.wait(topic_id, version, at_ms=wake)
        # An earlier call of the same attempt may wait as well, for a client that has let it go.
        # Neither is to take from the other what it was given.
        request = replace(request, repeats=False)


def begin(request: Receive) -> None:
    """To be called before each time the writer is asked."""
    if isinstance(request.sieve, SqlSieve):
        request.sieve.begin()


def load_missing(engine: Engine, delivery: Delivery, *, sieve: Sieve | None) -> bool:
    """Load what the receive lacked, bury what it doomed; whether another try may find more."""
    for page in delivery.pages:
        _load_page(engine, page)
    for wanted in delivery.backlogs:
        _load_backlog(engine, wanted)
    if delivery.unjudged and isinstance(sieve, SqlSieve):
        judge(
            engine,
            sieve,
            topic_id=delivery.topic_id,
            unjudged=delivery.unjudged,
            turn=delivery.delivery,
        )
    buried = bury(engine, None, limit=AT_ONCE).n if delivery.doomed else 0
    return bool(delivery.pages or delivery.backlogs or delivery.unjudged or buried)


def _load_page(engine: Engine, page: PageWanted) -> None:
    found = engine.database.index(page.topic_id, page.queue_id, start=page.start, stop=page.stop)
    rows = IndexRows(
        found.base, found.position, found.row, found.message_group_hash, found.tag_hash
    )
    if len(rows):
        engine.submit(_FillIndex(page.topic_id, page.queue_id, rows))


def _load_backlog(engine: Engine, wanted: BacklogWanted) -> None:
    engine.dispatched()
    groups, offsets = engine.database.backlog(
        wanted.key.topic_id,
        wanted.key.queue_id,
        hashes=np.array(wanted.groups, dtype=np.int64),
        starts=np.array(wanted.starts, dtype=np.int64),
        stop=wanted.stop,
        limit=KNOWN_PER_GROUP,
    )
    found: dict[int, list[int]] = {group: [] for group in wanted.groups}
    for group, offset in zip(groups.tolist(), offsets.tolist(), strict=True):
        found[group].append(offset)
    full = [found[g][-1] + 1 if len(found[g]) >= KNOWN_PER_GROUP else None for g in wanted.groups]
    if wanted.sieve is not None:
        chosen = wanted_of(engine, wanted.sieve, key=wanted.key, offset=offsets)
        keep = set(offsets[chosen].tolist())
        found = {group: [o for o in some if o in keep] for group, some in found.items()}
    engine.submit(_FillBacklog(wanted, [found[group] for group in wanted.groups], full))
