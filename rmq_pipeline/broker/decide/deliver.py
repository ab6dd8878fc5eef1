"""Receiving: choosing the messages that a receive leases, queue by queue."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from rmq_pipeline.broker.decide.background import earlier
from rmq_pipeline.broker.decide.blocked_groups import BarredScan, Barrier, barriers
from rmq_pipeline.broker.decide.fifo import BatchScan, GroupScan
from rmq_pipeline.broker.decide.redeliver import exhausts
from rmq_pipeline.broker.decide.request import BULK_ROWS, Decision, Request
from rmq_pipeline.broker.decide.scan import Asked, QueueScan, Taken
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.filter_cache import ReceiveFilter
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.broker.state.members import QueueLock
from rmq_pipeline.broker.state.queue_index import IndexRows
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.broker.state.state import State, TopicState
from rmq_pipeline.errors import IllegalQueueError
from rmq_pipeline.group import Group
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind

#: Smallest share of one queue. The cost of a receive is mostly per queue, so a receive of a few
#: messages takes them from few queues.
SHARE_ROWS = 32
#: How a queue is scanned in each order.
_SCANS: Final[dict[type[Consumption], type[Any]]] = {
    Consumption: QueueScan,
    ByGroup: GroupScan,
    ByQueue: BatchScan,
}


@dataclass(frozen=True, slots=True)
class PageWanted:
    """Rows of a queue's read-ahead that must be loaded: offsets [start, stop)."""

    topic_id: int
    queue_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BacklogWanted:
    """Message groups whose backlog must be looked up, before offset ``stop``."""

    key: QueueKey
    groups: list[int]
    starts: list[int]
    stop: int
    #: Number of offset resets of the group at that time.
    resets: int
    #: Filter of the receive; None: all messages.
    row_filter: ReceiveFilter | None


@dataclass(slots=True)
class Delivery:
    """Messages that a receive leased, and the data it lacked to lease more."""

    group_id: int
    topic_id: int
    delivery: int
    taken: list[tuple[int, Taken]] = field(default_factory=list)
    pages: list[PageWanted] = field(default_factory=list)
    backlogs: list[BacklogWanted] = field(default_factory=list)
    #: Rows whose filter result is unknown, by queue_id.
    unjudged: list[tuple[int, list[IndexRows]]] = field(default_factory=list)
    #: True if rows are marked for the dead letters.
    exhausted: bool = False
    #: True if the receive stopped at its scan limit: more messages may follow.
    scanned_out: bool = False
    #: True if queues were skipped because other clients have locked them.
    locked: bool = False
    #: When the next unsettled message becomes visible, if nothing was leased; None: never.
    next_visible_ms: int | None = None

    def __len__(self) -> int:
        return sum(len(taken) for _, taken in self.taken)


@dataclass(frozen=True, slots=True)
class Receive(Request):
    """Receive with checked arguments."""

    topic: str
    group: str
    limit: int
    invisible_duration_ms: int
    #: Filter of the receive; None: all messages.
    row_filter: ReceiveFilter | None
    client_id: str
    window: tuple[str, int] | None
    #: Random number that identifies this delivery in receipts.
    delivery: int
    #: The only queues to read; None: all that no other client has locked.
    queue_ids: frozenset[int] | None = None
    #: Hash of the attempt id of a receive that may be repeated (order by queue); 0: none.
    attempt_id_hash: int = 0
    #: True if the receive may return the lease of an earlier call of the same attempt.
    repeats: bool = True

    def is_bulk(self) -> bool:
        """Return True if it may lease many messages."""
        return self.limit >= BULK_ROWS

    def decide(self, state: State, now_ms: int) -> Decision:
        """Lease up to ``limit`` messages, spread over the queues that have any."""
        topic, group = state.topic(self.topic), state.group(self.group)
        epoch = state.fence(self.window)
        answer = Delivery(group.group_id, topic.topic.topic_id, self.delivery)
        decision = Decision(answer)
        pace = state.paces.of(group.group_id)
        limit = self.limit if pace is None else min(self.limit, pace.allows(now_ms))
        consumptions = [
            state.consumption(group, topic.topic.topic_id, queue_id=queue_id)
            for queue_id in range(len(topic.queues))
        ]
        locked = state.queue_locks.of_others(
            group.group_id, topic.topic.topic_id, client_id=self.client_id, now_ms=now_ms
        )
        closed = self._closed(topic, group, locked=locked)
        scans = self._scans(
            state, topic, consumptions=consumptions, group=group, closed=closed, now_ms=now_ms
        )
        if not all(consumption.touched for consumption in consumptions):
            decision.events.extend(subscribe_events(state, topic, group=group, now_ms=now_ms))
        if topic.topic.type == "priority":
            scans.take_highest(limit)
        else:
            scans.take(limit, turn=now_ms + self.delivery)
        for queue_id, scan in scans.by_queue():
            if not scan.is_idle():
                self._lease(decision, queue_id, scan=scan, epoch=epoch, now_ms=now_ms)
        if not answer.taken:
            for queue_id, consumption in enumerate(consumptions):
                if queue_id not in closed:
                    soonest = consumption.next_after(now_ms)
                    answer.next_visible_ms = earlier(answer.next_visible_ms, soonest)
            answer.locked = bool(locked) and self.queue_ids is None
            for lock in locked.values() if answer.locked else ():
                answer.next_visible_ms = earlier(answer.next_visible_ms, lock.expires_at_ms)
            if pace is not None and not limit:
                next_ms = pace.next_ms(now_ms)
                answer.next_visible_ms = earlier(answer.next_visible_ms, next_ms)
            if topic.topic.growths:  # new queues may wait for the messages that were skipped
                answer.scanned_out |= any(
                    scan.cursor > scan.consumption.cursor for _, scan in scans.by_queue()
                )
        return decision

    def _closed(
        self, topic: TopicState, group: Group, *, locked: Mapping[int, QueueLock]
    ) -> Collection[int]:
        """Return the queues that must not be read: locked by another client, or not requested.

        Raises:
            IllegalQueueError: a requested queue does not exist.
            QueueLockedError: another client has locked a requested queue.
        """
        if self.queue_ids is None:
            return locked
        for queue_id in sorted(self.queue_ids):
            if not 0 <= queue_id < len(topic.queues):
                raise IllegalQueueError(f"Topic {self.topic} has no queue {queue_id}.")
            if queue_id in locked:
                refusal = locked[queue_id].refusal(queue_id, topic=self.topic, group=group.name)
                raise refusal
        return set(range(len(topic.queues))) - self.queue_ids

    def _scans(
        self,
        state: State,
        topic: TopicState,
        *,
        consumptions: Sequence[Consumption],
        group: Group,
        closed: Collection[int],
        now_ms: int,
    ) -> "_Scans":
        """Return the scans of the queues that may have messages to deliver."""
        barred = barriers(state, topic, group=group, client_id=self.client_id)
        may_repeat = self.repeats and self.attempt_id_hash != 0
        scans = _Scans(
            topic,
            consumptions,
            barred=barred,
            row_filter=self.row_filter,
            asked=Asked(group, now_ms, self.attempt_id_hash, self.repeats),
            queue_ids=[
                queue_id
                for queue_id, queue in enumerate(topic.queues)
                if queue_id not in closed
                and (
                    barred
                    or not consumptions[queue_id].has_nothing(
                        queue.max_offset, now_ms, may_repeat=may_repeat
                    )
                )
            ],
        )
        if may_repeat:
            scans.keep_repeated()
        return scans

    def _lease(
        self, decision: Decision, queue_id: int, *, scan: QueueScan, epoch: int, now_ms: int
    ) -> None:
        answer: Delivery = decision.answer
        key = QueueKey(answer.group_id, answer.topic_id, queue_id)
        decision.events.extend(key.events(scan.ended.events, now_ms))
        answer.exhausted |= exhausts(scan.ended.events) or scan.has_exhausted
        taken = scan.taken()
        if len(taken):
            answer.taken.append((queue_id, taken))
            decision.events.append(
                EventRows(
                    kind=Kind.LEASE,
                    at_ms=now_ms,
                    group_id=key.group_id,
                    topic_id=key.topic_id,
                    queue_id=queue_id,
                    queue_offset=taken.offset,
                    attempt=taken.attempt,
                    visible_at_ms=now_ms + self.invisible_duration_ms,
                    delivery=self.delivery,
                    epoch=epoch,
                    attempt_id_hash=scan.attempt_id_hash,
                    message_group_hash=taken.group,
                    client_id=self.client_id or None,
                )
            )
        decision.events.extend(key.events(scan.progress_events(taken, now_ms), now_ms))
        skipped = scan.skipped()
        if skipped is not None:
            groups, offsets = skipped
            decision.unlogged.append(partial(State.learn, key=key, groups=groups, offsets=offsets))
        if scan.page_wanted is not None:
            start, stop = scan.page_wanted
            answer.pages.append(PageWanted(key.topic_id, queue_id, start, stop))
        if scan.unjudged:
            answer.unjudged.append((queue_id, scan.unjudged))
        wanting = scan.backlog_wanted()
        if wanting:
            backlog = scan.consumption.backlog
            starts = [backlog[group].more_from or 0 for group in wanting]
            stop, resets = scan.consumption.cursor, scan.consumption.resets
            answer.backlogs.append(
                BacklogWanted(key, wanting, starts, stop, resets, self.row_filter)
            )
        answer.scanned_out |= scan.scanned_out


class _Scans:
    """Scans of a receive, each made when the receive comes to its queue.

    A receive of a few messages mostly finds them in one queue, and a scan costs as much as they do.
    Ended leases of the other queues wait for a receive that comes to them, or for upkeep.
    """

    def __init__(
        self,
        topic: TopicState,
        consumptions: Sequence[Consumption],
        *,
        barred: Sequence[Barrier | None],
        row_filter: ReceiveFilter | None,
        asked: Asked,
        queue_ids: list[int],
    ) -> None:
        """Prepare the scans.

        Args:
            barred: barrier of each queue; empty: no queue has one.
            queue_ids: queues that may have messages, ascending.
        """
        self._topic = topic
        self._consumptions = consumptions
        self._barred = barred
        self._row_filter = row_filter
        self._asked = asked
        self._queue_ids = queue_ids
        self._made: dict[int, QueueScan] = {}

    def by_queue(self) -> Iterator[tuple[int, QueueScan]]:
        """Yield the scans that were made, in the order in which messages are returned."""
        highest_first = self._topic.topic.type == "priority"
        for queue_id in sorted(self._made, reverse=highest_first):
            yield queue_id, self._made[queue_id]

    def keep_repeated(self) -> None:
        """Keep only the queues whose batch of this attempt is still leased, if any is."""
        again = [
            queue_id
            for queue_id in self._queue_ids
            if isinstance(self._consumptions[queue_id], ByQueue) and self._scan(queue_id).again
        ]
        if again:
            self._queue_ids = again
            self._made = {queue_id: self._made[queue_id] for queue_id in again}

    def take(self, limit: int, *, turn: int) -> None:
        """Take a fair share of each queue, then the rest from the queues that have more.

        Args:
            limit: most messages to take.
            turn: number that decides the order of the queues; it changes from receive to receive,
                so that no queue is always last.
        """
        left = limit
        # By a hash, not in turns: beside blocked queues, the next open one would get their turns.
        queue_ids = sorted(self._queue_ids, key=lambda queue_id: hash((turn, queue_id)))
        if not 0 < limit <= SHARE_ROWS:  # the shares are those of the queues with messages
            queue_ids = [queue_id for queue_id in queue_ids if self._scan(queue_id).may_have_more()]
        while left > 0 and queue_ids:
            share = max(SHARE_ROWS, -(-left // len(queue_ids)))
            for queue_id in queue_ids:
                left -= self._scan(queue_id).take(min(share, left))
                if left <= 0:
                    return
            queue_ids = [queue_id for queue_id in queue_ids if self._scan(queue_id).may_have_more()]

    def take_highest(self, limit: int) -> None:
        """Take all of the queue with the highest priority before any of the next."""
        left = limit
        for scan in [self._scan(queue_id) for queue_id in reversed(self._queue_ids)]:
            while left > 0 and scan.may_have_more():
                left -= scan.take(left)
            if left <= 0 or scan.page_wanted is not None or scan.unjudged or scan.scanned_out:
                return  # this queue may have more messages, which must come before the rest

    def _scan(self, queue_id: int) -> QueueScan:
        scan = self._made.get(queue_id)
        if scan is None:
            scan = self._made[queue_id] = self._new(queue_id)
        return scan

    def _new(self, queue_id: int) -> QueueScan:
        topic_id, queue = self._topic.topic.topic_id, self._topic.queues[queue_id]
        consumption, asked = self._consumptions[queue_id], self._asked
        row_filter = self._row_filter.of(topic_id, queue_id) if self._row_filter else None
        barrier = self._barred[queue_id] if self._barred else None
        if barrier is not None:
            assert isinstance(consumption, ByGroup)
            return BarredScan(
                queue, consumption, row_filter=row_filter, asked=asked, barrier=barrier
            )
        scan: QueueScan = _SCANS[type(consumption)](
            queue, consumption, row_filter=row_filter, asked=asked
        )
        return scan


def subscribe_events(
    state: State, topic: TopicState, *, group: Group, now_ms: int
) -> list[EventRows]:
    """Return CURSOR events at the start of each queue new to the group: all of it becomes lag."""
    events = []
    for queue_id, queue in enumerate(topic.queues):
        key = (group.group_id, topic.topic.topic_id, queue_id)
        known = state.consumptions.get(key)
        if known is None or not known.touched:
            events.append(
                single(
                    Kind.CURSOR,
                    now_ms,
                    offset=queue.min_offset,
                    group_id=key[0],
                    topic_id=key[1],
                    queue_id=queue_id,
                )
            )
    return events


@dataclass(frozen=True, slots=True)
class Subscribe(Request):
    """Request after which the whole topic counts as the group's lag."""

    topic: str
    group: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Set a cursor on each queue that has none."""
        topic, group = state.topic(self.topic), state.group(self.group)
        return Decision(events=subscribe_events(state, topic, group=group, now_ms=now_ms))


def receipts_of(delivery: Delivery) -> Receipts:
    """Return the receipts of a delivery, in delivery order."""
    n = len(delivery)
    queue_id = [np.full(len(taken), q, dtype=np.int32) for q, taken in delivery.taken]
    return Receipts(
        np.full(n, delivery.group_id, dtype=np.int32),
        np.full(n, delivery.topic_id, dtype=np.int32),
        np.concatenate(queue_id),
        np.concatenate([taken.offset for _, taken in delivery.taken]),
        np.full(n, delivery.delivery, dtype=np.int64),
    )
