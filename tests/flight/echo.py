"""An object with a few of the broker's verbs, to test the wire by itself."""

import os
import threading
from typing import Any

import pyarrow as pa

from rmq_pipeline import errors, schema
from rmq_pipeline.broker.work import waiting
from rmq_pipeline.clock import ManualClock, wait_for


class Echo:
    """Answers with what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.clock = ManualClock()
        self.arrived = threading.Condition()
        self.waiting = 0
        self.messages: pa.Table | None = None

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        if topic == "refused":
            raise errors.TopicNotFoundError(f"No topic {topic}.")
        if topic == "broken":
            raise ZeroDivisionError("a bug")
        if (
            "body" in messages.column_names
            and pa.compute.any(pa.compute.equal(messages["body"].cast(pa.binary()), b"")).as_py()
        ):
            raise errors.MessageBodyEmptyError("Row 0 has an empty body.")
        self.calls.append((topic, {"rows": messages.num_rows}))
        return messages

    def settle(self, group: str, outcomes: pa.Table, **rest: Any) -> dict[str, Any]:
        self.calls.append((group, {"outcomes": outcomes, **rest}))
        return {"acked": outcomes.num_rows}

    def ack(self, receipts: pa.Table) -> None:
        self.calls.append(("ack", {"receipts": receipts}))

    def ping(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        return len(topic) + queue_id + at_ms

    def keyed_state(self, message_groups: pa.Table | None = None, **_: str) -> pa.Table | None:
        return message_groups

    def create_group(self, name: str, **settings: Any) -> dict[str, Any]:
        self.calls.append((name, settings))
        return {"name": name, **settings}

    def sql(self, query: str, *, timeout_s: float) -> pa.Table:
        raise errors.QueryError(f"{query} within {timeout_s} s.")

    def receive(self, *, wait_ms: int, **_: Any) -> pa.Table:
        until = self.clock.now_ms() + wait_ms
        with self.arrived:
            self.waiting += 1
            self.arrived.notify_all()
            while (
                self.messages is None
                and self.clock.now_ms() < until
                and not waiting.waits_no_more()
            ):
                look = waiting.look_at_ms(self.clock, until)
                ready = lambda: self.messages is not None  # noqa: E731
                wait_for(self.clock, self.arrived, ready=ready, at_ms=look)
            self.waiting -= 1
            self.arrived.notify_all()
            return schema.RECEIVED.empty_table() if self.messages is None else self.messages

    def wait_until_waiting(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.waiting == count, 20)

    def is_left_alone(self, *, within_s: float) -> bool:
        """Return True if no call waits; a poll's next slice may take a moment to begin."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.waiting == 0, within_s)
            return not self.arrived.wait_for(lambda: self.waiting > 0, within_s)

    def deliver(self, messages: pa.Table) -> None:
        with self.arrived:
            self.messages = messages
            self.arrived.notify_all()
