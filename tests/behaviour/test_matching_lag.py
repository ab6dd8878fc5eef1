"""Lag beside what of it the group's filter lets through: counted, or estimated and said so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

TAGS = ["wanted", "other", "other", "other", "other"]
SQL: dict[str, Any] = {"filter": "TAGS = 'wanted'", "filter_type": "sql92"}


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic(queues=2))


def shown(endpoint: Endpoint, readers: str) -> dict[str, Any]:
    """The sums over the queues of the only topic that the group reads."""
    rows = endpoint.broker.lag(readers).to_pylist()
    sums = {each: [row[each] for row in rows] for each in ("lag", "matching_lag", "estimated")}
    known = None not in sums["matching_lag"]
    return {
        "lag": sum(sums["lag"]),
        "matching_lag": sum(sums["matching_lag"]) if known else None,
        "estimated": any(sums["estimated"]),
    }


@pytest.mark.every_endpoint
@pytest.mark.parametrize(
    "filter", [{"filter": "wanted"}, SQL, {"filter": "wanted || absent"}], ids=str
)
def test_lag_is_shown_with_what_the_filter_takes_of_it(
    endpoint: Endpoint, name: str, group: Make, messages: Make, filter: dict[str, Any]
) -> None:
    readers = group()
    endpoint.broker.receive(readers, name, **filter)

    endpoint.broker.send(name, messages(200, tag=TAGS * 40))

    assert shown(endpoint, readers) == {"lag": 200, "matching_lag": 40, "estimated": False}
    taken = endpoint.broker.receive(readers, name, limit=10, **filter)
    assert taken.num_rows == 10
    assert shown(endpoint, readers)["matching_lag"] == 40
    endpoint.broker.ack(taken)
    assert shown(endpoint, readers)["matching_lag"] == 30


def test_without_a_filter_both_are_the_same(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.receive(readers, name)

    endpoint.broker.send(name, messages(10, tag="other"))

    assert shown(endpoint, readers) == {"lag": 10, "matching_lag": 10, "estimated": False}


def test_before_a_first_receive_nothing_is_said_of_the_filter(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.subscribe(readers, name)

    endpoint.broker.send(name, messages(10, tag="other"))

    assert shown(endpoint, readers) == {"lag": 10, "matching_lag": None, "estimated": False}


def test_the_filter_of_consumers_that_are_gone_still_counts(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.receive(readers, name, filter="wanted", client_id="one")
    endpoint.advance(10 * limits.MEMBER_TIMEOUT_MS)
    assert endpoint.broker.describe_group(readers)["filters"] == {}

    endpoint.broker.send(name, messages(10, tag=TAGS * 2))

    assert shown(endpoint, readers)["matching_lag"] == 2


def test_of_several_filters_a_message_counts_that_one_of_them_takes(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.receive(readers, name, filter="wanted", client_id="one")
    endpoint.broker.receive(
        readers, name, filter="TAGS = 'more'", filter_type="sql92", client_id="two"
    )

    endpoint.broker.send(name, messages(8, tag=["wanted", "more", "other", "other"] * 2))

    assert shown(endpoint, readers)["matching_lag"] == 4


@pytest.mark.parametrize("filter", [{"filter": "wanted"}, SQL], ids=str)
def test_more_than_the_bound_is_estimated_and_said_so(
    inside: Endpoint,
    group: Make,
    topic: Make,
    messages: Make,
    filter: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, readers = topic(queues=1), group()
    monkeypatch.setattr(limits, "LAG_COUNTED_ROWS", 1000)
    monkeypatch.setattr(limits, "LAG_JUDGED_ROWS", 1000)
    inside.broker.receive(readers, name, **filter)

    inside.broker.send(name, messages(20_000, tag=TAGS * 4000))

    found = shown(inside, readers)
    assert (found["lag"], found["estimated"]) == (20_000, True)
    assert found["matching_lag"] == pytest.approx(4000, rel=0.05)


def test_a_deleted_group_takes_its_filter_with_it(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.receive(readers, name, filter="wanted")
    endpoint.broker.delete_group(readers)

    group(readers)
    endpoint.broker.subscribe(readers, name)
    endpoint.broker.send(name, messages(10, tag=TAGS * 2))

    assert shown(endpoint, readers)["matching_lag"] is None


def test_lag_of_all_groups(inside: Endpoint, group: Make, topic: Make, messages: Make) -> None:
    name, one, two = topic(queues=1), group(), group()
    inside.broker.receive(one, name, filter="wanted")
    inside.broker.receive(two, name)

    inside.broker.send(name, messages(10, tag=TAGS * 2))

    rows = inside.broker.lag().to_pylist()
    assert {row["consumer_group"]: row["matching_lag"] for row in rows} == {one: 2, two: 10}
