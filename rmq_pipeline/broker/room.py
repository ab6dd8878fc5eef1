"""Room on the disk: the log's reserve, made whole again once there is some."""

from dataclasses import dataclass

from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request, Writer


@dataclass(frozen=True, slots=True)
class RefillReserve(Request):
    """Set aside again what was drawn, when the disk can spare it; nothing is stored."""

    writer: Writer

    def decide(self, state: State, now_ms: int) -> Decision:
        """By the writer thread, because the log makes files meanwhile."""
        self.writer.log.refill_reserve()
        return Decision()
