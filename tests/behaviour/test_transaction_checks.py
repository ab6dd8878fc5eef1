"""Half messages that stay open are asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from rmq_pipeline.transaction import RESOLUTIONS
from tests.behaviour.halves import Producer, asked, ends, reopened_from_the_log, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

SECOND = 1_000


@pytest.fixture
def orders(topic: Make) -> str:
    return str(topic(type="transaction", queues=1))


@pytest.fixture
def begin(door: Door, orders: str, messages: Make) -> Producer:
    return Producer(door, orders, messages)


# --------------------------------------------------------------------------------------- the check


@pytest.mark.every_endpoint
def test_a_half_message_is_not_asked_about_for_6_s(door: Door, begin: Producer) -> None:
    begin(2)

    door.advance(5_999)
    early = sweep(door)
    door.advance(1)
    due = door.broker.due()["jobs"]["check_transactions"]
    late = sweep(door)

    assert early == {"checked": 0, "given_up": 0, "dropped": 0}
    assert (due["due"], due["next_due_ms"]) == (2, door.clock.now_ms())
    assert late == {"checked": 2, "given_up": 0, "dropped": 0}
    assert asked(door) == [(b"0", 1), (b"1", 1)]


@pytest.mark.every_endpoint
def test_a_half_message_may_have_an_immunity_of_its_own(door: Door, begin: Producer) -> None:
    begin(1, immunity_ms=60_000)
    begin(1, start=1, immunity_ms=1)

    door.advance(1)
    sweep(door)
    first = asked(door)
    door.advance(59_998)
    sweep(door)
    second = asked(door)
    door.advance(1)
    sweep(door)

    assert first == [(b"1", 1)]
    assert second == [(b"1", 2)]
    assert asked(door) == [(b"0", 1)]


@pytest.mark.every_endpoint
def test_it_is_asked_about_every_30_s(door: Door, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)
    sweep(door)

    for check in range(2, 5):
        door.advance(29_999)
        assert sweep(door)["checked"] == 0
        door.advance(1)
        assert sweep(door)["checked"] == 1
        assert asked(door) == [(b"0", check)]


def test_an_answer_of_unknown_leaves_it_to_the_next_check(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(1)
    door.advance(6_000)
    sweep(door)
    checks = door.broker.fetch_checks()
    door.broker.end_transactions(ends(checks, "unknown"))

    door.advance(30_000)
    sweep(door)
    again = door.broker.fetch_checks()
    door.broker.end_transactions(ends(again, "commit"))

    assert again["checks"].to_pylist() == [2]
    assert door.stored(orders) == 1


@pytest.mark.every_endpoint
def test_an_ended_transaction_is_not_asked_about(door: Door, begin: Producer) -> None:
    halves = begin(3)
    door.broker.end_transactions(ends(halves.slice(0, 1), "commit"))
    door.advance(6_000)
    sweep(door)
    door.broker.end_transactions(ends(halves.slice(1, 1), "rollback"))

    assert asked(door) == [(b"2", 1)]
    door.advance(30_000)
    assert sweep(door)["checked"] == 1


@pytest.mark.every_endpoint
def test_a_check_says_all_about_the_half_message(door: Door, orders: str, begin: Producer) -> None:
    halves = begin(1, tag="t", keys=[["k"]], properties=[[("p", "v")]], born_at_ms=17)
    stored_at_ms = door.clock.now_ms()
    door.advance(6_000)
    sweep(door)

    [check] = door.broker.fetch_checks(topics=[orders], client_id="me").to_pylist()

    assert check == {
        "topic": orders,
        "transaction_id": halves["transaction_id"][0].as_py(),
        "producer_group": "producers",
        "checks": 1,
        "message_id": halves["message_id"][0].as_py(),
        "tag": "t",
        "keys": ["k"],
        "properties": [("p", "v")],
        "body": b"0",
        "born_at_ms": 17,
        "stored_at_ms": stored_at_ms,
    }


@pytest.mark.every_endpoint
def test_a_check_is_given_to_one_caller(door: Door, begin: Producer) -> None:
    begin(5)
    door.advance(6_000)
    sweep(door)

    first, second = asked(door, limit=3), asked(door, limit=3)

    assert [body for body, _ in first + second] == [b"0", b"1", b"2", b"3", b"4"]
    assert asked(door) == []


@pytest.mark.every_endpoint
def test_a_live_producer_of_the_group_is_asked_first(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(1)
    begin(1, start=1, producer_group="others")
    assert asked(door, producer_group="producers") == []
    door.advance(6_000)
    sweep(door)

    assert asked(door, topics=[orders]) == [(b"1", 1)]
    assert asked(door, producer_group="producers") == [(b"0", 1)]


def test_a_producer_that_was_silent_for_60_s_is_not_waited_for(
    door: Door, orders: str, begin: Producer
) -> None:
    asked(door, producer_group="producers")
    door.advance(59_999 - 6_000)
    begin(1)
    door.advance(6_000)
    sweep(door)

    assert asked(door, topics=[orders]) == []
    door.advance(1)
    assert asked(door, topics=[orders]) == [(b"0", 1)]


def test_a_producer_that_asks_about_other_topics_is_not_waited_for(
    door: Door, orders: str, begin: Producer, topic: Make
) -> None:
    other = topic(type="transaction")
    asked(door, producer_group="producers", topics=[other])
    begin(1)
    door.advance(6_000)
    sweep(door)

    assert asked(door, producer_group="producers", topics=[other]) == []
    assert asked(door, topics=[orders]) == [(b"0", 1)]


@pytest.mark.every_endpoint
def test_a_live_producer_of_another_group_is_not_asked(
    door: Door, orders: str, begin: Producer
) -> None:
    asked(door, producer_group="others", topics=[orders])
    begin(1)
    door.advance(6_000)
    sweep(door)

    assert asked(door, producer_group="others", topics=[orders]) == []
    assert asked(door, topics=[orders]) == [(b"0", 1)]


def test_checks_are_asked_for_by_topic(
    door: Door, orders: str, topic: Make, begin: Producer, messages: Make
) -> None:
    other = topic(type="transaction")
    begin(1)
    door.broker.send_half(other, messages(1, start=1), producer_group="producers")
    door.advance(6_000)
    sweep(door)

    assert asked(door, topics=[other]) == [(b"1", 1)]
    assert asked(door, topics=[other]) == []
    assert asked(door, topics=[orders, other]) == [(b"0", 1)]
    with pytest.raises(errors.TopicNotFoundError):
        asked(door, topics=["nowhere"])


@pytest.mark.every_endpoint
def test_a_check_that_got_lost_is_asked_again_after_30_s(door: Door, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)
    sweep(door)
    lost = asked(door)

    door.advance(30_000)
    before = asked(door)
    sweep(door)

    assert (lost, before) == ([(b"0", 1)], [])
    assert asked(door) == [(b"0", 2)]


def test_nobody_is_given_a_check_that_is_not_the_last(door: Door, begin: Producer) -> None:
    begin(2)
    door.advance(6_000)
    sweep(door)
    door.advance(30_000)
    sweep(door)

    assert asked(door) == [(b"0", 2), (b"1", 2)]


def test_a_producer_waits_for_checks(door: Door, begin: Producer) -> None:
    waiting = door.begin(
        lambda: door.broker.fetch_checks(producer_group="producers", wait_ms=20_000)
    )
    begin(1)
    door.advance(6_000)
    sweep(door)

    assert waiting.result(60)["body"].to_pylist() == [b"0"]


@pytest.mark.every_endpoint
def test_a_waiting_check_job_finds_each_half_message_when_it_is_due(
    door: Door, begin: Producer
) -> None:
    window = door.begin(lambda: door.broker.check_transactions(wait_ms=10_000))
    begin(1)
    begin(1, immunity_ms=9_000)

    door.advance(6_000)
    first = door.broker.fetch_checks(wait_ms=0)
    while not first.num_rows:
        first = door.broker.fetch_checks(wait_ms=0)
    door.advance(4_000)

    assert first.num_rows == 1
    assert window.result(60)["checked"] == 2


def test_a_check_job_takes_at_most_its_limit(door: Door, begin: Producer) -> None:
    begin(25)
    door.advance(6_000)

    checked = [door.broker.check_transactions(limit=10)["checked"] for _ in range(4)]

    assert checked == [10, 10, 5, 0]


def test_a_check_job_whose_window_was_taken_over_does_nothing(door: Door, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)
    name = "upkeep/check_transactions"
    old = door.broker.open_window(name, owner="a", duration_ms=SECOND)["epoch"]
    door.broker.open_window(name, owner="b", duration_ms=SECOND, takeover=True)

    with pytest.raises(errors.FencedError):
        door.broker.check_transactions(window=(name, old))

    assert asked(door) == []
    assert door.broker.due()["jobs"]["check_transactions"]["window"]["owner"] == "b"


def test_a_run_whose_window_was_taken_over_is_not_asked_and_not_listened_to(
    door: Door, begin: Producer, orders: str
) -> None:
    halves = begin(2)
    door.advance(6_000)
    name = "upkeep/check_transactions"
    old = door.broker.open_window(name, owner="a", duration_ms=SECOND)["epoch"]
    new = door.broker.open_window(name, owner="b", duration_ms=SECOND, takeover=True)["epoch"]
    door.broker.check_transactions(window=(name, new))

    with pytest.raises(errors.FencedError):
        door.broker.fetch_checks(topics=[orders], window=(name, old))
    for resolution in RESOLUTIONS:
        with pytest.raises(errors.FencedError):
            door.broker.end_transactions(ends(halves, resolution), window=(name, old))
    checks = door.broker.fetch_checks(topics=[orders], window=(name, new))
    ended = door.broker.end_transactions(ends(halves, "commit"), window=(name, new))

    assert checks["transaction_id"].equals(halves["transaction_id"])
    assert ended["first_time"].to_pylist() == [True, True]


# ----------------------------------------------------------------------------------------- crashes


@pytest.mark.every_endpoint
@pytest.mark.parametrize("from_the_log", [False, True])
def test_a_half_message_is_there_after_a_crash_between_it_and_its_end(
    door: Door, orders: str, begin: Producer, from_the_log: bool
) -> None:
    halves = begin(1, producer_group="a")
    begin(2, start=1, producer_group="b")
    begin(1, start=3, producer_group="a")
    door.advance(5_999)

    if from_the_log:
        reopened_from_the_log(door)
    else:
        door.reopen()

    assert sweep(door)["checked"] == 0
    door.advance(1)
    assert sweep(door)["checked"] == 4
    assert asked(door, producer_group="a") == [(b"0", 1), (b"3", 1)]
    assert asked(door, producer_group="b") == [(b"1", 1), (b"2", 1)]
    door.broker.end_transactions(ends(halves, "commit"), producer_group="a")
    assert door.bodies(orders) == [b"0"]


@pytest.mark.every_endpoint
def test_checks_are_counted_across_restarts(door: Door, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)
    for _ in range(15):
        assert sweep(door)["checked"] == 1
        door.advance(29_999)
        door.reopen()
        assert sweep(door)["checked"] == 0
        door.advance(1)

    assert sweep(door)["given_up"] == 1


def test_an_offer_is_forgotten_by_a_restart_and_made_again_30_s_later(
    door: Door, begin: Producer
) -> None:
    begin(1)
    door.advance(6_000)
    sweep(door)

    door.reopen()
    lost = asked(door)
    door.advance(30_000)
    sweep(door)

    assert lost == []
    assert asked(door) == [(b"0", 2)]
