"""Room on the disk: what gets a part of the log's reserve, and when that is made whole again."""

from dataclasses import dataclass
from pathlib import Path

from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request, Writer
from rmq_pipeline.store.reserve import Reserve


def part_of(reserve_bytes: int) -> int:
    """How much of a reserve to give at a time."""
    return max(1, reserve_bytes // 8)


def give_up_reserve(folder: Path, reserve_bytes: int) -> None:
    """Give a part of the reserve to the disk before its log is open.

    Raises:
        StoreFullError: nothing is left of it.
    """
    reserve = Reserve(folder, wanted_bytes=reserve_bytes)
    try:
        reserve.draw(part_of(reserve_bytes))
    finally:
        reserve.close()


@dataclass(frozen=True, slots=True)
class RefillReserve(Request):
    """Set aside again what was drawn, when the disk can spare it; nothing is stored."""

    writer: Writer

    def decide(self, state: State, now_ms: int) -> Decision:
        """By the writer thread, because the log makes files meanwhile."""
        self.writer.log.refill_reserve()
        return Decision()
