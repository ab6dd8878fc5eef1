"""Calls that come while the event loop is busy are answered when it is not, however many."""

import asyncio
import threading
from typing import Any

import grpc.aio

from rmq_pipeline.rocketmq import protocol as pb
from tests.rocketmq.conftest import Opened

#: By default gRPC ends about 60 of so many, by chance: each beyond 1,000 with a higher one.
CALLS = 1_500
CONNECTIONS = 16
ALL_COME_S = 1.0
METADATA = (("x-mq-client-id", "one of many"), ("x-mq-language", "PYTHON"))


def test_calls_that_wait_for_the_event_loop_are_answered(opened: Opened) -> None:
    _, endpoint, _ = opened
    busy, free = threading.Event(), threading.Event()

    def hold_up() -> None:
        busy.set()
        free.wait(60)

    async def call() -> list[Any]:
        channels = [
            grpc.aio.insecure_channel(
                endpoint.address, options=(("grpc.use_local_subchannel_pool", 1),)
            )
            for _ in range(CONNECTIONS)
        ]
        stubs = [pb.MessagingServiceStub(channel) for channel in channels]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        endpoint._bridge.call_soon(hold_up)
        await asyncio.to_thread(busy.wait)
        request = pb.HeartbeatRequest(client_type=pb.ClientType.PRODUCER)
        calls = [stubs[n % CONNECTIONS].Heartbeat(request, metadata=METADATA) for n in range(CALLS)]
        # Nothing tells when all have come; with too few of them there the test sees less.
        asyncio.get_running_loop().call_later(ALL_COME_S, free.set)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for channel in channels:
            await channel.close()
        return answers

    answers = asyncio.run(call())

    lost = [answer for answer in answers if isinstance(answer, BaseException)]
    assert lost == []
    assert {answer.status.code for answer in answers} == {pb.Code.OK}
