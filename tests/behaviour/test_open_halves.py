"""How long a half message may stay open, who is asked meanwhile, and what ends it late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors, limits
from tests.behaviour.halves import Producer, asked, ends, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

HOUR = 3_600_000
NOTHING = {"checked": 0, "given_up": 0, "dropped": 0}


def test_the_numbers_of_the_check_are_rocketmqs() -> None:
    assert limits.TRANSACTION_IMMUNITY_MS == 6_000
    assert limits.TRANSACTION_CHECK_INTERVAL_MS == 30_000
    assert limits.TRANSACTION_CHECKS == 15
    assert limits.TRANSACTION_IMMUNITY_MAX_MS == HOUR


@pytest.mark.every_endpoint
def test_half_messages_lie_in_the_one_queue_of_the_half_topic(
    endpoint: Endpoint, begin: Producer
) -> None:
    sent = begin(3)

    assert sent["queue_id"].to_pylist() == [0, 0, 0]
    assert sent["queue_offset"].to_pylist() == [0, 1, 2]
    for name in ("RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"):
        assert len(endpoint.broker.describe_topic(name)["offsets"]) == 1


@pytest.mark.every_endpoint
def test_a_half_message_has_a_transaction_id_of_its_own(begin: Producer) -> None:
    halves = begin(3, message_id=["same", "same", "other"])

    assert len(set(halves["transaction_id"].to_pylist())) == 3


# -------------------------------------------------------------------------------------- late ends


@pytest.mark.every_endpoint
@pytest.mark.parametrize("resolution", ["commit", "rollback"])
def test_an_end_is_taken_as_long_as_the_half_message_is_open(
    endpoint: Endpoint, orders: str, begin: Producer, resolution: str
) -> None:
    halves = begin(1, immunity_ms=1_000)
    begin(1, start=1)
    for _ in range(15):
        endpoint.advance(30_000)
        sweep(endpoint)

    ended = endpoint.broker.end_transactions(ends(halves, resolution))

    assert ended["first_time"].to_pylist() == [True]
    assert endpoint.bodies(orders) == ([b"0"] if resolution == "commit" else [])
    assert endpoint.sql("SELECT checks FROM half") == [{"checks": 15}]


@pytest.mark.every_endpoint
def test_an_answer_to_an_older_check_ends_it(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)
    older = endpoint.broker.fetch_checks()
    endpoint.advance(30_000)
    sweep(endpoint)
    newer = endpoint.broker.fetch_checks()

    endpoint.broker.end_transactions(ends(older, "commit"))

    assert (older["checks"].to_pylist(), newer["checks"].to_pylist()) == ([1], [2])
    assert endpoint.bodies(orders) == [b"0"]
    with pytest.raises(errors.TransactionEndedError):
        endpoint.broker.end_transactions(ends(newer, "rollback"))


@pytest.mark.every_endpoint
def test_a_committed_message_is_found_by_its_tag_and_its_properties(
    endpoint: Endpoint, orders: str, group: Make, begin: Producer
) -> None:
    halves = begin(2, tag=["t", "u"], properties=[{"p": "1"}, {"p": "2"}])

    endpoint.broker.end_transactions(ends(halves, "commit"))

    by_tag = endpoint.broker.receive(group(), orders, filter="t")
    by_property = endpoint.broker.receive(group(), orders, filter="p = 2", filter_type="sql92")
    assert by_tag["body"].to_pylist() == [b"0"]
    assert by_property["body"].to_pylist() == [b"1"]


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.every_endpoint
def test_age_counts_from_when_it_was_stored_and_not_from_its_birth(
    endpoint: Endpoint, begin: Producer
) -> None:
    now = endpoint.clock.now_ms()
    begin(3, born_at_ms=[17, now - 72 * HOUR, now + HOUR])

    endpoint.advance(5_999)
    early = sweep(endpoint)
    endpoint.advance(1)

    assert early == NOTHING
    assert sweep(endpoint)["checked"] == 3


@pytest.mark.every_endpoint
def test_an_own_immunity_counts_no_check_and_then_there_are_fifteen(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1, immunity_ms=HOUR)
    for _ in range(119):
        endpoint.advance(30_000)
        assert sweep(endpoint) == NOTHING
    endpoint.advance(29_999)
    assert sweep(endpoint) == NOTHING

    endpoint.advance(1)
    for check in range(1, 16):
        assert sweep(endpoint)["checked"] == 1
        assert asked(endpoint) == [(b"0", check)]
        endpoint.advance(29_999)
        assert sweep(endpoint) == NOTHING
        endpoint.advance(1)

    assert sweep(endpoint)["given_up"] == 1


@pytest.mark.every_endpoint
def test_checks_count_without_a_producer_to_answer(endpoint: Endpoint, begin: Producer) -> None:
    begin(1)
    endpoint.advance(6_000)

    reports = []
    for _ in range(17):
        reports.append(sweep(endpoint))
        endpoint.advance(30_000)

    assert [report["checked"] for report in reports] == [1] * 15 + [0, 0]
    assert [report["given_up"] for report in reports] == [0] * 15 + [1, 0]
    assert endpoint.stored("TRANS_CHECK_MAX_TIME_TOPIC") == 1


@pytest.mark.every_endpoint
def test_a_half_message_that_is_older_than_72_h_is_asked_about_fifteen_times(
    endpoint: Endpoint, begin: Producer
) -> None:
    begin(1)
    endpoint.close()
    endpoint.advance(80 * HOUR)
    endpoint.open()

    for check in range(1, 16):
        assert sweep(endpoint) == {"checked": 1, "given_up": 0, "dropped": 0}
        assert asked(endpoint) == [(b"0", check)]
        endpoint.advance(30_000)

    assert sweep(endpoint)["given_up"] == 1


def test_a_producer_that_asks_again_is_there_for_another_60_s(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    asked(endpoint, producer_group="producers")
    for _ in range(3):
        endpoint.advance(59_999)
        asked(endpoint, producer_group="producers")
    begin(1)
    endpoint.advance(6_000)
    sweep(endpoint)

    assert asked(endpoint, topics=[orders]) == []
    assert asked(endpoint, producer_group="producers") == [(b"0", 1)]
