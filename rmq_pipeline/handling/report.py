"""Reports of windows and their micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: Why a window ended. "fenced": a newer window of the group took over.
Ended = Literal["idle", "length", "fenced", "yielded"]


class MessageFailure(NamedTuple):
    """A message whose handler call failed, for the log of the run."""

    message_id: str
    reason: str
    error_type: str
    traceback: str


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One settled micro-batch."""

    epoch: int
    number: int
    #: Received messages; ``released`` of them were not tried.
    messages: int
    acked: int
    retried: int
    dead_lettered: int
    parked: int
    released: int
    #: Rows and files added to the sink.
    rows: int
    files: int
    bytes: int
    #: topic -> number of published messages.
    published: dict[str, int]
    #: Seconds from receive to settle, and the engine's share of them.
    seconds: float
    work_s: float
    #: One failure of each kind.
    failures: Sequence[MessageFailure] = ()


@dataclass(slots=True)
class WindowReport:
    """A window: the sum of its micro-batches."""

    consumer: str
    topic: str
    group: str
    #: Owner of the open window, if this one yielded to it.
    yielded_to: str | None = None
    ended: Ended = "idle"
    #: Epoch of the window; the last one if it was reopened.
    epoch: int = 0
    batches: int = 0
    #: Times that a delivery had ended early or an answer was lost, and all messages in flight were
    #: redelivered.
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
    #: Staged files of dead windows that were deleted before the first receive.
    swept_files: int = 0

    def add(self, batch: BatchReport) -> None:
        """Add the counts of a micro-batch."""
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
