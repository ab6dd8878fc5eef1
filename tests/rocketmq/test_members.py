"""Official consumers beside members that heartbeat at the table endpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import clients
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.consuming import Stand
from tests.rocketmq.talking import Talk, subscribing


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=4)
    yield stand
    stand.close()


def test_consumers_of_a_group_are_shown_while_they_are_there(
    broker: Broker, client: Callable[..., Raw], clock: ManualClock
) -> None:
    broker.create_topic("t")
    broker.create_group("g")
    with Talk(client(client_id="official")) as talk:
        talk.settle(subscribing("g", "t", language="JAVA"))
        beat = broker.heartbeat("g", "ours", topics=["t"], details={"model": "broadcasting"})

        shown = broker.describe_group("g")["members"]

    assert set(shown) == {"official", "ours"}
    assert shown["official"] == {
        "topics": ["t"],
        "seen_at_ms": clock.now_ms(),
        "details": {"model": "clustering", "language": "JAVA"},
    }
    # They share no queues with those that do not ask the broker for queues.
    assert set(beat["members"]) == {"ours"}
    clock.advance(clients.LIVE_WITH_STREAM_MS)
    assert set(broker.describe_group("g")["members"]) == {"ours"}


def test_a_locked_queue_is_not_given_to_official_consumers(stand: Stand) -> None:
    one = stand.consumer("one")
    one.receive("t", "g", wait_ms=0)
    stand.send("t", *(str(i).encode() for i in range(8)))
    stand.broker.lock_queues("g", "t", queue_ids=[0, 2], client_id="ours")

    received = one.receive("t", "g")

    assert {m.system_properties.queue_id for m in received.messages} <= {1, 3}
    mine = stand.broker.receive("g", "t", client_id="ours", limit=100)
    assert set(mine["queue_id"].to_pylist()) == {0, 2}
    assert mine.num_rows == 4


def test_a_client_without_settings_is_what_its_heartbeat_says(
    broker: Broker, client: Callable[..., Raw]
) -> None:
    broker.create_group("g")
    beat = pb.HeartbeatRequest(group=raw.resource("g"), client_type=pb.ClientType.PUSH_CONSUMER)

    assert raw.code(client(client_id="official")("Heartbeat", beat)) == "OK"

    assert set(broker.describe_group("g")["members"]) == {"official"}
