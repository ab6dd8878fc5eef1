"""How long a half message may stay open, who is asked meanwhile, and what ends it late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors, limits
from tests.behaviour.halves import Producer, asked, ends, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

HOUR = 3_600_000
NOTHING = {"checked": 0, "given_up": 0, "dropped": 0}


@pytest.fixture
def orders(topic: Make) -> str:
    return str(topic(type="transaction", queues=1))


@pytest.fixture
def begin(door: Door, orders: str, messages: Make) -> Producer:
    return Producer(door, orders, messages)


def test_the_numbers_of_the_check_are_rocketmqs() -> None:
    assert limits.TRANSACTION_IMMUNITY_MS == 6_000
    assert limits.TRANSACTION_CHECK_INTERVAL_MS == 30_000
    assert limits.TRANSACTION_CHECKS == 15
    assert limits.TRANSACTION_IMMUNITY_MAX_MS == HOUR


@pytest.mark.every_endpoint
def test_half_messages_lie_in_the_one_queue_of_the_half_topic(door: Door, begin: Producer) -> None:
    sent = begin(3)

    assert sent["queue_id"].to_pylist() == [0, 0, 0]
    assert sent["queue_offset"].to_pylist() == [0, 1, 2]
    for name in ("RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"):
        assert len(door.broker.describe_topic(name)["offsets"]) == 1


@pytest.mark.every_endpoint
def test_a_half_message_has_a_transaction_id_of_its_own(begin: Producer) -> None:
    halves = begin(3, message_id=["same", "same", "other"])

    assert len(set(halves["transaction_id"].to_pylist())) == 3


# -------------------------------------------------------------------------------------- late ends


@pytest.mark.every_endpoint
@pytest.mark.parametrize("resolution", ["commit", "rollback"])
def test_an_end_is_taken_as_long_as_the_half_message_is_open(
    door: Door, orders: str, begin: Producer, resolution: str
) -> None:
    halves = begin(1, immunity_ms=1_000)
    begin(1, start=1)
    for _ in range(15):
        door.advance(30_000)
        sweep(door)

    ended = door.broker.end_transactions(ends(halves, resolution))

    assert ended["first_time"].to_pylist() == [True]
    assert door.bodies(orders) == ([b"0"] if resolution == "commit" else [])
    assert door.sql("SELECT checks FROM half") == [{"checks": 15}]


@pytest.mark.every_endpoint
def test_an_answer_to_an_older_check_ends_it(door: Door, orders: str, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)
    sweep(door)
    older = door.broker.fetch_checks()
    door.advance(30_000)
    sweep(door)
    newer = door.broker.fetch_checks()

    door.broker.end_transactions(ends(older, "commit"))

    assert (older["checks"].to_pylist(), newer["checks"].to_pylist()) == ([1], [2])
    assert door.bodies(orders) == [b"0"]
    with pytest.raises(errors.TransactionEndedError):
        door.broker.end_transactions(ends(newer, "rollback"))


@pytest.mark.every_endpoint
def test_a_committed_message_is_found_by_its_tag_and_its_properties(
    door: Door, orders: str, group: Make, begin: Producer
) -> None:
    halves = begin(2, tag=["t", "u"], properties=[{"p": "1"}, {"p": "2"}])

    door.broker.end_transactions(ends(halves, "commit"))

    by_tag = door.broker.receive(group(), orders, filter="t")
    by_property = door.broker.receive(group(), orders, filter="p = 2", filter_type="sql92")
    assert by_tag["body"].to_pylist() == [b"0"]
    assert by_property["body"].to_pylist() == [b"1"]


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.every_endpoint
def test_age_counts_from_when_it_was_stored_and_not_from_its_birth(
    door: Door, begin: Producer
) -> None:
    now = door.clock.now_ms()
    begin(3, born_at_ms=[17, now - 72 * HOUR, now + HOUR])

    door.advance(5_999)
    early = sweep(door)
    door.advance(1)

    assert early == NOTHING
    assert sweep(door)["checked"] == 3


@pytest.mark.every_endpoint
def test_an_own_immunity_counts_no_check_and_then_there_are_fifteen(
    door: Door, begin: Producer
) -> None:
    begin(1, immunity_ms=HOUR)
    for _ in range(119):
        door.advance(30_000)
        assert sweep(door) == NOTHING
    door.advance(29_999)
    assert sweep(door) == NOTHING

    door.advance(1)
    for check in range(1, 16):
        assert sweep(door)["checked"] == 1
        assert asked(door) == [(b"0", check)]
        door.advance(29_999)
        assert sweep(door) == NOTHING
        door.advance(1)

    assert sweep(door)["given_up"] == 1


@pytest.mark.every_endpoint
def test_checks_count_though_nobody_is_there_to_answer(door: Door, begin: Producer) -> None:
    begin(1)
    door.advance(6_000)

    reports = []
    for _ in range(17):
        reports.append(sweep(door))
        door.advance(30_000)

    assert [report["checked"] for report in reports] == [1] * 15 + [0, 0]
    assert [report["given_up"] for report in reports] == [0] * 15 + [1, 0]
    assert door.stored("TRANS_CHECK_MAX_TIME_TOPIC") == 1


@pytest.mark.every_endpoint
def test_a_half_message_that_is_older_than_72_h_is_asked_about_fifteen_times(
    door: Door, begin: Producer
) -> None:
    begin(1)
    door.close()
    door.advance(80 * HOUR)
    door.open()

    for check in range(1, 16):
        assert sweep(door) == {"checked": 1, "given_up": 0, "dropped": 0}
        assert asked(door) == [(b"0", check)]
        door.advance(30_000)

    assert sweep(door)["given_up"] == 1


def test_a_producer_that_asks_again_is_there_for_another_60_s(
    door: Door, orders: str, begin: Producer
) -> None:
    asked(door, producer_group="producers")
    for _ in range(3):
        door.advance(59_999)
        asked(door, producer_group="producers")
    begin(1)
    door.advance(6_000)
    sweep(door)

    assert asked(door, topics=[orders]) == []
    assert asked(door, producer_group="producers") == [(b"0", 1)]
