"""Consumers that wait: each a connection, a telemetry stream, a heartbeat, and a long poll.

``python -m benchmarks.grpc_idle ADDRESS N TOPIC`` prints a line when all of them wait; then, for
each line of its input, the seconds that their listeners take, sends a message to the topic, which
every one of them has a group of its own on, and prints the ms until half of them and all had it.
"""

import asyncio
import json
import sys
import time
from typing import Any, Final

import grpc
import grpc.aio

from rmq_pipeline.rocketmq import protocol as pb

#: As the official clients do.
HEARTBEAT_S: Final = 10
POLL_S: Final = 20
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)


class Waiting:
    """One push consumer."""

    def __init__(self, address: str, topic: str, *, number: int) -> None:
        self.arrived: asyncio.Queue[float] = asyncio.Queue()
        self.acked: asyncio.Queue[None] = asyncio.Queue()
        self.listener_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._topic = pb.Resource(name=topic)
        self._group = pb.Resource(name=f"waiting-{number}")
        self._metadata = (("x-mq-client-id", f"idle@{number}"), ("x-mq-language", "PYTHON"))
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = pb.MessagingServiceStub(self._channel)

    async def settle(self) -> None:
        """Open the stream, and have the settings."""
        self._telemetry = self._stub.Telemetry(metadata=self._metadata)
        settings = pb.Settings(client_type=pb.ClientType.PUSH_CONSUMER)
        settings.subscription.group.CopyFrom(self._group)
        settings.subscription.subscriptions.add().topic.CopyFrom(self._topic)
        settings.user_agent.language = pb.Language.PYTHON
        await self._telemetry.write(pb.TelemetryCommand(settings=settings))
        await self._telemetry.read()

    async def poll(self) -> None:
        """Receive and acknowledge for ever."""
        request = pb.ReceiveMessageRequest(
            group=self._group,
            message_queue=pb.MessageQueue(topic=self._topic, id=-1),
            batch_size=32,
            auto_renew=True,
        )
        request.filter_expression.expression = "*"
        request.long_polling_timeout.seconds = POLL_S
        while True:
            stream = self._stub.ReceiveMessage(request, metadata=self._metadata, timeout=POLL_S + 3)
            async for frame in stream:
                if frame.HasField("message"):
                    self.arrived.put_nowait(time.perf_counter())
                    listening = asyncio.create_task(self._listen(frame.message))
                    self._tasks.add(listening)
                    listening.add_done_callback(self._tasks.discard)

    async def _listen(self, message: Any) -> None:
        await asyncio.sleep(self.listener_s)
        own = message.system_properties
        request = pb.AckMessageRequest(group=self._group, topic=self._topic)
        request.entries.add(message_id=own.message_id, receipt_handle=own.receipt_handle)
        await self._stub.AckMessage(request, metadata=self._metadata)
        self.acked.put_nowait(None)

    async def beat(self, after_s: float) -> None:
        """Heartbeats, not all consumers' at once."""
        await asyncio.sleep(after_s)
        request = pb.HeartbeatRequest(group=self._group, client_type=pb.ClientType.PUSH_CONSUMER)
        while True:
            await self._stub.Heartbeat(request, metadata=self._metadata)
            await asyncio.sleep(HEARTBEAT_S)

    async def send(self) -> None:
        """A message for all."""
        request = pb.SendMessageRequest()
        one = request.messages.add(topic=self._topic, body=b"x" * 1024)
        one.system_properties.message_id = f"{time.time_ns():034X}"
        one.system_properties.message_type = pb.MessageType.NORMAL
        one.system_properties.body_encoding = pb.Encoding.IDENTITY
        await self._stub.SendMessage(request, metadata=self._metadata)


async def wait(address: str, n: int, *, topic: str) -> None:
    """Have ``n`` of them wait, and tell how long a message takes to reach them."""
    clients = [Waiting(address, topic, number=number) for number in range(n)]
    for start in range(0, n, 50):
        await asyncio.gather(*(client.settle() for client in clients[start : start + 50]))
    tasks = [asyncio.create_task(client.poll()) for client in clients]
    tasks += [
        asyncio.create_task(client.beat(HEARTBEAT_S * number / n))
        for number, client in enumerate(clients)
    ]
    await asyncio.sleep(1)
    print(json.dumps("waiting"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        for client in clients:
            client.listener_s = json.loads(line)
        start_s = time.perf_counter()
        await clients[0].send()
        moments = sorted([await client.arrived.get() for client in clients])
        found = [(moments[at] - start_s) * 1000 for at in (n // 2, n - 1)]
        for client in clients:
            await client.acked.get()
        print(json.dumps(found), flush=True)
    for task in tasks:
        task.cancel()


def main() -> None:
    """Wait as the command line says."""
    asyncio.run(wait(sys.argv[1], int(sys.argv[2]), topic=sys.argv[3]))


if __name__ == "__main__":
    main()
