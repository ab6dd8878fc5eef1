"""A group's backoff: a table of its own, or delays that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_exponential_backoff_doubles_from_five_seconds_to_two_hours(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff="exponential")
    endpoint.broker.send(name, messages(1))

    for seconds in (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 7200, 7200, 7200, 7200):
        fail(readers, endpoint.broker.receive(readers, name))
        endpoint.advance(seconds * 1000 - 1)
        assert endpoint.broker.receive(readers, name).num_rows == 0
        endpoint.advance(1)
    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [16]


def test_exponential_backoff_may_have_its_own_numbers(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    policy = {"initial_ms": 100, "max_ms": 1_000, "multiplier": 3}
    name, readers = topic(queues=1), group(backoff=policy)
    endpoint.broker.send(name, messages(1))

    for milliseconds in (100, 300, 900, 1_000, 1_000):
        fail(readers, endpoint.broker.receive(readers, name))
        endpoint.advance(milliseconds - 1)
        assert endpoint.broker.receive(readers, name).num_rows == 0
        endpoint.advance(1)
    assert endpoint.broker.describe_group(readers)["backoff"] == policy


def test_exponential_backoff_grows_no_further_after_32_failures(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    policy = {"initial_ms": 1_000, "max_ms": 7_200_000, "multiplier": 1.1}
    name, readers = topic(queues=1), group(backoff=policy, max_attempts=50)
    endpoint.broker.send(name, messages(1))

    for failures in range(1, 37):
        wait = int(1_000 * 1.1 ** min(failures - 1, 32))
        fail(readers, endpoint.broker.receive(readers, name))
        endpoint.advance(wait - 1)
        assert endpoint.broker.receive(readers, name).num_rows == 0, failures
        endpoint.advance(1)


def test_a_backoff_altered_live_holds_from_the_next_failure_on(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[1_000])
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name))

    endpoint.broker.alter_group(readers, backoff={"initial_ms": 50})

    endpoint.advance(1_000)
    fail(readers, endpoint.broker.receive(readers, name))
    endpoint.advance(99)
    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.advance(1)
    fail(readers, endpoint.broker.receive(readers, name))
    altered = endpoint.broker.alter_group(readers, backoff_ms=[7])
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
def test_a_backoff_that_makes_no_sense_is_refused(
    endpoint: Endpoint, unused: str, backoff: Any
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.create_group(unused, backoff=backoff)
