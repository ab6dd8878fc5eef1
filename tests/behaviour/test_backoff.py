"""A group's backoff: a table of its own, or delays that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_exponential_backoff_doubles_from_five_seconds_to_two_hours(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff="exponential")
    door.broker.send(name, messages(1))

    for seconds in (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 7200, 7200, 7200, 7200):
        fail(readers, door.broker.receive(readers, name))
        door.advance(seconds * 1000 - 1)
        assert door.broker.receive(readers, name).num_rows == 0
        door.advance(1)
    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [16]


def test_exponential_backoff_may_have_its_own_numbers(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    policy = {"initial_ms": 100, "max_ms": 1_000, "multiplier": 3}
    name, readers = topic(queues=1), group(backoff=policy)
    door.broker.send(name, messages(1))

    for milliseconds in (100, 300, 900, 1_000, 1_000):
        fail(readers, door.broker.receive(readers, name))
        door.advance(milliseconds - 1)
        assert door.broker.receive(readers, name).num_rows == 0
        door.advance(1)
    assert door.broker.describe_group(readers)["backoff"] == policy


def test_exponential_backoff_grows_no_further_after_32_failures(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    policy = {"initial_ms": 1_000, "max_ms": 7_200_000, "multiplier": 1.1}
    name, readers = topic(queues=1), group(backoff=policy, max_attempts=50)
    door.broker.send(name, messages(1))

    for failures in range(1, 37):
        wait = int(1_000 * 1.1 ** min(failures - 1, 32))
        fail(readers, door.broker.receive(readers, name))
        door.advance(wait - 1)
        assert door.broker.receive(readers, name).num_rows == 0, failures
        door.advance(1)


def test_a_backoff_altered_live_holds_from_the_next_failure_on(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[1_000])
    door.broker.send(name, messages(1))
    fail(readers, door.broker.receive(readers, name))

    door.broker.alter_group(readers, backoff={"initial_ms": 50})

    door.advance(1_000)
    fail(readers, door.broker.receive(readers, name))
    door.advance(99)
    assert door.broker.receive(readers, name).num_rows == 0
    door.advance(1)
    fail(readers, door.broker.receive(readers, name))
    altered = door.broker.alter_group(readers, backoff_ms=[7])
    assert (altered["backoff"], altered["backoff_ms"]) == ("customized", [7])


@pytest.mark.parametrize(
    "backoff",
    [
        "linear",
        {"initial_ms": -1},
        {"max_ms": 1.5},
        {"multiplier": 0.5},
        {"multiplier": "2"},
        {"factor": 2},
    ],
)
def test_a_backoff_that_makes_no_sense_is_refused(door: Door, unused: str, backoff: Any) -> None:
    with pytest.raises(errors.RequestError):
        door.broker.create_group(unused, backoff=backoff)
