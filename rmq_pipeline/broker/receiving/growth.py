"""Order after a topic was resized: a moved message group waits for its messages in older queues.

With more queues, some message groups move to new ones, and never back (consistent hashing). A
consumer group's unsettled messages of a moved group lie in an older queue and come first. So a new
queue is closed to a consumer group until the group has read the older queues up to their ends at
the resize. After that, each message group opens when it has nothing unsettled there.
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
    """Older queues with messages that a consumer group must settle first."""

    #: True if messages from before the resize are unread: they may belong to any message group.
    unread: bool
    #: State of the consumer group on the older queues with unsettled messages.
    consumptions: tuple[Consumption, ...]
    #: Message groups quarantined in the older queues, and the failure of each as JSON.
    condemned: Mapping[int, str]

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


def elders(state: State, topic: TopicState, *, group: Group) -> Sequence[Elders | None]:
    """Return for each queue the older queues it waits for; None: it waits for none.

    The result is empty if no queue waits.
    """
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
    """Return what is unsettled before these end offsets of the first queues."""
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
