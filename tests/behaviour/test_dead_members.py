"""What a member dies over counts as an attempt, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import limits
from rmq_pipeline.group import GroupMembers

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

# In process only: the endpoints hand a heartbeat on as it is.


class Worker:
    """A member that locks a queue and has what it leased."""

    def __init__(self, endpoint: Endpoint, group: str, topic: str, **details: Any) -> None:
        self.broker, self.group, self.topic = endpoint.broker, group, topic
        self.details = {"order": "key", "calls": 2, "trying": [], **details}

    def beat(self, client_id: str) -> GroupMembers:
        answer: GroupMembers = self.broker.heartbeat(
            self.group, client_id, topics=[self.topic], details=self.details
        )
        return answer

    def take(self, client_id: str) -> list[tuple[int, int]]:
        """Offsets and attempts of what it is given, all of it leased for long."""
        self.beat(client_id)
        self.broker.lock_queues(
            self.group, self.topic, queue_ids=[0], client_id=client_id, duration_ms=3_600_000
        )
        got = self.broker.receive(
            self.group, self.topic, client_id=client_id, invisible_duration_ms=3_600_000
        )
        return list(
            zip(got["queue_offset"].to_pylist(), got["delivery_attempt"].to_pylist(), strict=True)
        )


@pytest.fixture
def name(inside: Endpoint, topic: Make, messages: Make) -> str:
    made = str(topic(type="fifo", queues=1))
    inside.broker.send(made, messages(5, groups=["a", "a", "b", "c", "c"]))
    return made


@pytest.mark.parametrize("order", ["none", "message_group"])
def test_the_first_of_each_message_group_that_was_begun_counts(
    order: str, inside: Endpoint, group: Make, name: str
) -> None:
    worker = Worker(inside, group(order=order), name)
    worker.take("one")

    inside.advance(limits.MEMBER_TIMEOUT_MS)

    assert worker.take("two") == [(0, 2), (1, 1), (2, 2), (3, 1), (4, 1)]
    assert worker.beat("two")["suspects"] == [(name, 0, 0), (name, 0, 2)]


@pytest.mark.parametrize("order", ["none", "queue"])
def test_by_queue_the_first_of_the_queue_counts(
    order: str, inside: Endpoint, group: Make, name: str
) -> None:
    worker = Worker(inside, group(order=order), name, order="queue", calls=1)
    worker.take("one")

    inside.advance(limits.MEMBER_TIMEOUT_MS)

    assert worker.take("two") == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 1)]


def test_a_suspect_counts_again_only_while_it_is_tried(
    inside: Endpoint, group: Make, name: str
) -> None:
    worker = Worker(inside, group(), name)
    worker.take("one")
    inside.advance(limits.MEMBER_TIMEOUT_MS)
    worker.take("two")
    worker.details["trying"] = [[name, 0, 2]]
    worker.beat("two")
    inside.advance(limits.MEMBER_TIMEOUT_MS)

    assert worker.take("three") == [(0, 2), (1, 1), (2, 3), (3, 1), (4, 1)]


def test_another_process_of_the_same_client_is_told_from_the_one_that_died(
    inside: Endpoint, group: Make, name: str
) -> None:
    worker = Worker(inside, group(), name, instance="first")
    worker.take("one")

    worker.beat("one")
    assert worker.take("one") == []
    worker.details["instance"] = "second"

    assert worker.take("one") == [(0, 2), (1, 1), (2, 2), (3, 1), (4, 1)]


@pytest.mark.parametrize("how", ["leaves", "says nothing of its work"])
def test_nothing_counts_of_one_that(how: str, inside: Endpoint, group: Make, name: str) -> None:
    worker = Worker(inside, group(), name)
    if how != "leaves":
        worker.details = {"calls": "many"}
    worker.take("one")

    if how == "leaves":
        inside.broker.leave(worker.group, "one")
    inside.advance(limits.MEMBER_TIMEOUT_MS)

    assert [attempt for _, attempt in worker.take("two")] == [1] * 5


def test_who_dies_over_a_message_time_and_again_sends_it_to_the_dead_letters(
    inside: Endpoint, group: Make, name: str
) -> None:
    readers = group(max_attempts=3, backoff_ms=[1])
    worker = Worker(inside, readers, name, calls=1)
    for death in range(3):
        assert worker.take(f"worker {death}")[0] == (0, death + 1)
        worker.details["trying"] = [[name, 0, 0]]
        worker.beat(f"worker {death}")
        inside.advance(limits.MEMBER_TIMEOUT_MS)

    assert [offset for offset, _ in worker.take("last")] == [1, 2, 3, 4]
    letters = "SELECT attempts, error_type FROM dead_letters WHERE consumer_group = '{}'"
    assert inside.sql(letters.format(readers)) == [{"attempts": 3, "error_type": "ConsumerDied"}]
