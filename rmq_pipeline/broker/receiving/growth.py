"""Order across the growth of a topic: a moved message group waits for what it left behind.

With more queues, some message groups go to new ones (and never back: consistent hashing). What a
consumer group has not settled of such a group lies in an older queue and comes first. So a new
queue opens for a consumer group when it has looked at all that the older queues held at the time,
and then for each message group when nothing of it is unsettled there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.state import State, TopicState
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s


@dataclass(frozen=True, slots=True)
class Elders:
    """The older queues that hold something a consumer group must settle first."""

    #: Something of before the growth was not even looked at: any message group may be in it.
    unread: bool
    #: What the consumer group has done with those where something is unsettled.
    consumptions: tuple[Consumption, ...]
    #: Message groups that were given up there, and JSON of the failure for which each was.
    condemned: Mapping[int, str]

    def blocks(self, group: int) -> bool:
        """Whether the message group waits; messages without one never do."""
        if not group:
            return False
        return self.unread or any(group in c.held or group in c.backlog for c in self.consumptions)

    def blocked(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        """The same for many."""
        distinct, where = np.unique(groups, return_inverse=True)
        waits = np.fromiter(map(self.blocks, distinct.tolist()), np.bool_, count=len(distinct))
        chosen: npt.NDArray[np.bool_] = waits[where]
        return chosen


def elders(state: State, topic: TopicState, *, group: Group) -> Sequence[Elders | None]:
    """For each queue of a topic what it has to wait for; None: nothing. Empty: no queue has to."""
    if not topic.topic.growths or not state.keeps_order(group, topic.topic.topic_id):
        return ()
    found: list[Elders | None] = []
    waits = None
    for ends in topic.topic.growths:
        found.extend([waits] * (len(ends) - len(found)))
        waits = _elders(state, topic, group=group, ends=ends)
    found.extend([waits] * (len(topic.queues) - len(found)))
    return found if any(found) else ()


def _elders(state: State, topic: TopicState, *, group: Group, ends: Sequence[int]) -> Elders | None:
    """What is unsettled before these ends of the first queues."""
    unread, unsettled = False, []
    condemned: dict[int, str] = {}
    for queue_id, end in enumerate(ends):
        queue = topic.queues[queue_id]
        consumption = state.consumption(group, topic.topic.topic_id, queue_id=queue_id)
        condemned.update(consumption.condemned)
        if max(consumption.cursor, queue.min_offset) < end:
            unread = True
        if consumption.unsettled_before(end):
            unsettled.append(consumption)
    if unread or unsettled or condemned:
        return Elders(unread, tuple(unsettled), condemned)
    return None
