"""Making, changing and deleting consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_a_group_is_what_it_was_made_as(door: Door, unused: str) -> None:
    fields: dict[str, Any] = {
        "name": unused,
        "order": "message_group",
        "max_attempts": 3,
        "backoff_ms": [100, 200],
        "on_failure": "dead_letter",
    }
    settings = {k: v for k, v in fields.items() if k != "name"}

    made = door.broker.create_group(unused, **settings)

    described = door.broker.describe_group(unused)
    for found in (made, described):
        plain = {**found, "backoff_ms": list(found["backoff_ms"])}
        assert {k: plain[k] for k in fields} == fields


def test_a_group_name_is_taken_once(door: Door, group: Make) -> None:
    name = group()

    with pytest.raises(errors.AlreadyExistsError):
        door.broker.create_group(name)


def test_ensuring_a_group_twice_is_as_good_as_once(door: Door, unused: str) -> None:
    first = door.broker.ensure_group(unused, order="message_group", backoff_ms=[5, 6])

    second = door.broker.ensure_group(unused, order="message_group", backoff_ms=[5, 6])

    assert first == second


@pytest.mark.parametrize("other", [{"order": "none"}, {"max_attempts": 2}, {"backoff_ms": [5]}])
def test_ensuring_a_group_with_other_settings_is_a_conflict(
    door: Door, unused: str, other: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        "order": "message_group",
        "max_attempts": 3,
        "backoff_ms": [5, 6],
    }
    made = door.broker.ensure_group(unused, **settings)

    with pytest.raises(errors.AlreadyExistsError):
        door.broker.ensure_group(unused, **{**settings, **other})

    assert door.broker.ensure_group(unused, **settings) == made


def test_groups_are_listed(door: Door, group: Make) -> None:
    plain, ordered = group(), group(order="message_group")

    listed = door.broker.list_groups().to_pylist()

    found = {row["name"]: row["order"] for row in listed}
    assert (found[plain], found[ordered]) == ("none", "message_group")


@pytest.mark.parametrize("name", ["a", "x" * 120, "A-z_0|%9"])
def test_a_group_name_within_the_rules_is_taken(
    door: Door, topic: Make, messages: Make, name: str
) -> None:
    source = topic(queues=1)
    door.broker.create_group(name)
    door.broker.send(source, messages(1))

    door.broker.forward_to_dead_letter_queue(door.broker.receive(name, source))

    assert door.bodies(f"%DLQ%{name}") == [b"0"]


@pytest.mark.parametrize("name", ["", "x" * 121, "a b", "a.b", "é", "CID_RMQ_SYS_x"])
def test_a_group_name_that_breaks_the_rules_is_refused(door: Door, name: str) -> None:
    with pytest.raises(errors.IllegalConsumerGroupError):
        door.broker.create_group(name)
    with pytest.raises(errors.IllegalConsumerGroupError):
        door.broker.ensure_group(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "strange"},
        {"max_attempts": 0},
        {"max_attempts": limits.MAX_ATTEMPTS + 1},
        {"backoff_ms": []},
        {"backoff_ms": [-1]},
        {"on_failure": "strange"},
    ],
)
def test_group_settings_out_of_range_are_refused(
    door: Door, unused: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        door.broker.create_group(unused, **settings)

    with pytest.raises(errors.ConsumerGroupNotFoundError):
        door.broker.describe_group(unused)


def test_altered_attempts_and_backoff_hold_from_then_on(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=9, backoff_ms=[60_000])
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    door.broker.alter_group(readers, max_attempts=2, backoff_ms=[10])

    fail(readers, got)
    door.advance(10)
    last = door.broker.receive(readers, name)
    fail(readers, last)
    assert last["delivery_attempt"].to_pylist() == [2]
    assert door.bodies(f"%DLQ%{readers}") == [b"0"]


def test_the_order_of_a_group_that_has_read_does_not_change(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="none")
    door.broker.send(name, messages(2, groups=["a"]))
    door.broker.receive(readers, name, limit=1)

    with pytest.raises(errors.RocketMQError):
        door.broker.alter_group(readers, order="message_group")

    assert door.broker.describe_group(readers)["order"] == "none"


def test_a_group_with_messages_in_flight_is_in_use(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)

    with pytest.raises(errors.InUseError):
        door.broker.delete_group(readers)

    door.broker.ack(got)
    door.broker.delete_group(readers)
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        door.broker.receive(readers, name)


def test_a_group_made_again_shares_nothing_with_the_deleted_one(
    door: Door, unused: str, topic: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    old = door.broker.create_group(unused, order="message_group")
    door.broker.send(name, messages(4, groups=["a"]))
    door.drain(name, unused, limit=2)
    door.broker.send(name, messages(2, start=4, groups=["a"]))
    late = door.broker.receive(unused, name, limit=1)
    door.broker.delete_group(unused, force=True)

    new = door.broker.create_group(unused, order="message_group")

    assert new["group_id"] != old["group_id"]
    with pytest.raises((errors.ReceiptHandleError, errors.ConsumerGroupNotFoundError)):
        door.broker.ack(late)
    got = door.broker.receive(unused, name)
    assert got["body"].to_pylist() == [str(i).encode() for i in range(6)]
    assert got["delivery_attempt"].to_pylist() == [1] * 6


def test_deleting_a_group_leaves_the_others_alone(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, mine, theirs = topic(queues=1), group(), group()
    door.broker.send(name, messages(3))
    door.drain(name, mine)
    got = door.broker.receive(theirs, name, limit=1)

    door.broker.delete_group(mine)

    door.broker.ack(got)
    assert door.drain(name, theirs) == [b"1", b"2"]
