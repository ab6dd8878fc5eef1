"""A window is a lease on a piece of background work: one owner, an epoch, an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000
JOB = "upkeep/deliver_scheduled"


def opening(endpoint: Endpoint, owner: str, name: str = JOB, **how: Any) -> dict[str, Any]:
    return endpoint.broker.open_window(name, owner=owner, duration_ms=MINUTE, **how)


def test_the_second_owner_yields_to_the_first(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")

    second = opening(endpoint, "run-2")

    assert "yielded_to" not in first
    assert second == {
        "yielded_to": "run-1",
        "epoch": first["epoch"],
        "expires_at_ms": endpoint.clock.now_ms() + MINUTE,
    }


@pytest.mark.every_endpoint
def test_a_window_is_told_whether_the_one_before_was_closed(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")
    endpoint.broker.close_window(JOB, epoch=first["epoch"])
    second = opening(endpoint, "run-2")
    taken = opening(endpoint, "run-3", takeover=True)
    endpoint.clock.advance(MINUTE)
    after_its_time = opening(endpoint, "run-4")

    told = [each["follows_unclosed"] for each in (first, second, taken, after_its_time)]
    assert told == [False, False, True, True]


def test_windows_of_other_names_do_not_yield(endpoint: Endpoint, group: Make) -> None:
    readers = group()
    opening(endpoint, "run-1")

    others = [opening(endpoint, "run-2", n) for n in ("upkeep/revive", f"consumer/{readers}")]

    assert all("yielded_to" not in other for other in others)


def test_a_window_that_is_not_renewed_ends(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")
    endpoint.advance(MINUTE - 1)
    early = opening(endpoint, "run-2")
    endpoint.advance(1)

    second = opening(endpoint, "run-2")

    assert early["yielded_to"] == "run-1"
    assert second["epoch"] > first["epoch"]


def test_a_renewed_window_lasts(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")
    for _ in range(5):
        endpoint.advance(MINUTE - 1)
        endpoint.broker.renew_window(JOB, epoch=first["epoch"], duration_ms=MINUTE)

    second = opening(endpoint, "run-2")

    assert second["yielded_to"] == "run-1"
    assert second["expires_at_ms"] == endpoint.clock.now_ms() + MINUTE


def test_a_closed_window_is_free(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")

    endpoint.broker.close_window(JOB, epoch=first["epoch"])

    assert opening(endpoint, "run-2")["epoch"] > first["epoch"]


def test_a_takeover_ends_a_live_window(endpoint: Endpoint) -> None:
    first = opening(endpoint, "run-1")

    second = opening(endpoint, "run-2", takeover=True)

    assert second["epoch"] > first["epoch"]
    with pytest.raises(errors.FencedError):
        endpoint.broker.renew_window(JOB, epoch=first["epoch"], duration_ms=MINUTE)


UPKEEP: dict[str, Callable[[Endpoint, tuple[str, int]], object]] = {
    "deliver_scheduled": lambda endpoint, window: endpoint.broker.deliver_scheduled(window=window),
    "revive": lambda endpoint, window: endpoint.broker.revive(window=window),
    "seal": lambda endpoint, window: endpoint.broker.seal(window=window),
}


@pytest.mark.parametrize("job", UPKEEP)
def test_upkeep_of_an_older_epoch_is_fenced(endpoint: Endpoint, job: str) -> None:
    name = f"upkeep/{job}"
    old = opening(endpoint, "run-1", name)["epoch"]
    UPKEEP[job](endpoint, (name, old))
    new = opening(endpoint, "run-2", name, takeover=True)["epoch"]

    with pytest.raises(errors.FencedError):
        UPKEEP[job](endpoint, (name, old))

    UPKEEP[job](endpoint, (name, new))


@pytest.mark.every_endpoint
def test_a_receive_of_an_older_epoch_is_fenced(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    endpoint.broker.send(name, messages(1))
    old = opening(endpoint, "run-1", "consumer/readers")["epoch"]
    opening(endpoint, "run-2", "consumer/readers", takeover=True)

    with pytest.raises(errors.FencedError):
        endpoint.broker.receive(readers, name, window=("consumer/readers", old))

    assert endpoint.drain(name, readers) == [b"0"]


def test_a_higher_epoch_gets_the_older_ones_messages_at_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(name="readers", order="message_group")
    endpoint.broker.send(name, messages(10, groups=["a", "b"]))
    old = opening(endpoint, "run-1", "consumer/readers")["epoch"]
    late = endpoint.broker.receive(readers, name, limit=6, window=("consumer/readers", old))

    new = opening(endpoint, "run-2", "consumer/readers", takeover=True)["epoch"]
    got = endpoint.broker.receive(readers, name, window=("consumer/readers", new))

    assert late.num_rows == 6
    assert set(late["body"].to_pylist()) <= set(got["body"].to_pylist())
    assert set(got["delivery_attempt"].to_pylist()) == {1}
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(late)
    endpoint.broker.ack(got)
    assert got.num_rows + len(endpoint.drain(name, readers)) == 10


def test_a_higher_epoch_after_the_window_ended_gets_them_too(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    endpoint.broker.send(name, messages(3))
    old = opening(endpoint, "run-1", "consumer/readers")["epoch"]
    endpoint.broker.receive(
        readers, name, window=("consumer/readers", old), invisible_duration_ms=10 * MINUTE
    )
    endpoint.advance(MINUTE)

    new = opening(endpoint, "run-2", "consumer/readers")["epoch"]
    got = endpoint.broker.receive(readers, name, window=("consumer/readers", new))

    assert got["delivery_attempt"].to_pylist() == [1, 1, 1]


@pytest.mark.every_endpoint
@pytest.mark.parametrize("ordered", [False, True])
def test_a_lease_that_had_ended_before_the_higher_epoch_counts(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, ordered: bool
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(name="readers", order="message_group" if ordered else "none", max_attempts=3)
    endpoint.broker.send(name, messages(2, groups=["a"]))

    attempts = []
    for run in range(3):
        window = ("consumer/readers", opening(endpoint, f"run-{run}", "consumer/readers")["epoch"])
        got = endpoint.broker.receive(readers, name, window=window, invisible_duration_ms=1_000)
        attempts.append(got["delivery_attempt"].to_pylist())
        endpoint.advance(MINUTE)
    opening(endpoint, "last", "consumer/readers")
    endpoint.broker.revive()

    assert attempts == ([[1, 1], [2, 1], [3, 1]] if ordered else [[1, 1], [2, 2], [3, 3]])
    assert endpoint.bodies("%DLQ%readers") == ([b"0"] if ordered else [b"0", b"1"])


def test_a_higher_epoch_leaves_leases_without_a_window_alone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    opening(endpoint, "run-1", "consumer/readers", takeover=True)

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.ack(got)
    endpoint.advance(10 * 60_000)
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_a_takeover_wakes_who_waits_for_the_messages(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    endpoint.broker.send(name, messages(1))
    old = opening(endpoint, "run-1", "consumer/readers")["epoch"]
    endpoint.broker.receive(readers, name, window=("consumer/readers", old))
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    opening(endpoint, "run-2", "consumer/readers", takeover=True)

    assert poll.result(60).num_rows == 1


@pytest.mark.parametrize("name", ["", "upkeep", "upkeep/", "elsewhere/x", "consumer/"])
def test_a_window_of_no_known_work_is_refused(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(errors.RocketMQError):
        opening(endpoint, "run-1", name)


def test_a_window_of_an_unknown_group_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        opening(endpoint, "run-1", "consumer/nobody")
