"""Members of a group that receive with different filters lose messages, and are told so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic())


def receive(endpoint: Endpoint, name: str, readers: str, **how: Any) -> None:
    endpoint.broker.receive(readers, name, limit=1, **how)


def mixed(endpoint: Endpoint, readers: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = endpoint.broker.describe_group(readers)["mixed_filters"]
    return found


def test_the_second_member_is_warned_and_shown(
    endpoint: Endpoint, name: str, group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    readers = group()
    receive(endpoint, name, readers, filter="a", client_id="one")
    assert mixed(endpoint, readers) == {}

    with caplog.at_level(logging.WARNING, "rmq_pipeline.broker.work.membership"):
        receive(endpoint, name, readers, filter="b || c", client_id="two")

    assert mixed(endpoint, readers) == {name: ["a", "b || c"]}
    assert endpoint.broker.describe_group(readers)["filters"] == {
        name: {"a": ["one"], "b || c": ["two"]}
    }
    beat = endpoint.broker.heartbeat(readers, "two", topics=[name], details={})
    assert beat["mixed_filters"] == {name: ["a", "b || c"]}
    assert "with several filters ('a', 'b || c')" in caplog.text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"filter": "a||b"}, {"filter": " b || a"}),
        ({}, {"filter": ""}),
        (
            {"filter": "n > 1", "filter_type": "sql92"},
            {"filter": "n  >  1", "filter_type": "sql92"},
        ),
    ],
)
def test_filters_that_choose_the_same_are_one(
    endpoint: Endpoint, name: str, group: Make, first: dict[str, str], second: dict[str, str]
) -> None:
    readers = group()

    receive(endpoint, name, readers, client_id="one", **first)
    receive(endpoint, name, readers, client_id="two", **second)

    assert mixed(endpoint, readers) == {}


def test_a_client_may_change_its_filter_and_one_that_is_gone_counts_no_more(
    endpoint: Endpoint, name: str, group: Make
) -> None:
    readers = group()
    for each in ("a", "b"):
        receive(endpoint, name, readers, filter=each, client_id="one")
    assert mixed(endpoint, readers) == {}

    endpoint.advance(2 * MINUTE)
    receive(endpoint, name, readers, filter="c", client_id="two")

    assert mixed(endpoint, readers) == {}


def test_receives_without_a_client_are_told_apart_by_nothing_but_their_filter(
    endpoint: Endpoint, name: str, group: Make
) -> None:
    readers, others = group(), group()

    receive(endpoint, name, readers, filter="a", client_id="one")
    receive(endpoint, name, readers, filter="b")
    receive(endpoint, name, others, filter="b")

    assert mixed(endpoint, readers) == {name: ["a", "b"]}
    assert mixed(endpoint, others) == {}


def test_the_second_member_is_refused_where_the_setting_says_so(
    inside: Endpoint, messages: Make
) -> None:
    broker = inside.reopen(mixed_filters="refuse")
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", messages(4, tag=["a", "b", "a", "b"]))
    assert broker.receive("g", "t", filter="a", client_id="one").num_rows == 2

    with pytest.raises(errors.MixedFiltersError, match="with 'a', and two with b") as refused:
        broker.receive("g", "t", filter="b", client_id="two")

    assert "Use the same filter" in str(refused.value)
    assert broker.receive("g", "t", filter="a", client_id="two").num_rows == 0
