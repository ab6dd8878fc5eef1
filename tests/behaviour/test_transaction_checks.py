"""Half messages that stay open are asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from rmq_pipeline.transaction import RESOLUTIONS
from tests.behaviour.halves import Producer, asked, ends, reopened_from_the_log, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000


# --------------------------------------------------------------------------------------- the check


@pytest.mark.every_endpoint
def test_a_half_message_is_not_asked_about_for_6_s(endpoint: Endpoint, begin: Producer) -> None:
    begin(2)

    endpoint.advance(5_999)
    early = sweep(endpoint)
    endpoint.advance(1)
    due = endpoint.broker.due()["jobs"]["check_transactions"]
    late = sweep(endpoint)

    assert early == {"checked": 0, "given_up": 0, "dropped": 0}
    assert (due["due"], due["next_due_ms"]) == (2, endpoint.clock.now_ms())
    assert late == {"checked": 2, "given_up": 0, "dropped": 0}
    assert asked(endpoint) == [(b"0", 1), (b"1", 1)]


@pytest.mark.every_endpoint
def test_a_half_message_may_have_an_immunity_of_its_own(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1, immunity_ms=60_000)
    begin(1, start=1, immunity_ms=1)

    endpoint.advance(1)
    sweep(endpoint)
    first = asked(endpoint)
    endpoint.advance(59_998)
    sweep(endpoint)
    second = asked(endpoint)
    endpoint.advance(1)
    sweep(endpoint)

    assert first == [(b"1", 1)]
    assert second == [(b"1", 2)]
    assert asked(endpoint) == [(b"0", 1)]


@pytest.mark.every_endpoint
def test_it_is_asked_about_every_30_s(endpoint: Endpoint, begin: Producer) -> None:
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    for check in range(2, 5):
        endpoint.advance(29_999)
        assert sweep(endpoint)["checked"] == 0
        endpoint.advance(1)
        assert sweep(endpoint)["checked"] == 1
        assert asked(endpoint) == [(b"0", check)]


def test_an_answer_of_unknown_leaves_it_to_the_next_check(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)
    checks = endpoint.broker.fetch_checks()
    endpoint.broker.end_transactions(ends(checks, "unknown"))

    endpoint.advance(30_000)
    sweep(endpoint)
    again = endpoint.broker.fetch_checks()
    endpoint.broker.end_transactions(ends(again, "commit"))

    assert again["checks"].to_pylist() == [2]
    assert endpoint.stored(orders) == 1


@pytest.mark.every_endpoint
def test_an_ended_transaction_is_not_asked_about(endpoint: Endpoint, begin: Producer) -> None:
    halves = begin(3)
    endpoint.broker.end_transactions(ends(halves.slice(0, 1), "commit"))
    endpoint.advance(6_000)
    sweep(endpoint)
    endpoint.broker.end_transactions(ends(halves.slice(1, 1), "rollback"))

    assert asked(endpoint) == [(b"2", 1)]
    endpoint.advance(30_000)
    assert sweep(endpoint)["checked"] == 1


@pytest.mark.every_endpoint
def test_a_check_says_all_about_the_half_message(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    halves = begin(1, tag="t", keys=[["k"]], properties=[[("p", "v")]], born_at_ms=17)
    stored_at_ms = endpoint.clock.now_ms()
    endpoint.advance(6_000)
    sweep(endpoint)

    [check] = endpoint.broker.fetch_checks(topics=[orders], client_id="me").to_pylist()

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
def test_a_check_is_given_to_one_caller(endpoint: Endpoint, begin: Producer) -> None:
    begin(5)
    endpoint.advance(6_000)
    sweep(endpoint)

    first, second = asked(endpoint, limit=3), asked(endpoint, limit=3)

    assert [body for body, _ in first + second] == [b"0", b"1", b"2", b"3", b"4"]
    assert asked(endpoint) == []


@pytest.mark.every_endpoint
def test_a_live_producer_of_the_group_is_asked_first(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(1)
    begin(1, start=1, producer_group="others")
    assert asked(endpoint, producer_group="producers") == []
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, topics=[orders]) == [(b"1", 1)]
    assert asked(endpoint, producer_group="producers") == [(b"0", 1)]


def test_a_producer_that_was_silent_for_60_s_is_not_waited_for(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    asked(endpoint, producer_group="producers")
    endpoint.advance(59_999 - 6_000)
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, topics=[orders]) == []
    endpoint.advance(1)
    assert asked(endpoint, topics=[orders]) == [(b"0", 1)]


def test_a_producer_that_asks_about_other_topics_is_not_waited_for(
    endpoint: Endpoint, orders: str, begin: Producer, topic: Make
) -> None:
    other = topic(type="transaction")
    asked(endpoint, producer_group="producers", topics=[other])
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, producer_group="producers", topics=[other]) == []
    assert asked(endpoint, topics=[orders]) == [(b"0", 1)]


@pytest.mark.every_endpoint
def test_a_live_producer_of_another_group_is_not_asked(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    asked(endpoint, producer_group="others", topics=[orders])
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, producer_group="others", topics=[orders]) == []
    assert asked(endpoint, topics=[orders]) == [(b"0", 1)]


def test_checks_are_asked_for_by_topic(
    endpoint: Endpoint, orders: str, topic: Make, begin: Producer, messages: Make
) -> None:
    other = topic(type="transaction")
    begin(1)
    endpoint.broker.send_half(other, messages(1, start=1), producer_group="producers")
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, topics=[other]) == [(b"1", 1)]
    assert asked(endpoint, topics=[other]) == []
    assert asked(endpoint, topics=[orders, other]) == [(b"0", 1)]
    with pytest.raises(errors.TopicNotFoundError):
        asked(endpoint, topics=["nowhere"])


@pytest.mark.every_endpoint
def test_a_check_that_got_lost_is_asked_again_after_30_s(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)
    lost = asked(endpoint)

    endpoint.advance(30_000)
    before = asked(endpoint)
    sweep(endpoint)

    assert (lost, before) == ([(b"0", 1)], [])
    assert asked(endpoint) == [(b"0", 2)]


def test_only_the_last_check_is_delivered(endpoint: Endpoint, begin: Producer) -> None:
    begin(2)
    endpoint.advance(6_000)
    sweep(endpoint)
    endpoint.advance(30_000)
    sweep(endpoint)

    assert asked(endpoint) == [(b"0", 2), (b"1", 2)]


def test_a_producer_waits_for_checks(endpoint: Endpoint, begin: Producer) -> None:
    waiting = endpoint.begin(
        lambda: endpoint.broker.fetch_checks(producer_group="producers", wait_ms=20_000)
    )
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    assert waiting.result(60)["body"].to_pylist() == [b"0"]


@pytest.mark.every_endpoint
def test_a_waiting_check_job_finds_each_half_message_when_it_is_due(
    endpoint: Endpoint, begin: Producer
) -> None:
    window = endpoint.begin(lambda: endpoint.broker.check_transactions(wait_ms=10_000))
    begin(1)
    begin(1, immunity_ms=9_000)

    endpoint.advance(6_000)
    first = endpoint.broker.fetch_checks(wait_ms=0)
    while not first.num_rows:
        first = endpoint.broker.fetch_checks(wait_ms=0)
    endpoint.advance(4_000)

    assert first.num_rows == 1
    assert window.result(60)["checked"] == 2


def test_a_check_job_takes_at_most_its_limit(endpoint: Endpoint, begin: Producer) -> None:
    begin(25)
    endpoint.advance(6_000)

    checked = [endpoint.broker.check_transactions(limit=10)["checked"] for _ in range(4)]

    assert checked == [10, 10, 5, 0]


def test_a_check_job_whose_window_was_taken_over_does_nothing(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1)
    endpoint.advance(6_000)
    name = "upkeep/check_transactions"
    old = endpoint.broker.open_window(name, owner="a", duration_ms=SECOND)["epoch"]
    endpoint.broker.open_window(name, owner="b", duration_ms=SECOND, takeover=True)

    with pytest.raises(errors.FencedError):
        endpoint.broker.check_transactions(window=(name, old))

    assert asked(endpoint) == []
    assert endpoint.broker.due()["jobs"]["check_transactions"]["window"]["owner"] == "b"


def test_a_run_whose_window_was_taken_over_is_not_asked_and_not_listened_to(
    endpoint: Endpoint, begin: Producer, orders: str
) -> None:
    halves = begin(2)
    endpoint.advance(6_000)
    name = "upkeep/check_transactions"
    old = endpoint.broker.open_window(name, owner="a", duration_ms=SECOND)["epoch"]
    new = endpoint.broker.open_window(name, owner="b", duration_ms=SECOND, takeover=True)["epoch"]
    endpoint.broker.check_transactions(window=(name, new))

    with pytest.raises(errors.FencedError):
        endpoint.broker.fetch_checks(topics=[orders], window=(name, old))
    for resolution in RESOLUTIONS:
        with pytest.raises(errors.FencedError):
            endpoint.broker.end_transactions(ends(halves, resolution), window=(name, old))
    checks = endpoint.broker.fetch_checks(topics=[orders], window=(name, new))
    ended = endpoint.broker.end_transactions(ends(halves, "commit"), window=(name, new))

    assert checks["transaction_id"].equals(halves["transaction_id"])
    assert ended["first_time"].to_pylist() == [True, True]


# ----------------------------------------------------------------------------------------- crashes


@pytest.mark.every_endpoint
@pytest.mark.parametrize("from_the_log", [False, True])
def test_a_half_message_is_there_after_a_crash_between_it_and_its_end(
    endpoint: Endpoint, orders: str, begin: Producer, from_the_log: bool
) -> None:
    halves = begin(1, producer_group="a")
    begin(2, start=1, producer_group="b")
    begin(1, start=3, producer_group="a")
    endpoint.advance(5_999)

    if from_the_log:
        reopened_from_the_log(endpoint)
    else:
        endpoint.reopen()

    assert sweep(endpoint)["checked"] == 0
    endpoint.advance(1)
    assert sweep(endpoint)["checked"] == 4
    assert asked(endpoint, producer_group="a") == [(b"0", 1), (b"3", 1)]
    assert asked(endpoint, producer_group="b") == [(b"1", 1), (b"2", 1)]
    endpoint.broker.end_transactions(ends(halves, "commit"), producer_group="a")
    assert endpoint.bodies(orders) == [b"0"]


@pytest.mark.every_endpoint
def test_checks_are_counted_across_restarts(endpoint: Endpoint, begin: Producer) -> None:
    begin(1)
    endpoint.advance(6_000)
    for _ in range(15):
        assert sweep(endpoint)["checked"] == 1
        endpoint.advance(29_999)
        endpoint.reopen()
        assert sweep(endpoint)["checked"] == 0
        endpoint.advance(1)

    assert sweep(endpoint)["given_up"] == 1


def test_an_offer_is_forgotten_by_a_restart_and_made_again_30_s_later(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    endpoint.reopen()
    lost = asked(endpoint)
    endpoint.advance(30_000)
    sweep(endpoint)

    assert lost == []
    assert asked(endpoint) == [(b"0", 2)]
