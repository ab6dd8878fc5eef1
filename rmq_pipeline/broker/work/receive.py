"""The part of a receive outside the writer: loading, waiting, reading."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
import pyarrow as pa
from typing_extensions import override

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.deliver import BacklogWanted, Delivery, PageWanted, Receive
from rmq_pipeline.broker.decide.queue_index import FillBacklog, FillIndex
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.state.filter_cache import CachedSqlFilter, ReceiveFilter, TagHashFilter
from rmq_pipeline.broker.state.group_order import KNOWN_PER_GROUP
from rmq_pipeline.broker.state.queue_index import IndexRows
from rmq_pipeline.broker.work import waiting
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import judge, wanted_of
from rmq_pipeline.broker.work.reading import undispatched
from rmq_pipeline.broker.work.unreadable import readable, release_delivery
from rmq_pipeline.broker.work.waiting import FOLLOWERS, FOLLOWERS_OF_FULL, Place, Waiter
from rmq_pipeline.errors import LogFencedError, StandbyError, StorageError
from rmq_pipeline.message import Int64s

log = logging.getLogger(__name__)


class Leasing(ABC):
    """A receive that waits for messages: in its caller's thread, or on an event loop.

    A thread blocks on ``result`` of its subclass, and a loop awaits ``lease``: the steps are the
    same.
    """

    def __init__(self, engine: Engine, request: Receive, *, until_ms: int) -> None:
        self.engine = engine
        self.request = request
        self.until_ms = until_ms

    @abstractmethod
    def enter(self, place: Place) -> Waiter:
        """Enter a line of waiting receives."""

    @abstractmethod
    async def submit(self) -> Delivery:
        """Let the writer decide the request."""

    @abstractmethod
    async def load(self, load: Callable[..., bool], delivery: Delivery) -> bool:
        """Call ``load_missing``, which reads; return its result."""

    @abstractmethod
    async def wait(self, waiter: Waiter, at_ms: int) -> None:
        """Wait until woken, or until ``at_ms``."""

    @abstractmethod
    def is_wanted(self) -> bool:
        """Return False once the caller has gone: it may get no messages."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return True once no call may wait any longer."""

    @abstractmethod
    def release(self, delivery: Delivery) -> None:
        """Release messages that reach no caller."""

    async def lease(self) -> Delivery | None:
        """Return leased messages, the first that come in time; None if there were none."""
        clock = self.engine.clock
        waits = self.until_ms > clock.now_ms()
        waiter = self.enter(self._place()) if waits else None
        followers = FOLLOWERS
        try:
            while self.is_wanted():
                followers = FOLLOWERS  # after an error, the next one gets what this one leaves
                # The topic or the group may have been deleted and created again, maybe before this
                # call entered its line.
                if waiter is not None and waiter.place != (place := self._place()):
                    waiter.end(FOLLOWERS)
                    waiter = self.enter(place)
                    continue
                delivery, loaded = await self._look()
                if len(delivery):
                    if len(delivery) >= self.request.limit or loaded or delivery.scanned_out:
                        followers = FOLLOWERS_OF_FULL
                    return delivery
                if loaded or delivery.scanned_out:
                    continue
                # The next in line learns when a leased message becomes visible again: no wakeup
                # reports that.
                followers = int(delivery.next_visible_ms is not None)
                if waiter is None or clock.now_ms() >= self.until_ms or self.is_closed():
                    return None
                if delivery.locked:  # for this client; another client may still read the queue
                    waiter.pass_on()
                at_ms = self.until_ms
                if delivery.next_visible_ms is not None:
                    at_ms = min(at_ms, delivery.next_visible_ms)
                await self.wait(waiter, at_ms)
                followers = FOLLOWERS
                # An earlier call of the same attempt may wait too, for a client that has dropped
                # it. Neither call may take the messages of the other.
                self.request = replace(self.request, repeats=False)
            return None
        finally:
            if waiter is not None:
                waiter.end(followers)

    def _place(self) -> Place:
        """Return the line to wait in, shared by receives that can get the same messages.

        Raises:
            NotFoundError: the topic or the group was deleted.
        """
        state, request = self.engine.state, self.request
        topic = state.topic(request.topic).topic
        match request.row_filter:
            case TagHashFilter(hashes):
                wanted: Hashable = hashes.tobytes()
            case CachedSqlFilter() as row_filter:
                wanted = row_filter.sql.expression
            case _:
                wanted = None
        client_id = request.client_id if topic.type == "lite" else ""
        group_id = state.group(request.group).group_id
        return Place(topic.topic_id, group_id, (wanted, request.queue_ids, client_id))

    async def _look(self) -> tuple[Delivery, bool]:
        """Return what a look leases, and True if another look may find more."""
        row_filter = self.request.row_filter
        if isinstance(row_filter, CachedSqlFilter):
            row_filter.begin()
        delivery = await self.submit()
        try:
            return delivery, await self.load(load_missing, delivery)
        except BaseException:  # the messages reach no caller
            self.release(delivery)
            raise


class _InThread(Leasing):
    """A receive whose caller's thread blocks."""

    #: True if its caller has gone while it waited.
    _is_gone = False

    def __init__(
        self, engine: Engine, request: Receive, *, until_ms: int, first: Request | None
    ) -> None:
        super().__init__(engine, request, until_ms=until_ms)
        #: Decided before the first look, in its frame; a refusal of it ends the receive. None once
        #: it is stored.
        self.first = first

    def result(self) -> Delivery | None:
        """Return leased messages, as ``lease``. The coroutine never suspends: its steps block."""
        try:
            self.lease().send(None)
        except StopIteration as end:
            found: Delivery | None = end.value
            if self.first is not None:  # it has not looked: the broker is closing
                self.engine.submit(self.first)
            return found
        raise AssertionError("a step of a thread's receive blocks")

    @override
    def enter(self, place: Place) -> Waiter:
        return Waiter(self.engine.wakeups, place)

    @override
    async def submit(self) -> Delivery:
        delivery: Delivery = self.engine.submit(self.request, first=self.first)
        self.first = None
        return delivery

    @override
    async def load(self, load: Callable[..., bool], delivery: Delivery) -> bool:
        return load(self.engine, delivery, row_filter=self.request.row_filter)

    @override
    async def wait(self, waiter: Waiter, at_ms: int) -> None:
        clock = self.engine.clock
        while not waiter.wait(waiting.look_at_ms(clock, at_ms)):
            if clock.now_ms() >= at_ms or waiting.waits_no_more():
                break
        self._is_gone = waiting.waits_no_more()

    @override
    def is_wanted(self) -> bool:
        # Before it has waited, its caller may repeat it by its attempt id.
        return not (self.engine.wakeups.closed or self._is_gone)

    @override
    def is_closed(self) -> bool:
        return self.engine.wakeups.closed

    @override
    def release(self, delivery: Delivery) -> None:
        release_delivery(self.engine, delivery)


def receive(
    engine: Engine, request: Receive, *, wait_ms: int, first: Request | None = None
) -> pa.Table:
    """Lease messages and read them; wait up to ``wait_ms`` for the first.

    Args:
        first: a request that is decided before; if it is refused, nothing is leased.
    """
    until_ms = engine.clock.now_ms() + wait_ms
    leasing = _InThread(engine, request, until_ms=until_ms, first=first)
    try:
        return _received(engine, leasing)
    except (LogFencedError, StandbyError) as error:
        # These errors say that nothing was changed, and a client repeats the call elsewhere.
        if first is None or leasing.first is not None:
            raise
        log.warning("a receive that has acked returns nothing: %s", error.message)
        return schema.RECEIVED.empty_table()


def _received(engine: Engine, leasing: _InThread) -> pa.Table:
    delivery = leasing.result()
    if delivery is None:
        return schema.RECEIVED.empty_table()
    request = leasing.request
    try:
        table = readable(engine, delivery, request=request)
    except BaseException:  # the messages reach no caller
        release_delivery(engine, delivery)
        raise
    engine.meter.delivered(request.group, request.topic, size=table["body"])
    return table


def load_missing(engine: Engine, delivery: Delivery, *, row_filter: ReceiveFilter | None) -> bool:
    """Load what the receive lacked, and dead-letter what it marked.

    Return True if another try may find more.
    """
    for page in delivery.pages:
        _load_page(engine, page)
    for wanted in delivery.backlogs:
        _load_backlog(engine, wanted)
    if delivery.unjudged and isinstance(row_filter, CachedSqlFilter):
        judge(
            engine,
            row_filter,
            topic_id=delivery.topic_id,
            unjudged=delivery.unjudged,
            turn=delivery.delivery,
        )
    dead_lettered = (
        dead_letter_exhausted(engine, None, limit=AT_ONCE).n if delivery.exhausted else 0
    )
    return bool(delivery.pages or delivery.backlogs or delivery.unjudged or dead_lettered)


def _load_page(engine: Engine, page: PageWanted) -> None:
    found = engine.database.index(page.topic_id, page.queue_id, start=page.start, stop=page.stop)
    rows = IndexRows(
        found.base, found.position, found.row, found.message_group_hash, found.tag_hash
    )
    if len(rows):
        engine.submit(FillIndex(page.topic_id, page.queue_id, rows))
    topic = engine.state.topics.get(page.topic_id)
    if topic is None:  # deleted meanwhile
        return
    # Expired offsets are not needed. Any other missing row would make the receive ask for it
    # forever.
    wanted = max(page.start, topic.queues[page.queue_id].min_offset)
    there = rows.base if len(rows) else page.stop
    if wanted < there:
        raise StorageError(
            f"The database lacks offsets {wanted} to {there} of queue {page.queue_id} of topic "
            f"{topic.topic.name}.",
            remedy="Restore the home from a copy, or reset the group's offset beyond them.",
        )


def _load_backlog(engine: Engine, wanted: BacklogWanted) -> None:
    rest = undispatched(engine, wanted.key, stop=wanted.stop)
    groups, offsets = engine.database.backlog(
        wanted.key.topic_id,
        wanted.key.queue_id,
        hashes=np.array(wanted.groups, dtype=np.int64),
        starts=np.array(wanted.starts, dtype=np.int64),
        stop=rest.base,
        limit=KNOWN_PER_GROUP,
    )
    if len(rest):
        groups, offsets = _with_rest(wanted, rest, groups=groups, offsets=offsets)
    found: dict[int, list[int]] = {group: [] for group in wanted.groups}
    for group, offset in zip(groups.tolist(), offsets.tolist(), strict=True):
        found[group].append(offset)
    full = [found[g][-1] + 1 if len(found[g]) >= KNOWN_PER_GROUP else None for g in wanted.groups]
    if wanted.row_filter is not None:
        chosen = wanted_of(engine, wanted.row_filter, key=wanted.key, offset=offsets)
        keep = set(offsets[chosen].tolist())
        found = {group: [o for o in some if o in keep] for group, some in found.items()}
    engine.submit(FillBacklog(wanted, [found[group] for group in wanted.groups], full))


def _with_rest(
    wanted: BacklogWanted, rest: IndexRows, *, groups: Int64s, offsets: Int64s
) -> tuple[Int64s, Int64s]:
    """Join DuckDB's rows of message groups with undispatched ones.

    The result has at most KNOWN_PER_GROUP rows of each group.
    """
    order = np.argsort(wanted.groups)
    known = np.array(wanted.groups, dtype=np.int64)[order]
    starts = np.array(wanted.starts, dtype=np.int64)[order]
    at = np.minimum(np.searchsorted(known, rest.message_group_hash), len(known) - 1)
    behind = np.arange(rest.base, rest.base + len(rest), dtype=np.int64)
    chosen = (known[at] == rest.message_group_hash) & (behind >= starts[at])
    groups = np.concatenate([groups, rest.message_group_hash[chosen]])
    offsets = np.concatenate([offsets, behind[chosen]])
    order = np.argsort(groups, kind="stable")
    _, firsts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(firsts, counts)
    kept = np.sort(order[rank < KNOWN_PER_GROUP])
    return groups[kept], offsets[kept]
