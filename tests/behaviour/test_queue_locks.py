"""A queue that a client has locked is given to no other client of its consumer group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    import pyarrow as pa

    from tests.behaviour.conftest import Endpoint, Make

LOCK_MS = 60_000


@pytest.fixture
def name(endpoint: Endpoint, topic: Make, messages: Make) -> str:
    """Four queues with ten messages each."""
    made = str(topic(queues=4))
    endpoint.broker.send(made, messages(40))
    return made


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def lock(
    endpoint: Endpoint, readers: str, name: str, *queues: int, by: str, **how: Any
) -> list[int]:
    return endpoint.broker.lock_queues(readers, name, queue_ids=queues, client_id=by, **how)


def receive(endpoint: Endpoint, name: str, readers: str, *, by: str, **how: Any) -> pa.Table:
    return endpoint.broker.receive(
        readers, name, client_id=by, limit=100, invisible_duration_ms=3_600_000, **how
    )


def queues(got: pa.Table) -> set[int]:
    return set(got["queue_id"].to_pylist())


@pytest.mark.every_endpoint
def test_a_queue_belongs_to_one_client_at_a_time(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    assert lock(endpoint, readers, name, 0, 1, 1, by="a") == [0, 1]

    assert lock(endpoint, readers, name, 1, 2, by="b") == [2]


def test_others_are_passed_over_a_locked_queue(endpoint: Endpoint, name: str, readers: str) -> None:
    lock(endpoint, readers, name, 0, 1, by="a")

    assert queues(receive(endpoint, name, readers, by="b")) == {2, 3}
    assert queues(receive(endpoint, name, readers, by="a")) == {0, 1}


@pytest.mark.every_endpoint
def test_who_asks_for_a_locked_queue_is_told_who_has_it(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    lock(endpoint, readers, name, 1, by="a")

    with pytest.raises(errors.QueueLockedError) as refused:
        receive(endpoint, name, readers, by="b", queue_ids=[0, 1])

    expires_at_ms = endpoint.clock.now_ms() + LOCK_MS
    assert (refused.value.queue_id, refused.value.holder) == (1, "a")
    assert refused.value.expires_at_ms == expires_at_ms
    assert all(word in refused.value.message for word in ("Queue 1", "client a", readers))
    assert str(expires_at_ms) in refused.value.message
    assert queues(receive(endpoint, name, readers, by="b")) == {0, 2, 3}


def test_another_consumer_group_has_locks_of_its_own(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    lock(endpoint, readers, name, 0, 1, 2, 3, by="a")

    others = group()

    assert lock(endpoint, others, name, 0, by="b") == [0]
    assert queues(receive(endpoint, name, others, by="b")) == {0, 1, 2, 3}


@pytest.mark.every_endpoint
def test_receiving_from_queues_gives_no_other_ones(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    got = receive(endpoint, name, readers, by="", queue_ids=(3, 1))

    assert queues(got) == {1, 3}
    assert got.num_rows == 20


@pytest.mark.parametrize("queue_ids", [[4], [-1], ["first"], [True], "01"])
def test_what_is_no_queue_of_the_topic_is_refused(
    endpoint: Endpoint, name: str, readers: str, queue_ids: Any
) -> None:
    with pytest.raises(errors.RequestError):
        receive(endpoint, name, readers, by="a", queue_ids=queue_ids)
    with pytest.raises(errors.RequestError):
        lock(endpoint, readers, name, *queue_ids, by="a")


@pytest.mark.every_endpoint
def test_a_lock_ends_after_its_time(endpoint: Endpoint, name: str, readers: str) -> None:
    lock(endpoint, readers, name, 0, by="a")

    endpoint.advance(LOCK_MS - 1)
    assert lock(endpoint, readers, name, 0, by="b") == []
    endpoint.advance(1)

    assert lock(endpoint, readers, name, 0, by="b") == [0]
    assert lock(endpoint, readers, name, 0, by="a") == []


@pytest.mark.every_endpoint
def test_a_renewed_lock_lasts_from_then_on(endpoint: Endpoint, name: str, readers: str) -> None:
    lock(endpoint, readers, name, 0, by="a")
    got = receive(endpoint, name, readers, by="a", queue_ids=[0])
    endpoint.advance(LOCK_MS - 1)

    assert lock(endpoint, readers, name, 0, by="a") == [0]

    endpoint.advance(LOCK_MS - 1)
    assert lock(endpoint, readers, name, 0, by="b") == []
    endpoint.broker.ack(got)


@pytest.mark.every_endpoint
def test_taking_over_ends_what_the_one_before_was_given(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    lock(endpoint, readers, name, 0, by="a")
    before = receive(endpoint, name, readers, by="a", queue_ids=[0])
    endpoint.advance(LOCK_MS)

    lock(endpoint, readers, name, 0, by="b")

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(before)
    again = receive(endpoint, name, readers, by="b", queue_ids=[0])
    assert again["body"].to_pylist() == before["body"].to_pylist()
    assert set(again["delivery_attempt"].to_pylist()) == {1}
    endpoint.broker.ack(again)


def test_a_first_lock_ends_what_others_were_given_before(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    before = receive(endpoint, name, readers, by="b")

    lock(endpoint, readers, name, 0, by="a")

    assert receive(endpoint, name, readers, by="a", queue_ids=[0]).num_rows == 10
    kept = before.slice(10)
    assert 0 not in queues(kept)
    endpoint.broker.ack(kept)
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(before.slice(0, 1))


@pytest.mark.every_endpoint
def test_unlocking_gives_the_queue_to_others_at_once(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    lock(endpoint, readers, name, 0, 1, by="a")
    before = receive(endpoint, name, readers, by="a", queue_ids=[0])

    assert endpoint.broker.unlock_queues(readers, name, queue_ids=[0, 2], client_id="a") == [0]

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(before)
    assert lock(endpoint, readers, name, 0, 1, by="b") == [0]
    assert receive(endpoint, name, readers, by="b", queue_ids=[0]).num_rows == 10


def test_only_the_holder_unlocks(endpoint: Endpoint, name: str, readers: str) -> None:
    lock(endpoint, readers, name, 0, by="a")

    assert endpoint.broker.unlock_queues(readers, name, queue_ids=[0], client_id="b") == []
    assert lock(endpoint, readers, name, 0, by="b") == []


def test_a_waiting_receive_is_woken_by_the_end_of_a_lock(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    lock(endpoint, readers, name, 0, 1, 2, 3, by="a", duration_ms=500)
    waiting = endpoint.begin(lambda: receive(endpoint, name, readers, by="b", wait_ms=900))
    assert not waiting.done()

    endpoint.advance(500)

    assert waiting.result(60).num_rows == 40


def test_a_waiting_receive_is_woken_by_unlocking(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    lock(endpoint, readers, name, 0, 1, 2, 3, by="a")
    waiting = endpoint.begin(lambda: receive(endpoint, name, readers, by="b", wait_ms=900))

    endpoint.broker.unlock_queues(readers, name, queue_ids=[2], client_id="a")

    assert queues(waiting.result(60)) == {2}


@pytest.mark.every_endpoint
@pytest.mark.parametrize("from_the_log", [False, True])
def test_locks_and_their_ends_outlive_the_broker(
    endpoint: Endpoint, name: str, readers: str, from_the_log: bool
) -> None:
    lock(endpoint, readers, name, 0, 1, by="a")
    lock(endpoint, readers, name, 2, by="b", duration_ms=120_000)
    endpoint.broker.unlock_queues(readers, name, queue_ids=[1], client_id="a")
    got = receive(endpoint, name, readers, by="a", queue_ids=[0])
    endpoint.sql("FROM queue_locks")  # dispatched

    if from_the_log:
        reopened_from_the_log(endpoint)
    else:
        endpoint.reopen()

    assert lock(endpoint, readers, name, 0, 1, 2, by="c") == [1]
    endpoint.broker.ack(got)
    endpoint.advance(LOCK_MS)
    assert lock(endpoint, readers, name, 0, 2, by="c") == [0]


@pytest.mark.every_endpoint
def test_order_holds_across_a_change_of_hands(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(6, groups=["x", "y"]))
    lock(endpoint, readers, name, 0, by="a")
    before = receive(endpoint, name, readers, by="a", queue_ids=[0])
    endpoint.broker.ack(before.slice(0, 2))
    endpoint.advance(LOCK_MS)

    lock(endpoint, readers, name, 0, by="b")

    again = receive(endpoint, name, readers, by="b", queue_ids=[0])
    assert again["body"].to_pylist() == before["body"].to_pylist()[2:]
    assert set(again["delivery_attempt"].to_pylist()) == {1}
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(before.slice(2))


def test_locks_are_there_to_see(endpoint: Endpoint, name: str, readers: str) -> None:
    at_ms = endpoint.clock.now_ms()
    lock(endpoint, readers, name, 1, by="a")
    endpoint.advance(10)
    lock(endpoint, readers, name, 1, by="a")
    lock(endpoint, readers, name, 3, by="b", duration_ms=5)

    rows = endpoint.sql(f"FROM queue_locks WHERE consumer_group = '{readers}' ORDER BY queue_id")
    said = endpoint.broker.describe_group(readers)["locks"]
    endpoint.advance(5)

    assert [(row["queue_id"], row["client_id"]) for row in rows] == [(1, "a"), (3, "b")]
    assert rows[0]["topic"] == name
    assert (rows[0]["locked_at_ms"], rows[0]["renewed_at_ms"]) == (at_ms, at_ms + 10)
    assert rows[0]["expires_at_ms"] == at_ms + 10 + LOCK_MS
    assert [one["queue_id"] for one in said] == [1, 3]
    assert said[0] == {
        "topic": name,
        "queue_id": 1,
        "client_id": "a",
        "locked_at_ms": at_ms,
        "expires_at_ms": at_ms + 10 + LOCK_MS,
    }
    assert [one["queue_id"] for one in endpoint.broker.describe_group(readers)["locks"]] == [1]


def test_locks_go_with_their_topic_and_their_group(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    other = group()
    lock(endpoint, readers, name, 0, by="a")
    lock(endpoint, other, name, 0, by="a")
    endpoint.broker.delete_group(readers)
    assert [row["consumer_group"] for row in endpoint.sql("FROM queue_locks")] == [other]

    endpoint.broker.delete_topic(name)

    assert endpoint.sql("FROM queue_locks") == []
    assert endpoint.broker.describe_group(other)["locks"] == []


@pytest.mark.parametrize(
    ("client_id", "duration_ms"), [("", 1), (" ", 1), ("c" * 256, 1), ("c", 0), ("c", 3_600_001)]
)
def test_a_lock_needs_a_name_and_a_time(
    endpoint: Endpoint, name: str, readers: str, client_id: str, duration_ms: int
) -> None:
    with pytest.raises(errors.RequestError):
        lock(endpoint, readers, name, 0, by=client_id, duration_ms=duration_ms)
