"""A server of the protocol that does nothing: the least that gRPC itself costs in this process.

It stores nothing, and hands out the same message again and again. Queues and settings are those of
a broker, which it asks: official clients work the same on both, with the same number of queues, the
same retries and the same export of metrics. ``python -m benchmarks.empty_endpoint [HOST:PORT]``
prints its address, and serves until its input ends; without a broker only to stubs that need no
queues and settings.
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
#: The broker answers them.
FORWARDED: Final = ("QueryRoute", "QueryAssignment")
METRICS: Final = "opentelemetry.proto.collector.metrics.v1.MetricsService"
UNARY: Final = {
    "Heartbeat": pb.HeartbeatRequest,
    "SendMessage": pb.SendMessageRequest,
    "AckMessage": pb.AckMessageRequest,
    "NotifyClientTermination": pb.NotifyClientTerminationRequest,
    "ChangeInvisibleDuration": pb.ChangeInvisibleDurationRequest,
}


class EmptyEndpoint:
    """One answer per RPC."""

    def __init__(self, broker: grpc.aio.Channel | None) -> None:
        self._broker = broker
        self._numbers = iter(range(1 << 62))
        self._digest = hashlib.md5(BODY, usedforsecurity=False).hexdigest().upper()

    def forwarded(self, name: str) -> Any:
        """Return a handler that lets the broker answer; its answers have the client's address."""

        async def forward(request: bytes, context: Any) -> Any:
            assert self._broker is not None
            call = self._broker.unary_unary(f"/{pb.SERVICE}/{name}")
            return await call(request, metadata=context.invocation_metadata())

        return grpc.unary_unary_rpc_method_handler(forward)

    async def export(self, _request: bytes, _: Any) -> bytes:
        """Drop the metrics of a client."""
        return b""

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

    async def telemetry(self, commands: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Answer each of the client's settings as the broker does."""
        assert self._broker is not None
        async for command in commands:
            call = self._broker.stream_stream(f"/{pb.SERVICE}/Telemetry")
            stream = call(iter([command]), metadata=context.invocation_metadata())
            yield await stream.read()


def handlers(endpoint: EmptyEndpoint) -> list[Any]:
    """Return the service, and that of clients' metrics, without the generated base classes."""
    methods = {name: endpoint.forwarded(name) for name in FORWARDED}
    methods |= {
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
    methods["Telemetry"] = grpc.stream_stream_rpc_method_handler(endpoint.telemetry)
    metrics = {"Export": grpc.unary_unary_rpc_method_handler(endpoint.export)}
    return [
        grpc.method_handlers_generic_handler(pb.SERVICE, methods),
        grpc.method_handlers_generic_handler(METRICS, metrics),
    ]


def _serialized(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


async def serve(address: str | None) -> None:
    """Serve at a free port until the input ends."""
    broker = grpc.aio.insecure_channel(address) if address else None
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(handlers(EmptyEndpoint(broker)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    """Serve in the loop that the endpoint would take."""
    gc.freeze()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(sys.argv[1] if sys.argv[1:] else None))


if __name__ == "__main__":
    main()
