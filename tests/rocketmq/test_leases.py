"""Leases of push consumers live as long as their clients do."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.rocketmq.clients import LIVE_MS
from rmq_pipeline.rocketmq.leases import HELD_MAX_MS, LEASE_MS
from tests.rocketmq.consuming import EMPTY, OK, Consumer, Received, Stand
from tests.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=2)
    yield stand
    stand.close()


@pytest.fixture
def slow(stand: Stand) -> Consumer:
    return stand.consumer("slow")


@pytest.fixture
def other(stand: Stand) -> Consumer:
    return stand.consumer("other")


def received_later(stand: Stand, consumer: Consumer) -> Received:
    """What a poll gets while time goes on: the broker ends leases after its last answer."""
    poll = consumer.begin("t", "g")

    def later() -> bool:
        stand.clock.advance(1)
        return poll.done()

    until(later)
    return poll.result(60)


def test_a_slow_listener_that_lives_gets_no_duplicates(
    stand: Stand, slow: Consumer, other: Consumer
) -> None:
    stand.send("t", b"1", b"2")
    received = slow.receive("t", "g", renewed=True)

    stand.pass_time(4 * LEASE_MS, slow)

    assert other.receive("t", "g", renewed=True).code == EMPTY
    reply = slow.ack("t", "g", received.handles)
    assert [entry.status.code for entry in reply.entries] == [OK, OK]
    assert len(stand.context.leases) == 0


def test_what_a_dead_client_had_comes_again(stand: Stand, slow: Consumer, other: Consumer) -> None:
    stand.send("t", b"1")
    received = slow.receive("t", "g", renewed=True)

    stand.pass_time(LIVE_MS + 5_000)

    assert received_later(stand, other).attempts == [2]
    assert slow.ack("t", "g", received.handles).status.code == 40013


def test_a_client_that_says_goodbye_gives_back_what_it_has(
    stand: Stand, slow: Consumer, other: Consumer
) -> None:
    stand.send("t", b"1")
    slow.receive("t", "g", renewed=True)

    slow.terminate()

    assert received_later(stand, other).attempts == [2]


def test_a_client_that_goes_while_leases_are_renewed_keeps_none(
    stand: Stand, slow: Consumer, other: Consumer
) -> None:
    stand.send("t", b"1")
    due = [("slow", handle) for handle in slow.receive("t", "g", renewed=True).handles]
    leases, bridge = stand.context.leases, stand.context.bridge

    slow.terminate()
    late = leases._renew(due, stand.clock.now_ms())
    asyncio.run_coroutine_threadsafe(late, bridge._loop).result(60)
    stand.clock.advance(1)

    assert other.receive("t", "g", renewed=True).attempts == [2]


def test_a_lease_of_a_simple_consumer_is_not_prolonged(
    stand: Stand, slow: Consumer, other: Consumer
) -> None:
    stand.send("t", b"1")
    slow.receive("t", "g", invisible_ms=10_000)

    stand.pass_time(10_000, slow)

    assert other.receive("t", "g").attempts == [2]


def test_a_listener_holds_a_message_for_3_hours_at_most(
    stand: Stand, slow: Consumer, other: Consumer
) -> None:
    """Docs/clients.md says so, and what becomes of the acknowledgement that comes later."""
    assert HELD_MAX_MS == 3 * 60 * 60 * 1_000
    stand.send("t", b"1")
    received = slow.receive("t", "g", renewed=True)
    held = stand.context.leases._held["slow"]
    for lease in held.values():  # hours in steps of seconds would take minutes
        lease.since_ms -= HELD_MAX_MS - 2 * LEASE_MS

    stand.pass_time(LEASE_MS + LEASE_MS // 2, slow)
    before = other.receive("t", "g", renewed=True)
    stand.pass_time(LEASE_MS // 2, slow)
    after = other.receive("t", "g", renewed=True)

    assert (before.code, not held) == (EMPTY, True)
    assert after.attempts == [2]
    assert slow.ack("t", "g", received.handles).status.code == 40013


def test_a_message_settled_elsewhere_is_held_no_more(stand: Stand, slow: Consumer) -> None:
    stand.send("t", b"1")
    received = slow.receive("t", "g", renewed=True)

    stand.broker.ack(received.handles)
    stand.pass_time(25_000, slow)

    assert len(stand.context.leases) == 0
