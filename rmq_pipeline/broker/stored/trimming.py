"""Index trimming: keeping the read-ahead of all queues within its limit."""

from dataclasses import dataclass

from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request


@dataclass(frozen=True, slots=True)
class TrimIndex(Request):
    """Request that drops the least recently used pages beyond ``pages``."""

    pages: int
    #: Log position before which all rows can be loaded again.
    dispatched: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Drop the same share of each queue's pages; store nothing."""
        state.forget_changes(self.dispatched)
        queues = [queue for topic in state.topics.values() for queue in topic.queues]
        held = sum(queue.index.pages for queue in queues)
        if held > self.pages:
            for queue in queues:
                queue.index.drop(queue.index.pages * self.pages // held, self.dispatched)
        return Decision()
