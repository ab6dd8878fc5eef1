"""Members of a group that receive with different filters lose messages, and are told so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic())


def receive(door: Door, name: str, readers: str, **how: Any) -> None:
    door.broker.receive(readers, name, limit=1, **how)


def mixed(door: Door, readers: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = door.broker.describe_group(readers)["mixed_filters"]
    return found


def test_the_second_member_is_warned_and_shown(
    door: Door, name: str, group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    readers = group()
    receive(door, name, readers, filter="a", client_id="one")
    assert mixed(door, readers) == {}

    with caplog.at_level(logging.WARNING, "rmq_pipeline.broker.work.group_filters"):
        receive(door, name, readers, filter="b || c", client_id="two")

    assert mixed(door, readers) == {name: ["a", "b || c"]}
    assert door.broker.describe_group(readers)["filters"] == {
        name: {"a": ["one"], "b || c": ["two"]}
    }
    beat = door.broker.heartbeat(readers, "two", topics=[name], details={})
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
    door: Door, name: str, group: Make, first: dict[str, str], second: dict[str, str]
) -> None:
    readers = group()

    receive(door, name, readers, client_id="one", **first)
    receive(door, name, readers, client_id="two", **second)

    assert mixed(door, readers) == {}


def test_a_client_may_change_its_filter_and_one_that_is_gone_counts_no_more(
    door: Door, name: str, group: Make
) -> None:
    readers = group()
    for each in ("a", "b"):
        receive(door, name, readers, filter=each, client_id="one")
    assert mixed(door, readers) == {}

    door.advance(2 * MINUTE)
    receive(door, name, readers, filter="c", client_id="two")

    assert mixed(door, readers) == {}


def test_receives_without_a_client_are_told_apart_by_nothing_but_their_filter(
    door: Door, name: str, group: Make
) -> None:
    readers, others = group(), group()

    receive(door, name, readers, filter="a", client_id="one")
    receive(door, name, readers, filter="b")
    receive(door, name, others, filter="b")

    assert mixed(door, readers) == {name: ["a", "b"]}
    assert mixed(door, others) == {}


def test_the_second_member_is_refused_where_the_setting_says_so(
    inside: Door, messages: Make
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
