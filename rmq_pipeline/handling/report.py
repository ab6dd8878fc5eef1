"""What windows and their micro-batches report."""

from dataclasses import dataclass, field
from typing import Literal

#: Why a window ended. "fenced": a newer window of the group took over.
Ended = Literal["idle", "length", "fenced", "yielded"]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One settled micro-batch."""

    epoch: int
    number: int
    #: Received; ``released`` of them are given back untried.
    messages: int
    acked: int
    retried: int
    dead_lettered: int
    parked: int
    released: int
    #: Rows and files that now count in the sink.
    rows: int
    files: int
    bytes: int
    #: topic -> messages sent onward.
    published: dict[str, int]
    #: From the receive to the settle, and the engine's part of it.
    seconds: float
    work_s: float


@dataclass(slots=True)
class WindowReport:
    """A window: the sum of its micro-batches."""

    consumer: str
    topic: str
    group: str
    #: Who has the window, when this one found it taken.
    yielded_to: str | None = None
    ended: Ended = "idle"
    #: The window's epoch, the last one if it was opened anew on the way.
    epoch: int = 0
    batches: int = 0
    #: Times that a delivery had ended early or its answer got lost, and all in flight came again.
    lost: int = 0
    messages: int = 0
    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    parked: int = 0
    released: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    published: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    #: Staged files of windows that died, deleted before the first receive.
    swept_files: int = 0

    def add(self, batch: BatchReport) -> None:
        """Count a micro-batch."""
        self.batches += 1
        for name in (
            "messages",
            "acked",
            "retried",
            "dead_lettered",
            "parked",
            "released",
            "rows",
            "files",
            "bytes",
        ):
            setattr(self, name, getattr(self, name) + getattr(batch, name))
        for topic, n in batch.published.items():
            self.published[topic] = self.published.get(topic, 0) + n
