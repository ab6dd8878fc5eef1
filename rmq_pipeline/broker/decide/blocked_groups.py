"""Receives from a queue in which some message groups are barred, permanently or for now."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.fifo import GroupScan
from rmq_pipeline.broker.decide.redeliver import Ended
from rmq_pipeline.broker.decide.scan import Asked
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.filter_cache import QueueFilter
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.broker.state.members import Wanted
from rmq_pipeline.broker.state.state import Queue, State, TopicState
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s


@dataclass(frozen=True, slots=True)
class Predecessors:
    """Older queues with messages that a consumer group must settle first."""

    #: True if messages from before the resize are unread: they may belong to any message group.
    unread: bool
    #: State of the consumer group on the older queues with unsettled messages.
    consumptions: tuple[Consumption, ...]
    #: Message groups quarantined in the older queues, and the failure of each as JSON.
    quarantined: Mapping[int, str]

    def blocks(self, group: int) -> bool:
        """Return True if the message group must wait. Messages without a group never wait."""
        if not group:
            return False
        return self.unread or any(group in c.held or group in c.backlog for c in self.consumptions)

    def blocked(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        """Return ``blocks`` for many message groups."""
        distinct, where = np.unique(groups, return_inverse=True)
        waits = np.fromiter(map(self.blocks, distinct.tolist()), np.bool_, count=len(distinct))
        chosen: npt.NDArray[np.bool_] = waits[where]
        return chosen


def predecessors(state: State, topic: TopicState, *, group: Group) -> Sequence[Predecessors | None]:
    """Return for each queue the older queues it waits for; None: it waits for none.

    The result is empty if no queue waits.
    """
    if not topic.topic.growths or state.order(group, topic.topic.topic_id) is not ByGroup:
        return ()
    found: list[Predecessors | None] = []
    waits = None
    for ends in topic.topic.growths:
        found.extend([waits] * (len(ends) - len(found)))
        waits = _predecessors(state, topic, group=group, ends=ends)
    found.extend([waits] * (len(topic.queues) - len(found)))
    return found if any(found) else ()


def _predecessors(
    state: State, topic: TopicState, *, group: Group, ends: Sequence[int]
) -> Predecessors | None:
    """Return what is unsettled before these end offsets of the first queues."""
    unread, unsettled = False, []
    quarantined: dict[int, str] = {}
    for queue_id, end in enumerate(ends):
        queue = topic.queues[queue_id]
        consumption = state.consumption(group, topic.topic.topic_id, queue_id=queue_id)
        quarantined.update(consumption.quarantined)
        if max(consumption.cursor, queue.min_offset) < end:
            unread = True
        if consumption.unsettled_before(end):
            unsettled.append(consumption)
    if unread or unsettled or quarantined:
        return Predecessors(unread, tuple(unsettled), quarantined)
    return None


@dataclass(frozen=True, slots=True)
class Barrier:
    """Message groups that a receive may not deliver.

    The cursor passes them; they become backlog.
    """

    #: Lite topics of this client, the only groups it gets; None: all groups.
    wanted: Wanted | None
    #: Older queues whose messages come first; None: there are none.
    predecessors: Predecessors | None

    @property
    def closed(self) -> bool:
        """Return True if no new row may be scanned, because it is unknown which groups are free."""
        return self.predecessors is not None and self.predecessors.unread

    def bars(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        """Return True for each message group that must not be delivered."""
        barred = np.zeros(len(groups), dtype=np.bool_)
        if self.wanted is not None:
            barred |= ~np.isin(groups, self.wanted.hashes)
        if self.predecessors is not None:
            barred |= self.predecessors.blocked(groups)
        return barred

    def open_groups(self, consumption: Consumption) -> list[int]:
        """Return the groups with a backlog that may be delivered now."""
        ready = consumption.ready
        if self.wanted is None:
            groups = list(ready)
        else:
            groups = [group for group in self.wanted.hashes.tolist() if group in ready]
        if self.predecessors is not None:
            groups = [group for group in groups if not self.predecessors.blocks(group)]
        return groups


def barriers(
    state: State, topic: TopicState, *, group: Group, client_id: str
) -> Sequence[Barrier | None]:
    """Return the barrier of each queue of a topic, None for none; empty if no queue has one."""
    waits = predecessors(state, topic, group=group)
    if topic.topic.type == "lite":
        wanted = state.subscriptions.of(group.group_id, topic.topic.topic_id, client_id=client_id)
        if not waits:
            return [Barrier(wanted, None)] * len(topic.queues)
        return [Barrier(wanted, one) for one in waits]
    return [None if one is None else Barrier(None, one) for one in waits]


def open_backlogs(state: State, topic: TopicState, *, group: Group, queue_id: int) -> int:
    """Return how many message groups of a queue have a backlog that some client may get now."""
    topic_id = topic.topic.topic_id
    ready = state.consumption(group, topic_id, queue_id=queue_id).ready
    if not ready:
        return 0
    groups: Iterable[int] = ready
    if topic.topic.type == "lite":
        clients = state.subscriptions.clients(group.group_id, topic_id).values()
        wanted = {one for client in clients for one in client.hashes.tolist()}
        groups = wanted & ready.keys()
    waits = predecessors(state, topic, group=group)
    before = waits[queue_id] if waits else None
    return sum(before is None or not before.blocks(one) for one in groups)


class BarredScan(GroupScan):
    """Scan in order by message group that skips the barred groups."""

    def __init__(
        self,
        queue: Queue,
        consumption: ByGroup,
        *,
        row_filter: QueueFilter | None,
        asked: Asked,
        barrier: Barrier,
    ) -> None:
        self._barrier = barrier
        super().__init__(queue, consumption, row_filter=row_filter, asked=asked)
        if barrier.predecessors is not None and barrier.predecessors.quarantined:
            self._quarantined = {**barrier.predecessors.quarantined, **consumption.quarantined}

    def _ended(self, asked: Asked) -> Ended:
        ended = super()._ended(asked)
        keep = ~self._barrier.bars(ended.group)
        return Ended(ended.offset[keep], ended.attempt[keep], ended.group[keep], ended.events)

    def _open_groups(self) -> list[int]:
        return self._barrier.open_groups(self.consumption)

    def _fresh_left(self) -> bool:
        return not self._barrier.closed and super()._fresh_left()

    def _blocked(self, groups: Int64s) -> npt.NDArray[np.bool_] | None:
        held = super()._blocked(groups)
        barred = self._barrier.bars(groups)
        return barred if held is None else held | barred
