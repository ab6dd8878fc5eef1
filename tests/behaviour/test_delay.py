"""Delayed messages come at their time, and never early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors, limits
from tests.waiting import until

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000
LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)


@pytest.fixture
def later(topic: Make) -> str:
    return str(topic(type="delay", queues=1))


@pytest.mark.every_endpoint
def test_each_of_the_eighteen_levels_delivers_to_the_millisecond(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    start = endpoint.clock.now_ms()
    endpoint.broker.send(later, messages(18, start=1, delay_level=list(range(1, 19))))

    for level, seconds in enumerate(LEVELS_S, start=1):
        endpoint.advance(start + seconds * SECOND - 1 - endpoint.clock.now_ms())
        early = endpoint.broker.deliver_scheduled()
        assert early["delivered"] == 0, level
        assert early["next_due_ms"] == start + seconds * SECOND
        assert endpoint.broker.receive(readers, later).num_rows == 0

        endpoint.advance(1)
        report = endpoint.broker.deliver_scheduled()
        assert report["delivered"] == 1
        assert {int(k): n for k, n in report["per_level"].items() if n} == {level: 1}
        assert endpoint.drain(later, readers) == [str(level).encode()]
    assert endpoint.broker.deliver_scheduled()["next_due_ms"] is None


@pytest.mark.every_endpoint
@pytest.mark.parametrize("after_ms", [1, 999, 12_345, 86_400_000 * 40, limits.DELAY_MAX_MS])
def test_any_time_is_kept_to_the_millisecond(
    endpoint: Endpoint, later: str, group: Make, messages: Make, after_ms: int
) -> None:
    readers = group()
    due = endpoint.clock.now_ms() + after_ms
    endpoint.broker.send(later, messages(1, deliver_at_ms=due))

    endpoint.advance(after_ms - 1)
    early = endpoint.broker.deliver_scheduled()
    before = endpoint.broker.receive(readers, later)
    endpoint.advance(1)
    report = endpoint.broker.deliver_scheduled()
    [got] = endpoint.broker.receive(readers, later).to_pylist()

    assert (early["delivered"], before.num_rows, report["delivered"]) == (0, 0, 1)
    assert got["stored_at_ms"] == due
    assert report["lateness_ms"]["max"] == 0


@pytest.mark.every_endpoint
@pytest.mark.parametrize("ago_ms", [0, 1, 10_000_000])
def test_a_time_that_has_come_delivers_at_once(
    endpoint: Endpoint, later: str, group: Make, messages: Make, ago_ms: int
) -> None:
    readers = group()

    endpoint.broker.send(later, messages(1, deliver_at_ms=endpoint.clock.now_ms() - ago_ms))

    assert endpoint.drain(later, readers) == [b"0"]


@pytest.mark.every_endpoint
def test_a_level_wins_over_a_time(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    now = endpoint.clock.now_ms()
    endpoint.broker.send(later, messages(1, delay_level=2, deliver_at_ms=now + 1))

    endpoint.advance(4_999)
    early = endpoint.broker.deliver_scheduled()["delivered"]
    endpoint.advance(1)
    late = endpoint.broker.deliver_scheduled()["delivered"]

    assert (early, late) == (0, 1)
    assert endpoint.drain(later, readers) == [b"0"]


@pytest.mark.every_endpoint
@pytest.mark.parametrize("level", [-1, 0])
def test_a_level_that_is_none_is_refused(
    endpoint: Endpoint, later: str, messages: Make, level: int
) -> None:
    with pytest.raises(errors.DeliveryTimeError):
        endpoint.broker.send(later, messages(2, delay_level=[1, level]))

    endpoint.advance(10 * SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 0


@pytest.mark.every_endpoint
def test_a_time_over_a_year_ahead_is_refused(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    at_ms = endpoint.clock.now_ms() + limits.DELAY_MAX_MS + 1

    with pytest.raises(errors.DeliveryTimeError):
        endpoint.broker.send(later, messages(1, deliver_at_ms=at_ms))

    assert endpoint.broker.deliver_scheduled()["next_due_ms"] is None


@pytest.mark.every_endpoint
def test_the_delivered_message_is_the_one_sent(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    sent = endpoint.broker.send(
        later,
        messages(
            1,
            tag="t",
            keys=[["k"]],
            properties=[[("p", "v")]],
            born_at_ms=17,
            delay_level=1,
        ),
    )
    endpoint.advance(1_500)
    endpoint.broker.deliver_scheduled()

    [got] = endpoint.broker.receive(readers, later).to_pylist()

    assert got["message_id"] == sent["message_id"][0].as_py()
    assert (got["body"], got["tag"], got["keys"], got["born_at_ms"]) == (b"0", "t", ["k"], 17)
    assert dict(got["properties"])["p"] == "v"
    assert got["stored_at_ms"] == endpoint.clock.now_ms()
    assert got["delivery_attempt"] == 1


@pytest.mark.every_endpoint
def test_messages_of_one_level_keep_their_order(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    for start in range(0, 300, 30):
        endpoint.broker.send(later, messages(30, start=start, delay_level=3))
        endpoint.advance(7)

    endpoint.advance(10 * SECOND)
    while endpoint.broker.deliver_scheduled(limit=70)["delivered"]:
        pass

    assert endpoint.drain(later, readers) == [str(i).encode() for i in range(300)]


@pytest.mark.every_endpoint
def test_times_are_delivered_in_the_order_they_are_due(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    now = endpoint.clock.now_ms()
    due = [now + (i * 7919) % 100 + 1 for i in range(100)]
    endpoint.broker.send(later, messages(100, deliver_at_ms=due))

    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()

    expected = sorted(range(100), key=lambda i: (due[i], i))
    assert endpoint.drain(later, readers) == [str(i).encode() for i in expected]


def test_a_delivery_takes_at_most_its_limit(endpoint: Endpoint, later: str, messages: Make) -> None:
    endpoint.broker.send(later, messages(25, delay_level=1))
    endpoint.advance(SECOND)

    delivered = [endpoint.broker.deliver_scheduled(limit=10)["delivered"] for _ in range(4)]

    assert delivered == [10, 10, 5, 0]
    assert endpoint.stored(later) == 25


def test_a_delivery_says_how_late_it_is(endpoint: Endpoint, later: str, messages: Make) -> None:
    endpoint.broker.send(later, messages(10, delay_level=1))
    endpoint.advance(SECOND + 40)

    report = endpoint.broker.deliver_scheduled()

    assert report["lateness_ms"] == {"p50": 40, "p99": 40, "max": 40}
    assert report["dropped"] == 0


def test_a_waiting_delivery_moves_each_message_when_it_is_due(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(later, messages(2, delay_level=[1, 2]))
    window = endpoint.begin(lambda: endpoint.broker.deliver_scheduled(wait_ms=5_000))

    endpoint.advance(999)
    early = endpoint.stored(later)
    endpoint.advance(1)
    until(lambda: endpoint.stored(later) == 1)
    first = endpoint.drain(later, readers)
    endpoint.advance(4_000)
    report = window.result(60)

    assert early == 0
    assert first == [b"0"]
    assert report["delivered"] == 2
    assert report["lateness_ms"]["max"] == 0


@pytest.mark.every_endpoint
def test_a_waiting_delivery_sees_an_earlier_message_arrive(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    endpoint.broker.send(later, messages(1, delay_level=18))
    window = endpoint.begin(lambda: endpoint.broker.deliver_scheduled(wait_ms=5_000))

    endpoint.broker.send(later, messages(1, delay_level=1))
    endpoint.advance(1_000)
    until(lambda: endpoint.stored(later) == 1)
    endpoint.advance(4_000)

    assert window.result(60)["delivered"] == 1


def test_a_waiting_delivery_ends_when_its_time_is_up(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    endpoint.broker.send(later, messages(1, delay_level=18))
    window = endpoint.begin(lambda: endpoint.broker.deliver_scheduled(wait_ms=5_000))

    endpoint.advance(5_000)

    assert window.result(60)["delivered"] == 0


@pytest.mark.every_endpoint
def test_what_is_scheduled_for_a_deleted_topic_is_dropped(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    gone, kept = topic(type="delay"), topic(type="delay")
    endpoint.broker.send(gone, messages(3, delay_level=1))
    endpoint.broker.send(kept, messages(2, delay_level=1))
    endpoint.broker.delete_topic(gone, force=True)
    endpoint.advance(SECOND)

    report = endpoint.broker.deliver_scheduled()

    assert (report["delivered"], report["dropped"]) == (2, 3)
    assert endpoint.stored(kept) == 2


def test_what_was_scheduled_for_a_deleted_topic_does_not_reach_a_new_one_of_its_name(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="delay")
    endpoint.broker.send(name, messages(3, delay_level=1))
    endpoint.broker.delete_topic(name, force=True)
    endpoint.broker.create_topic(name, type="delay")
    endpoint.advance(SECOND)

    endpoint.broker.deliver_scheduled()

    assert endpoint.stored(name) == 0


@pytest.mark.every_endpoint
def test_the_place_of_a_scheduled_message_is_in_the_schedule(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    at_ms = endpoint.clock.now_ms() + 123

    sent = endpoint.broker.send(
        later, messages(3, delay_level=[1, 18, None], deliver_at_ms=[None, None, at_ms])
    )

    assert sent["queue_id"].to_pylist() == [0, 17, 18]
    assert endpoint.stored(later) == 0
