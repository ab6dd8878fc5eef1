"""Checks of transactions reach those who listen, whatever becomes of others."""

import queue
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import clients
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance.raw import Raw
from tests.rocketmq.talking import producer, publishing
from tests.rocketmq.test_transactions import FIRST_MS, NEXT_MS, asked, begin, check
from tests.waiting import until

Clients = Callable[..., Raw]


@pytest.fixture(autouse=True)
def topics(broker: Broker) -> None:
    for name in ("tx", "other"):
        broker.create_topic(name, type="transaction", queues=1)


def test_a_producer_that_reads_nothing_holds_up_no_others(
    broker: Broker, client: Clients, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_PUSH_S", 0.2)
    deaf, fine = client(), client()
    said: queue.Queue[Any] = queue.Queue()
    stream = deaf.stub.Telemetry(iter(said.get, None), metadata=deaf.metadata)
    said.put(pb.TelemetryCommand(settings=publishing("tx")))
    next(stream)  # its settings; and nothing more
    begin(deaf, b"x" * 2_000_000)
    begin(fine, b"y", topic="other")

    with producer(fine, "other") as talk:
        check(broker, clock, FIRST_MS)
        # More than its window holds was pushed to the deaf one by then.
        for times in range(1, 8):
            until(lambda times=times: len(asked(talk)) >= times)  # type: ignore[misc]
            deaf("Heartbeat", pb.HeartbeatRequest())
            check(broker, clock, NEXT_MS)
    stream.cancel()


def test_a_topic_whose_checks_cannot_be_read_holds_up_no_others(
    broker: Broker, client: Clients, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Broker.fetch_checks

    def lost(self: Broker, *, topics: list[str], **how: Any) -> pa.Table:
        if topics == ["tx"]:
            raise LookupError("its place is gone")
        return fetch(self, topics=topics, **how)

    monkeypatch.setattr(Broker, "fetch_checks", lost)
    one, fine = client(), client()
    with producer(one, "tx"), producer(fine, "other") as talk:
        begin(fine, b"y", topic="other")
        check(broker, clock, FIRST_MS)

        until(lambda: len(asked(talk)) == 1)
