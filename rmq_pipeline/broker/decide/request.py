"""A request to the writer, and the decision about it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pyarrow as pa

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame_builder import Payload, bytes_of, payload_of

#: Upper estimates: bytes of a section besides its columns and own schema, and of an event besides
#: its texts.
_SECTION_BYTES = 4096
_EVENT_BYTES = 96


@dataclass(slots=True)
class Decision:
    """Rows that a request stores, and its answer once they are on disk."""

    answer: Any = None
    placed: list[Placed] = field(default_factory=list)
    events: list[EventRows] = field(default_factory=list)
    keyed_state: list[pa.RecordBatch] = field(default_factory=list)
    #: Changes of memory that the log does not hold: caches, and delays that end with the process.
    unlogged: list[Callable[[State], object]] = field(default_factory=list)
    #: True if the writer refills the log's reserve now; the answer is then True if it is whole.
    refills_reserve: bool = False
    #: Serialized ``placed`` for the log, set by ``encode``.
    payloads: list[Payload] = field(default_factory=list)

    def stores(self) -> bool:
        """Return True if there is something to store."""
        return bool(self.placed or self.events or self.keyed_state)

    def encode(self) -> int:
        """Serialize the messages once.

        Return the most bytes that a frame needs for the decision.
        """
        size, self.payloads = _SECTION_BYTES, []
        for placed in self.placed:
            payload = payload_of(placed.batch)
            self.payloads.append(payload)
            size += _SECTION_BYTES + bytes_of(payload)
        for rows in self.events:
            size += len(rows) * _EVENT_BYTES + rows.text_bytes()
        for batch in self.keyed_state:
            # Exact, with dictionaries: each is an IPC message of its own, of any length.
            size += _SECTION_BYTES + frame.encoded_bytes(batch)
        return size


#: A request with this many rows is bulk.
BULK_ROWS: Final = 256
#: Window of a caller, by name and epoch; a newer epoch fences the caller off.
Fence = tuple[str, int]


class Request(ABC):
    """Request of a verb; ``decide`` is pure: it does not change the state, and does no I/O."""

    #: True if it may use the reserve on a full disk: all requests except those that add messages.
    uses_reserve: ClassVar[bool] = True

    def is_bulk(self) -> bool:
        """Return True if deciding is slow enough that it should overlap a write."""
        return False

    @abstractmethod
    def decide(self, state: State, now_ms: int) -> Decision:
        """Return what to store and answer; raise RocketMQError to refuse."""


@dataclass(frozen=True, slots=True)
class CheckFence(Request):
    """Query that fails if a newer epoch has opened the window; without a window it only waits."""

    window: Fence | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store nothing."""
        state.fence(self.window)
        return Decision()


@dataclass(frozen=True, slots=True)
class RefillReserve(Request):
    """Request that refills the log's reserve if the disk has space; nothing is stored.

    The log also records how far it is synced, which costs a system call if it has grown.
    """

    window: Fence | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Let the writer refill it, whose thread also creates the log files."""
        state.fence(self.window)
        return Decision(refills_reserve=True)
