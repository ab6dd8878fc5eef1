"""Receives that end at any moment lose no message, and leave none leased to a gone client."""

import asyncio
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rmq_pipeline.rocketmq.protocol import (
    AckMessageEntry,
    AckMessageRequest,
    MessagingServiceStub,
    Resource,
)
from tests.rocketmq.consuming import OK, Consumer, Stand
from tests.waiting import until

CLIENTS, MESSAGES, GROUPS = 8, 120, 3
#: How many of the calls are cut off, and within which time after they began.
SHARE, WITHIN_S = 0.3, 0.05


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    yield stand
    stand.close()


class Crowd:
    """Push consumers of one group, some of whose calls are cut off."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._random = random.Random(1)
        self._enough = asyncio.Event()
        #: Bodies in the order in which their acks were answered.
        self.seen: list[int] = []

    async def consume(self) -> None:
        async with grpc.aio.insecure_channel(self._stand.endpoint.address) as channel:
            stub = MessagingServiceStub(channel)
            tasks = [
                asyncio.create_task(self._client(stub, self._stand.consumer(f"client-{number}")))
                for number in range(CLIENTS)
            ]
            await asyncio.wait_for(self._enough.wait(), 120)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, stub: Any, consumer: Consumer) -> None:
        attempt_id = ""
        while True:
            attempt_id = attempt_id or str(uuid.uuid4())
            request = consumer.request(
                "t", "g", batch=2, wait_ms=20_000, renewed=True, attempt_id=attempt_id
            )
            call = stub.ReceiveMessage(request, metadata=consumer.metadata, timeout=25)
            if self._random.random() < SHARE:
                wait_s = self._random.random() * WITHIN_S
                asyncio.get_running_loop().call_later(wait_s, call.cancel)
            try:
                got = [frame.message async for frame in call if frame.HasField("message")]
            except (asyncio.CancelledError, grpc.aio.AioRpcError):
                if self._enough.is_set() or not call.cancelled():
                    raise
                continue
            attempt_id = "" if got else attempt_id
            for message in got:
                await self._ack(stub, consumer, message)

    async def _ack(self, stub: Any, consumer: Consumer, message: Any) -> None:
        entry = AckMessageEntry(receipt_handle=message.system_properties.receipt_handle)
        resources = {"group": Resource(name="g"), "topic": Resource(name="t")}
        request = AckMessageRequest(**resources, entries=[entry])
        reply = await stub.AckMessage(request, metadata=consumer.metadata, timeout=20)
        if reply.status.code == OK:
            self.seen.append(int(message.body))
        if len(self.seen) >= MESSAGES:
            self._enough.set()


@pytest.mark.parametrize("kind", ["normal", "fifo", "queue"])
def test_calls_that_are_cut_off_lose_and_keep_nothing(stand: Stand, kind: str) -> None:
    stand.broker.create_topic("t", type="normal" if kind == "normal" else "fifo", queues=4)
    if kind == "queue":
        stand.broker.create_group("g", order="queue")
    crowd: list[Crowd] = []

    async def run() -> None:
        crowd.append(Crowd(stand))
        sending = asyncio.to_thread(send)
        await asyncio.gather(crowd[0].consume(), sending)

    def send() -> None:
        for number in range(MESSAGES):
            grouped = kind != "normal"
            columns = {"message_group": f"m{number % GROUPS}"} if grouped else {}
            stand.send("t", str(number).encode(), **columns)

    asyncio.run(run())

    seen = crowd[0].seen
    assert sorted(seen) == list(range(MESSAGES))
    if kind != "normal":
        for group in range(GROUPS):
            of_group = [number for number in seen if number % GROUPS == group]
            assert of_group == sorted(of_group)
    until(
        lambda: (
            stand.waiting() == len(stand.context.leases) == 0
            and not len(stand.broker.engine.wakeups)
        )
    )
