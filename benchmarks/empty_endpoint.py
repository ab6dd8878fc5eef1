"""A server of the protocol that does nothing: the least that gRPC itself costs in this process.

It answers what the official clients ask, stores nothing, and hands out the same messages again and
again. ``python -m benchmarks.empty_endpoint`` prints its address, and serves until its input ends.
"""

import asyncio
import contextlib
import gc
import hashlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from rmq_pipeline.rocketmq import protocol as pb

BODY: Final = b"x" * 1024
#: As the endpoint has them.
OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 130 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
)
OK: Final = pb.Status(code=pb.Code.OK, message="OK")
UNARY: Final = {
    "QueryRoute": pb.QueryRouteRequest,
    "Heartbeat": pb.HeartbeatRequest,
    "SendMessage": pb.SendMessageRequest,
    "QueryAssignment": pb.QueryAssignmentRequest,
    "AckMessage": pb.AckMessageRequest,
    "NotifyClientTermination": pb.NotifyClientTerminationRequest,
    "ChangeInvisibleDuration": pb.ChangeInvisibleDurationRequest,
}


def queue_of(topic: Any, endpoints: Any) -> Any:
    """The one queue of every topic."""
    broker = pb.Broker(name="empty", id=0, endpoints=endpoints)
    return pb.MessageQueue(
        topic=topic,
        id=0,
        permission=pb.Permission.READ_WRITE,
        broker=broker,
        accept_message_types=[pb.MessageType.NORMAL],
    )


class EmptyDoor:
    """One answer per RPC."""

    def __init__(self) -> None:
        self._numbers = iter(range(1 << 62))
        self._digest = hashlib.md5(BODY, usedforsecurity=False).hexdigest().upper()

    async def query_route(self, request: Any, _: Any) -> Any:
        """The queue, where the client says that the server is."""
        queue = queue_of(request.topic, request.endpoints)
        return pb.QueryRouteResponse(status=OK, message_queues=[queue])

    async def query_assignment(self, request: Any, _: Any) -> Any:
        """The same for push consumers."""
        assignment = pb.Assignment(message_queue=queue_of(request.topic, request.endpoints))
        return pb.QueryAssignmentResponse(status=OK, assignments=[assignment])

    async def heartbeat(self, _request: Any, _: Any) -> Any:
        """Noted."""
        return pb.HeartbeatResponse(status=OK)

    async def notify_client_termination(self, _request: Any, _: Any) -> Any:
        """Goodbye."""
        return pb.NotifyClientTerminationResponse(status=OK)

    async def send_message(self, request: Any, _: Any) -> Any:
        """An entry for each message, which is dropped."""
        entries = [
            pb.SendResultEntry(
                status=OK,
                message_id=message.system_properties.message_id,
                transaction_id=message.system_properties.message_id,
                offset=next(self._numbers),
            )
            for message in request.messages
        ]
        return pb.SendMessageResponse(status=OK, entries=entries)

    async def receive_message(self, request: Any, _: Any) -> AsyncIterator[Any]:
        """As many messages as are asked for, at once."""
        yield pb.ReceiveMessageResponse(status=OK)
        for _number in range(request.batch_size):
            yield pb.ReceiveMessageResponse(message=self._message(request.message_queue.topic))
        moment = pb.ReceiveMessageResponse()
        moment.delivery_timestamp.GetCurrentTime()
        yield moment

    def _message(self, topic: Any) -> Any:
        number = next(self._numbers)
        properties = pb.SystemProperties(
            message_id=f"{number:034X}",
            body_digest=pb.Digest(type=pb.DigestType.MD5, checksum=self._digest),
            body_encoding=pb.Encoding.IDENTITY,
            message_type=pb.MessageType.NORMAL,
            born_host="127.0.0.1",
            receipt_handle=f"receipt-{number:034X}",
            delivery_attempt=1,
            queue_offset=number,
        )
        now_s = int(time.time())
        properties.born_timestamp.seconds = properties.store_timestamp.seconds = now_s
        return pb.Message(topic=topic, system_properties=properties, body=BODY)

    async def ack_message(self, request: Any, _: Any) -> Any:
        """Every entry is fine."""
        entries = [
            pb.AckMessageResultEntry(
                status=OK, message_id=entry.message_id, receipt_handle=entry.receipt_handle
            )
            for entry in request.entries
        ]
        return pb.AckMessageResponse(status=OK, entries=entries)

    async def change_invisible_duration(self, request: Any, _: Any) -> Any:
        """The receipt stays as it is."""
        return pb.ChangeInvisibleDurationResponse(status=OK, receipt_handle=request.receipt_handle)

    async def telemetry(self, commands: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        """The client's own settings, and those that it waits for."""
        async for command in commands:
            settings = pb.Settings()
            settings.CopyFrom(command.settings)
            settings.metric.on = False
            if settings.HasField("publishing"):
                settings.publishing.max_body_size = 4 << 20
                settings.publishing.validate_message_type = True
            else:
                settings.subscription.receive_batch_size = 32
                settings.subscription.long_polling_timeout.seconds = 20
            backoff = settings.backoff_policy
            backoff.max_attempts = 3
            backoff.exponential_backoff.initial.nanos = 10_000_000
            backoff.exponential_backoff.max.seconds = 1
            backoff.exponential_backoff.multiplier = 2
            yield pb.TelemetryCommand(status=OK, settings=settings)


def handlers(endpoint: EmptyDoor) -> Any:
    """The service, without the generated base class."""
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(endpoint, "".join(f"_{c.lower()}" if c.isupper() else c for c in name)[1:]),
            request_deserializer=kind.FromString,
            response_serializer=_serialized,
        )
        for name, kind in UNARY.items()
    }
    methods["ReceiveMessage"] = grpc.unary_stream_rpc_method_handler(
        endpoint.receive_message,
        request_deserializer=pb.ReceiveMessageRequest.FromString,
        response_serializer=_serialized,
    )
    methods["Telemetry"] = grpc.stream_stream_rpc_method_handler(
        endpoint.telemetry,
        request_deserializer=pb.TelemetryCommand.FromString,
        response_serializer=_serialized,
    )
    return grpc.method_handlers_generic_handler(pb.SERVICE, methods)


def _serialized(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


async def serve() -> None:
    """Serve at a free port until the input ends."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(EmptyDoor()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    """Run it in the loop that the endpoint would take."""
    gc.freeze()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve())


if __name__ == "__main__":
    main()
