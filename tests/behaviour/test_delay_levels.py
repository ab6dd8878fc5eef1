"""The numbers of delay levels, and what a broker with another table of them does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pydantic
import pytest

from rmq_pipeline import errors, limits
from rmq_pipeline.settings import Settings

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000
DAY = 24 * 3600 * SECOND
TWO_HOURS = 7_200 * SECOND
LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@pytest.fixture
def later(topic: Make) -> str:
    return str(topic(type="delay", queues=1))


def next_due_in(endpoint: Endpoint) -> int | None:
    """Ms until the next scheduled message is due."""
    due = endpoint.broker.due()
    at_ms = due["jobs"]["deliver_scheduled"]["next_due_ms"]
    return None if at_ms is None else at_ms - due["now_ms"]


def test_there_are_eighteen_levels_from_a_second_to_two_hours() -> None:
    units = {"s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND}

    table = [int(text[:-1]) * units[text[-1]] for text in LEVELS.split()]

    assert list(limits.DELAY_LEVELS_MS) == table
    assert Settings().delay_levels_ms == limits.DELAY_LEVELS_MS
    assert len(table) == 18


@pytest.mark.every_endpoint
@pytest.mark.parametrize("level", [19, 1_000, 2**31 - 1])
def test_a_level_above_the_highest_counts_as_the_highest(
    endpoint: Endpoint, later: str, group: Make, messages: Make, level: int
) -> None:
    readers = group()
    sent = endpoint.broker.send(later, messages(1, delay_level=level))

    endpoint.advance(TWO_HOURS - 1)
    early = endpoint.broker.deliver_scheduled()["delivered"]
    endpoint.advance(1)
    report = endpoint.broker.deliver_scheduled()

    assert sent["queue_id"].to_pylist() == [17]
    assert (early, report["delivered"], report["per_level"]) == (0, 1, {"18": 1})
    assert endpoint.drain(later, readers) == [b"0"]


def test_a_delayed_message_comes_with_the_properties_it_was_sent_with_and_no_other(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    given = [("color", "red"), ("size", "7")]
    endpoint.broker.send(later, messages(2, delay_level=[1, 2], properties=[given, None]))
    endpoint.advance(5 * SECOND)
    endpoint.broker.deliver_scheduled()

    got = endpoint.broker.receive(readers, later).to_pylist()

    assert [row["properties"] for row in got] == [given, None]


@pytest.mark.every_endpoint
def test_a_delayed_message_keeps_when_it_was_born_and_is_stored_when_it_is_delivered(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    start = endpoint.clock.now_ms()
    endpoint.broker.send(later, messages(2, delay_level=3, born_at_ms=[17, None]))
    endpoint.advance(10 * SECOND)
    endpoint.broker.deliver_scheduled()

    got = endpoint.broker.receive(readers, later)

    assert got["born_at_ms"].to_pylist() == [17, start]
    assert got["stored_at_ms"].to_pylist() == [start + 10 * SECOND] * 2
    assert got["deliver_at_ms"].to_pylist() == [start + 10 * SECOND] * 2


@pytest.mark.every_endpoint
def test_a_time_months_ahead_is_kept_over_restarts(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(later, messages(1, deliver_at_ms=endpoint.clock.now_ms() + 200 * DAY))

    for _ in range(3):
        endpoint.advance(50 * DAY)
        endpoint.reopen()
        assert endpoint.broker.deliver_scheduled()["delivered"] == 0
    endpoint.advance(50 * DAY - 1)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 0
    endpoint.advance(1)

    assert endpoint.broker.deliver_scheduled()["delivered"] == 1
    assert endpoint.drain(later, readers) == [b"0"]


@pytest.mark.every_endpoint
def test_a_broker_may_allow_less_far_ahead_than_a_year(
    endpoint: Endpoint, later: str, messages: Make
) -> None:
    broker = endpoint.reopen(delay_max_ms=DAY)
    now = endpoint.clock.now_ms()

    with pytest.raises(errors.DeliveryTimeError, match="Row 1"):
        broker.send(later, messages(2, deliver_at_ms=[now + DAY, now + DAY + 1]))

    assert next_due_in(endpoint) is None
    broker.send(later, messages(1, deliver_at_ms=now + DAY))
    assert next_due_in(endpoint) == DAY


# ------------------------------------------------------------------------------------ other tables


@pytest.mark.every_endpoint
def test_a_broker_may_have_another_table_of_levels(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    broker = endpoint.reopen(delay_levels_ms=(7, 70, 700))

    broker.send(later, messages(4, delay_level=[1, 2, 3, 4]))

    for after_ms, bodies in ((7, [b"0"]), (63, [b"1"]), (630, [b"2", b"3"])):
        endpoint.advance(after_ms - 1)
        assert broker.deliver_scheduled()["delivered"] == 0
        endpoint.advance(1)
        assert broker.deliver_scheduled()["delivered"] == len(bodies)
        assert endpoint.drain(later, readers) == bodies


@pytest.mark.every_endpoint
@pytest.mark.parametrize("table", [(1,) * 18, (TWO_HOURS * 24,) * 18, (500,)])
def test_stored_messages_keep_their_moment_when_the_table_changes(
    endpoint: Endpoint, later: str, group: Make, messages: Make, table: tuple[int, ...]
) -> None:
    readers = group()
    endpoint.broker.send(later, messages(2, delay_level=[2, 18]))

    endpoint.reopen(delay_levels_ms=table)

    assert next_due_in(endpoint) == 5 * SECOND
    endpoint.advance(5 * SECOND - 1)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 0
    endpoint.advance(1)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1
    assert next_due_in(endpoint) == TWO_HOURS - 5 * SECOND
    endpoint.advance(TWO_HOURS)
    assert endpoint.broker.deliver_scheduled()["per_level"] == {"18": 1}
    assert endpoint.drain(later, readers) == [b"0", b"1"]


@pytest.mark.every_endpoint
def test_a_level_that_was_added_is_delivered_and_still_drains_once_it_is_removed(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    twenty = (*limits.DELAY_LEVELS_MS, 3 * TWO_HOURS, 4 * TWO_HOURS)
    endpoint.reopen(delay_levels_ms=twenty)
    at_ms = endpoint.clock.now_ms() + 5 * TWO_HOURS
    sent = endpoint.broker.send(
        later,
        messages(4, delay_level=[18, 19, 20, None], deliver_at_ms=[None, None, None, at_ms]),
    )
    levels = endpoint.sql("SELECT delay_level FROM scheduled ORDER BY deliver_at_ms")

    endpoint.reopen()
    endpoint.advance(5 * TWO_HOURS)
    report = endpoint.broker.deliver_scheduled()

    assert len(set(sent["queue_id"].to_pylist())) == 4
    assert [row["delay_level"] for row in levels] == [18, 19, 20, None]
    assert report["per_level"] == {"18": 1, "19": 1, "20": 1, "time": 1}
    assert endpoint.drain(later, readers) == [b"0", b"1", b"2", b"3"]
    assert endpoint.broker.send(later, messages(1, delay_level=20))["queue_id"].to_pylist() == [17]


@pytest.mark.parametrize("table", [(), (0,), (-1, 5), (1,) * 65, ("x",)])
def test_a_table_of_levels_out_of_range_is_refused(table: tuple[int, ...]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Settings(delay_levels_ms=table)
