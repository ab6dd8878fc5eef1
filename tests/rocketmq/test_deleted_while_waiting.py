"""A receive that waits is told that its topic, or its group, was deleted."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from rmq_pipeline.broker.decide.admin import CreateGroup, CreateTopic, DeleteGroup, DeleteTopic
from rmq_pipeline.broker.work.waiting import Waiter, Wakeups
from rmq_pipeline.rocketmq import protocol as pb
from tests.rocketmq.consuming import OK, Received, Stand
from tests.waiting import until

NO_TOPIC, NO_GROUP = 40402, 40403
WAIT_MS = 15_000
AGAIN = {
    "topic": [DeleteTopic("t", False), CreateTopic("t", "normal", 1, "stored", False)],
    "group": [DeleteGroup("g", False), CreateGroup("g", "none", 17, (1000,), "dead_letter", False)],
}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=1)
    stand.broker.create_group("g")
    yield stand
    stand.close()


def wait(stand: Stand, client_id: str = "one") -> "Future[Received]":
    before = stand.waiting()
    consumer = stand.consumer(client_id)
    waiting = stand.pool.submit(lambda: consumer.receive("t", "g", wait_ms=WAIT_MS))
    until(lambda: stand.waiting() > before)
    return waiting


def test_all_who_wait_are_told_that_the_topic_was_deleted(stand: Stand) -> None:
    waiting = [wait(stand, f"c{i}") for i in range(3)]

    stand.broker.delete_topic("t")

    assert [each.result(60).code for each in waiting] == [NO_TOPIC] * 3


def test_all_who_wait_are_told_that_the_group_was_deleted(stand: Stand) -> None:
    waiting = [wait(stand, f"c{i}") for i in range(3)]

    stand.broker.delete_group("g")

    assert [each.result(60).code for each in waiting] == [NO_GROUP] * 3


@pytest.mark.parametrize("what", ["topic", "group"])
def test_who_waits_hears_of_what_was_made_again_at_once(stand: Stand, what: str) -> None:
    """In one frame, so that no call sees the state between the two."""
    waiting = wait(stand)

    stand.broker.writer.submit_together(AGAIN[what])
    stand.broker.subscribe("g", "t")
    stand.send("t", b"new")

    received = waiting.result(60)
    assert (received.code, received.bodies) == (OK, [b"new"])


def test_a_pull_that_waits_is_told_that_the_topic_was_deleted(stand: Stand) -> None:
    request = pb.PullMessageRequest(batch_size=1)
    request.group.name = "g"
    request.message_queue.topic.name = "t"
    request.long_polling_timeout.FromMilliseconds(WAIT_MS)
    metadata = stand.consumer().metadata
    waiting = stand.pool.submit(
        lambda: list(stand.stub.PullMessage(request, metadata=metadata, timeout=20))
    )
    until(lambda: stand.waiting() == 1)

    stand.broker.delete_topic("t")

    assert [frame.status.code for frame in waiting.result(60)] == [NO_TOPIC]


def test_a_pull_whose_topic_is_made_again_before_it_is_in_its_line_gets_what_comes(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Wakeups.put
    late = iter([True])

    def put_late(wakeups: Wakeups, waiter: Waiter) -> int | None:
        if next(late, False):
            stand.broker.writer.submit_together(AGAIN["topic"])
        return put(wakeups, waiter)

    monkeypatch.setattr(Wakeups, "put", put_late)
    request = pb.PullMessageRequest(batch_size=1)
    request.group.name = "g"
    request.message_queue.topic.name = "t"
    request.long_polling_timeout.FromMilliseconds(WAIT_MS)
    metadata = stand.consumer().metadata
    waiting = stand.pool.submit(
        lambda: list(stand.stub.PullMessage(request, metadata=metadata, timeout=20))
    )
    until(lambda: stand.waiting() == 1)

    stand.send("t", b"new")

    assert [frame.message.body for frame in waiting.result(60)][1:2] == [b"new"]
