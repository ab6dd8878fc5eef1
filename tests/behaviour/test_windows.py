"""A window is a lease on a piece of background work: one owner, an epoch, an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000
JOB = "upkeep/deliver_scheduled"


def opening(door: Door, owner: str, name: str = JOB, **how: Any) -> dict[str, Any]:
    return door.broker.open_window(name, owner=owner, duration_ms=MINUTE, **how)


def test_the_second_owner_yields_to_the_first(door: Door) -> None:
    first = opening(door, "run-1")

    second = opening(door, "run-2")

    assert "yielded_to" not in first
    assert second == {
        "yielded_to": "run-1",
        "epoch": first["epoch"],
        "expires_at_ms": door.clock.now_ms() + MINUTE,
    }


@pytest.mark.every_endpoint
def test_a_window_is_told_whether_the_one_before_was_closed(door: Door) -> None:
    first = opening(door, "run-1")
    door.broker.close_window(JOB, epoch=first["epoch"])
    second = opening(door, "run-2")
    taken = opening(door, "run-3", takeover=True)
    door.clock.advance(MINUTE)
    after_its_time = opening(door, "run-4")

    told = [each["follows_unclosed"] for each in (first, second, taken, after_its_time)]
    assert told == [False, False, True, True]


def test_windows_of_other_names_do_not_yield(door: Door, group: Make) -> None:
    readers = group()
    opening(door, "run-1")

    others = [opening(door, "run-2", n) for n in ("upkeep/revive", f"consumer/{readers}")]

    assert all("yielded_to" not in other for other in others)


def test_a_window_that_is_not_renewed_ends(door: Door) -> None:
    first = opening(door, "run-1")
    door.advance(MINUTE - 1)
    early = opening(door, "run-2")
    door.advance(1)

    second = opening(door, "run-2")

    assert early["yielded_to"] == "run-1"
    assert second["epoch"] > first["epoch"]


def test_a_renewed_window_lasts(door: Door) -> None:
    first = opening(door, "run-1")
    for _ in range(5):
        door.advance(MINUTE - 1)
        door.broker.renew_window(JOB, epoch=first["epoch"], duration_ms=MINUTE)

    second = opening(door, "run-2")

    assert second["yielded_to"] == "run-1"
    assert second["expires_at_ms"] == door.clock.now_ms() + MINUTE


def test_a_closed_window_is_free(door: Door) -> None:
    first = opening(door, "run-1")

    door.broker.close_window(JOB, epoch=first["epoch"])

    assert opening(door, "run-2")["epoch"] > first["epoch"]


def test_a_takeover_ends_a_live_window(door: Door) -> None:
    first = opening(door, "run-1")

    second = opening(door, "run-2", takeover=True)

    assert second["epoch"] > first["epoch"]
    with pytest.raises(errors.FencedError):
        door.broker.renew_window(JOB, epoch=first["epoch"], duration_ms=MINUTE)


UPKEEP: dict[str, Callable[[Door, tuple[str, int]], object]] = {
    "deliver_scheduled": lambda door, window: door.broker.deliver_scheduled(window=window),
    "revive": lambda door, window: door.broker.revive(window=window),
    "seal": lambda door, window: door.broker.seal(window=window),
}


@pytest.mark.parametrize("job", UPKEEP)
def test_upkeep_of_an_older_epoch_is_fenced(door: Door, job: str) -> None:
    name = f"upkeep/{job}"
    old = opening(door, "run-1", name)["epoch"]
    UPKEEP[job](door, (name, old))
    new = opening(door, "run-2", name, takeover=True)["epoch"]

    with pytest.raises(errors.FencedError):
        UPKEEP[job](door, (name, old))

    UPKEEP[job](door, (name, new))


@pytest.mark.every_endpoint
def test_a_receive_of_an_older_epoch_is_fenced(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    door.broker.send(name, messages(1))
    old = opening(door, "run-1", "consumer/readers")["epoch"]
    opening(door, "run-2", "consumer/readers", takeover=True)

    with pytest.raises(errors.FencedError):
        door.broker.receive(readers, name, window=("consumer/readers", old))

    assert door.drain(name, readers) == [b"0"]


def test_a_higher_epoch_gets_the_older_ones_messages_at_once(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(name="readers", order="message_group")
    door.broker.send(name, messages(10, groups=["a", "b"]))
    old = opening(door, "run-1", "consumer/readers")["epoch"]
    late = door.broker.receive(readers, name, limit=6, window=("consumer/readers", old))

    new = opening(door, "run-2", "consumer/readers", takeover=True)["epoch"]
    got = door.broker.receive(readers, name, window=("consumer/readers", new))

    assert late.num_rows == 6
    assert set(late["body"].to_pylist()) <= set(got["body"].to_pylist())
    assert set(got["delivery_attempt"].to_pylist()) == {1}
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(late)
    door.broker.ack(got)
    assert got.num_rows + len(door.drain(name, readers)) == 10


def test_a_higher_epoch_after_the_window_ended_gets_them_too(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    door.broker.send(name, messages(3))
    old = opening(door, "run-1", "consumer/readers")["epoch"]
    door.broker.receive(
        readers, name, window=("consumer/readers", old), invisible_duration_ms=10 * MINUTE
    )
    door.advance(MINUTE)

    new = opening(door, "run-2", "consumer/readers")["epoch"]
    got = door.broker.receive(readers, name, window=("consumer/readers", new))

    assert got["delivery_attempt"].to_pylist() == [1, 1, 1]


@pytest.mark.every_endpoint
@pytest.mark.parametrize("ordered", [False, True])
def test_a_lease_that_had_ended_before_the_higher_epoch_counts(
    door: Door, topic: Make, group: Make, messages: Make, ordered: bool
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(name="readers", order="message_group" if ordered else "none", max_attempts=3)
    door.broker.send(name, messages(2, groups=["a"]))

    attempts = []
    for run in range(3):
        window = ("consumer/readers", opening(door, f"run-{run}", "consumer/readers")["epoch"])
        got = door.broker.receive(readers, name, window=window, invisible_duration_ms=1_000)
        attempts.append(got["delivery_attempt"].to_pylist())
        door.advance(MINUTE)
    opening(door, "last", "consumer/readers")
    door.broker.revive()

    assert attempts == ([[1, 1], [2, 1], [3, 1]] if ordered else [[1, 1], [2, 2], [3, 3]])
    assert door.bodies("%DLQ%readers") == ([b"0"] if ordered else [b"0", b"1"])


def test_a_higher_epoch_leaves_leases_without_a_window_alone(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    opening(door, "run-1", "consumer/readers", takeover=True)

    assert door.broker.receive(readers, name).num_rows == 0
    door.broker.ack(got)
    door.advance(10 * 60_000)
    assert door.broker.receive(readers, name).num_rows == 0


def test_a_takeover_wakes_who_waits_for_the_messages(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(name="readers")
    door.broker.send(name, messages(1))
    old = opening(door, "run-1", "consumer/readers")["epoch"]
    door.broker.receive(readers, name, window=("consumer/readers", old))
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    opening(door, "run-2", "consumer/readers", takeover=True)

    assert poll.result(60).num_rows == 1


@pytest.mark.parametrize("name", ["", "upkeep", "upkeep/", "elsewhere/x", "consumer/"])
def test_a_window_of_no_known_work_is_refused(door: Door, name: str) -> None:
    with pytest.raises(errors.RocketMQError):
        opening(door, "run-1", name)


def test_a_window_of_an_unknown_group_is_refused(door: Door) -> None:
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        opening(door, "run-1", "consumer/nobody")
