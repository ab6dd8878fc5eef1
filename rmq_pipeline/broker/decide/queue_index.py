"""Requests that read, load and trim the read-ahead of queues and their backlogs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rmq_pipeline.broker.decide.deliver import BacklogWanted
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.broker.state.queue_index import IndexRows, Places, QueueIndex
from rmq_pipeline.broker.state.schedule import keys_of
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import IllegalOffsetError, IllegalQueueError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID


@dataclass(frozen=True, slots=True)
class TrimIndex(Request):
    """Request that drops the least recently used pages beyond ``pages``."""

    pages: int
    #: Log position before which all rows can be loaded again.
    dispatched: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store nothing: the read-ahead is a cache."""
        return Decision(unlogged=[self._trim])

    def _trim(self, state: State) -> None:
        """Drop the same share of each queue's pages."""
        state.forget_changes(self.dispatched)
        queues = [queue for topic in state.topics.values() for queue in topic.queues]
        held = sum(queue.index.pages for queue in queues)
        if held > self.pages:
            for queue in queues:
                queue.index.drop(queue.index.pages * self.pages // held, self.dispatched)


@dataclass(frozen=True, slots=True)
class FillIndex(Request):
    """Request that adds loaded rows to the read-ahead, which only the writer may change."""

    topic_id: int
    queue_id: int
    rows: IndexRows

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store nothing: the read-ahead is a cache."""
        topic = state.topics.get(self.topic_id)
        if topic is None:
            return Decision()
        index = topic.queues[self.queue_id].index
        return Decision(unlogged=[lambda _: index.fill(self.rows)])


@dataclass(frozen=True, slots=True)
class FillBacklog(Request):
    """Request that adds looked-up offsets to the backlogs of message groups."""

    wanted: BacklogWanted
    #: Offsets of each group, and the offset from which more may follow.
    offsets: list[list[int]]
    more_from: list[int | None]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Add the offsets; groups whose backlog turns out empty have caught up."""
        wanted = self.wanted
        consumption = state.consumptions.get(wanted.key)
        if not isinstance(consumption, ByGroup) or consumption.resets != wanted.resets:
            return Decision()
        looked_up = consumption.looked_up(
            wanted.groups,
            self.offsets,
            starts=wanted.starts,
            more_from=self.more_from,
            stop=wanted.stop,
        )
        events = consumption.empty_backlogs(looked_up)
        return Decision(
            events=wanted.key.events(events, now_ms),
            unlogged=[lambda _: consumption.fill_backlogs(looked_up)],
        )


@dataclass(frozen=True, slots=True)
class FindPlaces(Request):
    """Query for the places of messages of a topic; position -1 if the read-ahead lacks them."""

    topic_id: int
    queue_id: Int32s
    offset: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the places as the answer; store nothing."""
        position = np.full(len(self.offset), -1, dtype=np.int64)
        row = np.zeros(len(self.offset), dtype=np.int32)
        if self.topic_id == SCHEDULE_TOPIC_ID:
            waiting, here = state.schedule.find(keys_of(self.queue_id, self.offset))
            position[here], row[here] = waiting.position, waiting.row
        elif (topic := state.topics.get(self.topic_id)) is not None:
            for queue_id in np.unique(self.queue_id).tolist():
                at = np.flatnonzero(self.queue_id == queue_id)
                if 0 <= queue_id < len(topic.queues):
                    index = topic.queues[queue_id].index
                    position[at], row[at] = index.locate(self.offset[at])
        return Decision(Places(position, row))


@dataclass(frozen=True, slots=True)
class FindUndispatched(Request):
    """Query for a queue's rows before offset ``stop`` that lie at or after a log position."""

    key: QueueKey
    position: int
    stop: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the rows as the answer; store nothing."""
        topic = state.topics.get(self.key.topic_id)
        index = topic.queues[self.key.queue_id].index if topic is not None else QueueIndex()
        return Decision(index.behind(self.position, stop=self.stop))


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
