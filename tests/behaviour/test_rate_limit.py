"""A group with a rate is given no more than that, and everything in the end."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits
from tests.behaviour.conftest import Endpoint
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Make

Given = list[tuple[int, int]]


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def over(given: Given, rate: float) -> float:
    """By how much the most crowded span of (moment, messages) goes beyond rate × t + burst.

    Over the span from i to j that is (sum to j - rate × t of j) less the same up to i; so the
    worst one ends at j and begins where the smallest of these was.
    """
    sums = [0, *accumulate(n for _, n in given)]
    burst = max(1.0, rate)
    worst = -burst
    for j in range(len(given)):
        for i in range(j + 1):
            span_s = (given[j][0] - given[i][0]) / 1000
            worst = max(worst, sums[j + 1] - sums[i] - rate * span_s - burst)
    return worst


@pytest.mark.parametrize("rate", [0.5, 3, 7.7, 100])
def test_no_span_of_time_sees_more_than_the_rate_and_one_second_of_burst(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, rate: float
) -> None:
    name, readers = topic(), group(max_rate_per_s=rate)
    endpoint.broker.send(name, messages(5_000))
    chance = random.Random(rate)
    given: Given = []

    for _ in range(150):
        endpoint.advance(chance.choice([0, 1, 7, 100, 333, 1_500]))
        got = endpoint.broker.receive(readers, name, limit=chance.choice([1, 10, 1_000]))
        given.append((endpoint.clock.now_ms(), got.num_rows))

    assert over(given, rate) <= 1e-6
    seconds = (given[-1][0] - given[0][0]) / 1000
    # Some of it is lost: small limits, and pauses of more than the second that is saved up.
    assert sum(n for _, n in given) >= 0.3 * rate * seconds


@pytest.mark.one_endpoint
def test_a_reader_that_asks_all_the_time_gets_all_of_the_rate(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group(max_rate_per_s=50)
    endpoint.broker.send(name, messages(2_000))
    got = 0

    for _ in range(401):
        got += endpoint.broker.receive(readers, name, limit=1_000).num_rows
        endpoint.advance(10)

    assert got == 50 + 50 * 4


def test_a_waiting_receive_wakes_when_the_next_message_may_be_given(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_rate_per_s=2)
    endpoint.broker.send(name, messages(5))
    first = endpoint.broker.receive(readers, name)
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.advance(499)
    early = poll.done()
    endpoint.advance(1)
    got = poll.result(60)

    assert first["body"].to_pylist() == [b"0", b"1"]
    assert not early
    assert got["body"].to_pylist() == [b"2"]


def test_a_group_with_nothing_to_read_saves_up_one_second_and_no_more(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_rate_per_s=5)
    endpoint.advance(3_600_000)
    endpoint.broker.send(name, messages(100))

    assert endpoint.broker.receive(readers, name, limit=100).num_rows == 5


def test_all_topics_of_a_group_share_its_rate_and_every_delivery_counts(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    one, other = topic(queues=1), topic(queues=1)
    readers = group(max_rate_per_s=4, backoff_ms=[0])
    endpoint.broker.send(one, messages(10))
    endpoint.broker.send(other, messages(10))

    first = endpoint.broker.receive(readers, one, limit=3)
    fail(readers, first)
    second = endpoint.broker.receive(readers, other, limit=3)
    endpoint.advance(250)
    third = endpoint.broker.receive(readers, one, limit=3)

    assert [first.num_rows, second.num_rows, third.num_rows] == [3, 1, 1]
    assert third["delivery_attempt"].to_pylist() == [2]


def test_other_groups_are_as_fast_as_ever(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, slow, fast = topic(), group(max_rate_per_s=1), group()
    endpoint.broker.send(name, messages(50))

    assert endpoint.broker.receive(slow, name, limit=50).num_rows == 1
    assert endpoint.broker.receive(fast, name, limit=50).num_rows == 50


@pytest.mark.one_endpoint
def test_a_slowed_group_still_takes_each_message_group_in_order(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=2)
    readers = group(order="message_group", max_rate_per_s=10)
    endpoint.broker.send(name, messages(90, groups=["a", "b", "c"]))
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    for _ in range(400):
        got = endpoint.broker.receive(readers, name, limit=4)
        for row in got.to_pylist():
            seen[row["message_group"]].append(int(row["body"]))
        if got.num_rows:
            endpoint.broker.ack(got)
        endpoint.advance(37)

    for i, one in enumerate("abc"):
        assert seen[one] == list(range(i, 90, 3))


def test_the_rate_is_altered_live(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_rate_per_s=2)
    endpoint.broker.send(name, messages(200))
    assert endpoint.broker.receive(readers, name, limit=100).num_rows == 2

    altered = endpoint.broker.alter_group(readers, max_rate_per_s=20)
    at_once = endpoint.broker.receive(readers, name, limit=100).num_rows
    endpoint.advance(500)
    later = endpoint.broker.receive(readers, name, limit=100).num_rows
    endpoint.broker.alter_group(readers, max_attempts=3)
    free = endpoint.broker.alter_group(readers, max_rate_per_s=0)

    assert (altered["max_rate_per_s"], at_once, later) == (20, 0, 10)
    assert free["max_rate_per_s"] is None
    assert endpoint.broker.receive(readers, name, limit=100).num_rows == 100


def test_a_smaller_rate_takes_away_what_was_saved_up(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_rate_per_s=100)
    endpoint.broker.send(name, messages(200))

    endpoint.broker.alter_group(readers, max_rate_per_s=5)

    assert endpoint.broker.receive(readers, name, limit=200).num_rows == 5


@pytest.mark.parametrize("rate", [-1, float("nan"), float("inf"), "5", True, 1e-9, 1e12])
def test_a_rate_that_is_none_is_refused(
    endpoint: Endpoint, unused: str, group: Make, rate: Any
) -> None:
    readers = group(max_rate_per_s=1)

    with pytest.raises(errors.RequestError):
        endpoint.broker.create_group(unused, max_rate_per_s=rate)
    with pytest.raises(errors.RequestError):
        endpoint.broker.alter_group(readers, max_rate_per_s=rate)

    assert endpoint.broker.describe_group(readers)["max_rate_per_s"] == 1
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        endpoint.broker.describe_group(unused)


def test_ensuring_a_group_with_another_rate_is_a_conflict(endpoint: Endpoint, unused: str) -> None:
    endpoint.broker.ensure_group(unused, max_rate_per_s=limits.MIN_RATE_PER_S)

    endpoint.broker.ensure_group(unused, max_rate_per_s=limits.MIN_RATE_PER_S)
    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.ensure_group(unused)


@pytest.mark.parametrize("how", [Endpoint.reopen, reopened_from_the_log])
def test_a_restart_allows_no_second_burst(
    inside: Endpoint, topic: Make, group: Make, messages: Make, how: Callable[[Endpoint], object]
) -> None:
    name, readers = topic(queues=1), group(max_rate_per_s=10)
    inside.broker.send(name, messages(100))
    given: Given = []

    for _ in range(15):
        got = inside.broker.receive(readers, name, limit=100).num_rows
        given.append((inside.clock.now_ms(), got))
        how(inside)
        inside.advance(210)

    assert over(given, 10) <= 0
    assert sum(n for _, n in given) >= 20
