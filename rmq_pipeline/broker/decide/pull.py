"""Ranges of offsets that a pull reads."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import IllegalOffsetError, IllegalQueueError
from rmq_pipeline.message import Int64s


@dataclass(frozen=True, slots=True)
class Stretch:
    """Offsets [start, stop) of a queue, and their places as far as the read-ahead has them."""

    queue_id: int
    start: int
    stop: int
    places: Places

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def offsets(self) -> Int64s:
        """Array of all offsets."""
        return np.arange(self.start, self.stop, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class FindStretches(Request):
    """Query for the messages at and after some positions."""

    topic: str
    positions: Mapping[int, int]
    rows: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the topic's id and a range for each queue, possibly empty, as the answer.

        Raises:
            IllegalQueueError: the queue does not exist.
            IllegalOffsetError: the queue ends before the position.
        """
        topic = state.topic(self.topic)
        found = []
        for queue_id, position in self.positions.items():
            if not 0 <= queue_id < len(topic.queues):
                raise IllegalQueueError(f"Topic {self.topic} has no queue {queue_id}.")
            queue = topic.queues[queue_id]
            if position > queue.max_offset:
                raise IllegalOffsetError(
                    f"Queue {queue_id} of topic {self.topic} ends at offset {queue.max_offset},"
                    f" before {position}."
                )
            start = max(position, queue.min_offset)
            stop = min(queue.max_offset, start + self.rows)
            known = queue.index.locate(np.arange(start, stop, dtype=np.int64))
            found.append(Stretch(queue_id, start, stop, Places(*known)))
        return Decision((topic.topic.topic_id, found))
