"""An endpoint in the test's process, under a clock that tests turn by hand, and its consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from google.protobuf.duration_pb2 import Duration

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.rocketmq.protocol import (
    AckMessageEntry,
    AckMessageRequest,
    ChangeInvisibleDurationRequest,
    FilterExpression,
    FilterType,
    ForwardMessageToDeadLetterQueueRequest,
    HeartbeatRequest,
    MessageQueue,
    MessagingServiceStub,
    NotifyClientTerminationRequest,
    ReceiveMessageRequest,
    Resource,
)
from rmq_pipeline.settings import Settings
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
OK, MIXED, EMPTY = 20000, 30000, 40401
#: The most that the broker's time is moved at once where clients must be seen alive.
STEP_MS = 5_000


def duration(ms: int) -> Duration:
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


class Stand:
    """A home, its broker, its endpoint, and the time."""

    def __init__(self, home: Path) -> None:
        self.clock = ManualClock()
        self._stack = contextlib.ExitStack()
        broker = Broker.open(home, clock=self.clock, upkeep="none", settings=SMALL)
        self.broker = self._stack.enter_context(broker)
        self.endpoint = GrpcEndpoint(broker)
        self._stack.callback(self.endpoint.shutdown)
        self._channel = grpc.insecure_channel(self.endpoint.address)
        self._stack.callback(self._channel.close)
        self.stub = MessagingServiceStub(self._channel)
        self.pool = ThreadPoolExecutor(8)
        self._stack.callback(self.pool.shutdown)

    def close(self) -> None:
        self._stack.close()

    @property
    def context(self) -> Context:
        return self.endpoint._service._context

    def waiting(self) -> int:
        """Receives that wait for messages."""
        return len(self.context.bridge)

    def consumer(self, client_id: str = "one") -> Consumer:
        return Consumer(self, client_id)

    def send(self, topic: str, *bodies: bytes, **columns: Any) -> None:
        """Store messages; a column is one value for all, or a list."""
        table: dict[str, Any] = {"body": list(bodies)}
        for name, value in columns.items():
            table[name] = value if isinstance(value, list) else [value] * len(bodies)
        fields = [schema.SEND.field(name) for name in table]
        self.broker.send(topic, pa.table(table, schema=pa.schema(fields)))

    def pass_time(self, milliseconds: int, *alive: Consumer) -> None:
        """Move time in steps; those alive send heartbeats, and the endpoint looks at its leases."""
        for _ in range(-(-milliseconds // STEP_MS)):
            self.clock.advance(STEP_MS)
            for consumer in alive:
                consumer.heartbeat()
            until(self._looked)

    def _looked(self) -> bool:
        return self.context.leases._next_ms > self.clock.now_ms()


@dataclass
class Received:
    """The frames of one receive."""

    code: int
    messages: list[Any]

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def handles(self) -> list[str]:
        return [message.system_properties.receipt_handle for message in self.messages]

    @property
    def attempts(self) -> list[int]:
        return [message.system_properties.delivery_attempt for message in self.messages]


class Consumer:
    """One client of the stub."""

    def __init__(self, stand: Stand, client_id: str) -> None:
        self._stand = stand
        self._stub = stand.stub
        self.metadata = (("x-mq-client-id", client_id), ("x-mq-language", "PYTHON"))

    def request(
        self,
        topic: str,
        group: str,
        *,
        batch: int = 32,
        wait_ms: int = 0,
        tags: str = "*",
        sql: str = "",
        invisible_ms: int = 15_000,
        renewed: bool = False,
        attempt_id: str = "",
        queue_id: int = 0,
    ) -> Any:
        """A ReceiveMessageRequest."""
        kind = FilterType.SQL if sql else FilterType.TAG
        return ReceiveMessageRequest(
            group=Resource(name=group),
            message_queue=MessageQueue(topic=Resource(name=topic), id=queue_id),
            filter_expression=FilterExpression(type=kind, expression=sql or tags),
            batch_size=batch,
            invisible_duration=None if renewed else duration(invisible_ms),
            auto_renew=renewed,
            long_polling_timeout=duration(wait_ms),
            attempt_id=attempt_id or None,
        )

    def call(self, topic: str, group: str, timeout_s: float = 20, **how: Any) -> Any:
        """The stream of a receive, as gRPC gives it."""
        request = self.request(topic, group, **how)
        return self._stub.ReceiveMessage(request, metadata=self.metadata, timeout=timeout_s)

    def receive(self, topic: str, group: str, **how: Any) -> Received:
        """All frames; a poll of 20 s at most, in the broker's time."""
        first, *rest = self.call(topic, group, **how)
        messages = [frame.message for frame in rest if frame.HasField("message")]
        ends = [frame for frame in rest if frame.HasField("delivery_timestamp")]
        assert len(ends) == (first.status.code in (OK, EMPTY))
        return Received(first.status.code, messages)

    def begin(self, topic: str, group: str, **how: Any) -> Future[Received]:
        """Receive in another thread; returns once it waits."""
        before = self._stand.waiting()
        how.setdefault("wait_ms", 20_000)
        future = self._stand.pool.submit(self.receive, topic, group, **how)
        until(lambda: future.done() or self._stand.waiting() > before)
        return future

    def ack(self, topic: str, group: str, handles: Sequence[str]) -> Any:
        return self.begin_ack(topic, group, handles).result()

    def begin_ack(self, topic: str, group: str, handles: Sequence[str]) -> Any:
        """An ack that is under way, as gRPC's future."""
        entries = [AckMessageEntry(message_id="m", receipt_handle=one) for one in handles]
        request = AckMessageRequest(
            group=Resource(name=group), topic=Resource(name=topic), entries=entries
        )
        return self._stub.AckMessage.future(request, metadata=self.metadata, timeout=20)

    def change(self, topic: str, group: str, handle: str, *, ms: int) -> Any:
        request = ChangeInvisibleDurationRequest(
            group=Resource(name=group),
            topic=Resource(name=topic),
            receipt_handle=handle,
            invisible_duration=duration(ms),
            message_id="m",
        )
        return self._stub.ChangeInvisibleDuration(request, metadata=self.metadata, timeout=20)

    def forward(self, topic: str, group: str, handle: str) -> int:
        request = ForwardMessageToDeadLetterQueueRequest(
            group=Resource(name=group),
            topic=Resource(name=topic),
            receipt_handle=handle,
            message_id="m",
            delivery_attempt=17,
            max_delivery_attempts=17,
        )
        call: Callable[..., Any] = self._stub.ForwardMessageToDeadLetterQueue
        return int(call(request, metadata=self.metadata, timeout=20).status.code)

    def heartbeat(self) -> None:
        self._stub.Heartbeat(HeartbeatRequest(), metadata=self.metadata, timeout=20)

    def terminate(self) -> None:
        request = NotifyClientTerminationRequest()
        self._stub.NotifyClientTermination(request, metadata=self.metadata, timeout=20)
