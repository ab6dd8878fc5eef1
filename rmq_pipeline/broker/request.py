"""A request to the writer, and what is decided about it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import pyarrow as pa

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.receiving.consumption import Skipped
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.placed import Placed
from rmq_pipeline.store import frame
from rmq_pipeline.store.payload import Payload, bytes_of, payload_of

#: What a section takes beside its columns and a schema of its own, and an event beside its texts;
#: more rather than less.
_SECTION_BYTES = 4096
_EVENT_BYTES = 96


@dataclass(slots=True)
class Decision:
    """What a request does: rows to store, and the answer once they are on disk."""

    answer: Any = None
    placed: list[Placed] = field(default_factory=list)
    events: list[EventRows] = field(default_factory=list)
    keyed_state: list[pa.RecordBatch] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    #: Of ``placed``, serialized for the log; made by ``encode``.
    payloads: list[Payload] = field(default_factory=list)

    def stores(self) -> bool:
        """Whether anything is to be stored."""
        return bool(self.placed or self.events or self.keyed_state)

    def encode(self) -> int:
        """Serialize the messages, once; what of a frame all of it takes, at most."""
        self.payloads = [payload_of(placed.batch) for placed in self.placed]
        messages: int = sum(_SECTION_BYTES + bytes_of(payload) for payload in self.payloads)
        events = sum(len(rows) * _EVENT_BYTES + rows.text_bytes() for rows in self.events)
        return messages + events + sum(map(_batch_bytes, self.keyed_state)) + _SECTION_BYTES


def _batch_bytes(batch: pa.RecordBatch) -> int:
    # Exact, with dictionaries: they are messages of their own, of any length.
    return _SECTION_BYTES + frame.encoded_bytes(batch)


#: From so many rows on a request is bulk.
BULK_ROWS: Final = 256


class Request(ABC):
    """A verb's request: ``decide`` is pure and leaves the state as it is."""

    #: Whether it may use the reserve when the disk is full: all but what adds messages may.
    uses_reserve: ClassVar[bool] = True

    def is_bulk(self) -> bool:
        """Whether deciding it takes so long that it should be done beside a write."""
        return False

    @abstractmethod
    def decide(self, state: State, now_ms: int) -> Decision:
        """What to store and answer; raises RocketMQError to refuse."""
