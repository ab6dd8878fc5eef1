"""Receiving from a queue of which some message groups are not for this receiver, or not yet."""

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
    """Which message groups a receive may not be given; what the cursor passes of them waits."""

    #: The only ones for this client; None: any.
    wanted: Wanted | None
    #: Older queues that hold what comes first; None: there is nothing.
    elders: Elders | None

    @property
    def closed(self) -> bool:
        """Whether nothing new is looked at: which groups are free is not known yet."""
        return self.elders is not None and self.elders.unread

    def bars(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        """For each message group whether it is not to be given."""
        barred = np.zeros(len(groups), dtype=np.bool_)
        if self.wanted is not None:
            barred |= ~np.isin(groups, self.wanted.hashes)
        if self.elders is not None:
            barred |= self.elders.blocked(groups)
        return barred

    def open_groups(self, consumption: Consumption) -> list[int]:
        """Groups with a backlog that may be given now."""
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
    """For each queue of a topic what is barred; empty when nothing is anywhere."""
    waits = elders(state, topic, group=group)
    if topic.topic.type == "lite":
        wanted = state.subscriptions.of(group.group_id, topic.topic.topic_id, client_id=client_id)
        if not waits:
            return [Barrier(wanted, None)] * len(topic.queues)
        return [Barrier(wanted, one) for one in waits]
    return [None if one is None else Barrier(None, one) for one in waits]


def open_backlogs(state: State, topic: TopicState, *, group: Group, queue_id: int) -> int:
    """Message groups of a queue with a backlog that somebody may be given now."""
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
    """A scan in order by message group that leaves some of the groups where they are."""

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
