"""Messages as they were pulled, and where the parts of a push consumer meet in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of
from rmq_pipeline.consumer.settler import Part
from tests.waiting import until

QUEUE = MessageQueue("flights", "rmq", 0)


def held_queue(queue: MessageQueue = QUEUE, **settings: Any) -> ProcessQueue:
    """A queue of which nothing is held yet."""
    return ProcessQueue(queue, now_ms=0, **settings)


def rows(offsets: Sequence[int], *, queue_id: int = 0, **columns: Any) -> pa.Table:
    """A table of schema.RECEIVED; a column is a list, or one value for every row."""
    n = len(offsets)
    given: dict[str, Any] = {
        "queue_id": queue_id,
        "queue_offset": list(offsets),
        "message_id": [f"m-{offset}" for offset in offsets],
        "body": [str(offset).encode() for offset in offsets],
        "born_at_ms": 1,
        "stored_at_ms": 2,
        "delivery_attempt": 1,
        "receipt_handle": [f"r-{offset}" for offset in offsets],
        **columns,
    }
    arrays = [
        pa.array(
            value if isinstance(value := given.get(field.name), list) else [value] * n, field.type
        )
        for field in schema.RECEIVED
    ]
    return pa.table(arrays, schema=schema.RECEIVED)


def received(queue: ProcessQueue, offsets: Sequence[int], **columns: Any) -> list[ReceivedMessage]:
    """Messages of a queue, as one pull brings them."""
    queue_id = queue.queue.queue_id
    table = rows(offsets, queue_id=queue_id, **columns)
    return messages_of(table, queue.queue.topic, queues={queue_id: queue}).get(queue_id, [])


class Settled:
    """Takes results as a broker would, and remembers them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.counted: list[tuple[int, str]] = []
        self.released: list[int] = []
        self.hurried = False
        self._lock = threading.Lock()

    def settle(self, *parts: Part) -> None:
        with self._lock:
            # Before its queue has it no more: who waits for that looks here next.
            self.parts += parts
            for part in parts:
                for message in part.messages:
                    message.queue.remove([message])

    def count(self, part: Part) -> None:
        self.counted += [(message.queue_offset, part.reason) for message in part.messages]

    def release(self, messages: Sequence[ReceivedMessage]) -> None:
        self.released += [message.queue_offset for message in messages]

    def hurry(self) -> None:
        self.hurried = True

    def offsets(self, outcome: str) -> list[int]:
        """Of messages with this outcome, in the order of their results."""
        with self._lock:
            return [
                m.queue_offset
                for part in self.parts
                if part.outcome == outcome
                for m in part.messages
            ]


def repeat(step: Callable[[], object], condition: Callable[[], object]) -> None:
    """Do something again and again until a condition holds."""

    def look() -> bool:
        step()
        return bool(condition())

    until(look)


class Gate:
    """Holds up who passes, until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.arrived = threading.Event()

    def pass_through(self) -> None:
        self.arrived.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()

    def hang(self, *_: Any) -> str:
        """A listener that succeeds once the gate is open."""
        self.pass_through()
        return "success"


#: What a listener does with its messages.
Work = Callable[[Sequence[ReceivedMessage], Any], Any]
