"""Receives from a queue in which some message groups are barred, permanently or for now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.failures.redeliver import Ended
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.fifo import GroupScan
from rmq_pipeline.broker.receiving.growth import Elders, elders
from rmq_pipeline.broker.receiving.lite import Wanted
from rmq_pipeline.broker.receiving.sieve import QueueSieve
from rmq_pipeline.broker.state import Queue, State, TopicState
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s


@dataclass(frozen=True, slots=True)
class Barrier:
    """Message groups that a receive may not deliver.

    The cursor passes them; they become backlog.
    """

    #: Lite topics of this client, the only groups it gets; None: all groups.
    wanted: Wanted | None
    #: Older queues whose messages come first; None: there are none.
    elders: Elders | None

    @property
    def closed(self) -> bool:
        """Return True if no new row may be scanned, because it is unknown which groups are free."""
        return self.elders is not None and self.elders.unread

    def bars(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        """Return True for each message group that must not be delivered."""
        barred = np.zeros(len(groups), dtype=np.bool_)
        if self.wanted is not None:
            barred |= ~np.isin(groups, self.wanted.hashes)
        if self.elders is not None:
            barred |= self.elders.blocked(groups)
        return barred

    def open_groups(self, consumption: Consumption) -> list[int]:
        """Return the groups with a backlog that may be delivered now."""
        ready = consumption.ready
        if self.wanted is None:
            groups = list(ready)
        else:
            groups = [group for group in self.wanted.hashes.tolist() if group in ready]
        if self.elders is not None:
            groups = [group for group in groups if not self.elders.blocks(group)]
        return groups


def barriers(
    state: State, topic: TopicState, *, group: Group, client_id: str
) -> Sequence[Barrier | None]:
    """Return the barrier of each queue of a topic, None for none; empty if no queue has one."""
    waits = elders(state, topic, group=group)
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
    waits = elders(state, topic, group=group)
    before = waits[queue_id] if waits else None
    return sum(before is None or not before.blocks(one) for one in groups)


class BarredScan(GroupScan):
    """Scan in order by message group that skips the barred groups."""

    def __init__(
        self,
        queue: Queue,
        consumption: Consumption,
        *,
        sieve: QueueSieve | None,
        ended: Ended,
        barrier: Barrier,
    ) -> None:
        self._barrier = barrier
        keep = ~barrier.bars(ended.group)
        allowed = Ended(ended.offset[keep], ended.attempt[keep], ended.group[keep], ended.events)
        super().__init__(queue, consumption, sieve=sieve, ended=allowed)
        if barrier.elders is not None and barrier.elders.condemned:
            self._condemned_groups = {**barrier.elders.condemned, **consumption.condemned}

    def _open_groups(self) -> list[int]:
        return self._barrier.open_groups(self.consumption)

    def _fresh_left(self) -> bool:
        return not self._barrier.closed and super()._fresh_left()

    def _blocked(self, groups: Int64s) -> npt.NDArray[np.bool_] | None:
        held = super()._blocked(groups)
        barred = self._barrier.bars(groups)
        return barred if held is None else held | barred
