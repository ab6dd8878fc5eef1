"""Keeping the read-ahead of all queues together within its bound."""

from dataclasses import dataclass

from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request


@dataclass(frozen=True, slots=True)
class TrimIndex(Request):
    """Forget pages beyond ``pages``, those used longest ago; nothing is stored."""

    pages: int
    #: Log position before which everything can be loaded again.
    dispatched: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Each queue gives up the same share of what is too much."""
        queues = [queue for topic in state.topics.values() for queue in topic.queues]
        held = sum(queue.index.pages for queue in queues)
        if held > self.pages:
            for queue in queues:
                queue.index.drop(queue.index.pages * self.pages // held, self.dispatched)
        return Decision()
