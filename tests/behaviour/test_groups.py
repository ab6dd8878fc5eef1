"""Making, changing and deleting consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_a_group_is_what_it_was_made_as(endpoint: Endpoint, unused: str) -> None:
    fields: dict[str, Any] = {
        "name": unused,
        "order": "message_group",
        "max_attempts": 3,
        "backoff_ms": [100, 200],
        "on_failure": "dead_letter",
    }
    settings = {k: v for k, v in fields.items() if k != "name"}

    made = endpoint.broker.create_group(unused, **settings)

    described = endpoint.broker.describe_group(unused)
    for found in (made, described):
        plain = {**found, "backoff_ms": list(found["backoff_ms"])}
        assert {k: plain[k] for k in fields} == fields


def test_a_group_name_is_taken_once(endpoint: Endpoint, group: Make) -> None:
    name = group()

    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.create_group(name)


def test_ensuring_a_group_twice_is_as_good_as_once(endpoint: Endpoint, unused: str) -> None:
    first = endpoint.broker.ensure_group(unused, order="message_group", backoff_ms=[5, 6])

    second = endpoint.broker.ensure_group(unused, order="message_group", backoff_ms=[5, 6])

    assert first == second


@pytest.mark.parametrize("other", [{"order": "none"}, {"max_attempts": 2}, {"backoff_ms": [5]}])
def test_ensuring_a_group_with_other_settings_is_a_conflict(
    endpoint: Endpoint, unused: str, other: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        "order": "message_group",
        "max_attempts": 3,
        "backoff_ms": [5, 6],
    }
    made = endpoint.broker.ensure_group(unused, **settings)

    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.ensure_group(unused, **{**settings, **other})

    assert endpoint.broker.ensure_group(unused, **settings) == made


def test_groups_are_listed(endpoint: Endpoint, group: Make) -> None:
    plain, ordered = group(), group(order="message_group")

    listed = endpoint.broker.list_groups().to_pylist()

    found = {row["name"]: row["order"] for row in listed}
    assert (found[plain], found[ordered]) == ("none", "message_group")


@pytest.mark.parametrize("name", ["a", "x" * 120, "A-z_0|%9"])
def test_a_group_name_within_the_rules_is_taken(
    endpoint: Endpoint, topic: Make, messages: Make, name: str
) -> None:
    source = topic(queues=1)
    endpoint.broker.create_group(name)
    endpoint.broker.send(source, messages(1))

    endpoint.broker.forward_to_dead_letter_queue(endpoint.broker.receive(name, source))

    assert endpoint.bodies(f"%DLQ%{name}") == [b"0"]


@pytest.mark.parametrize("name", ["", "x" * 121, "a b", "a.b", "é", "CID_RMQ_SYS_x"])
def test_a_group_name_that_breaks_the_rules_is_refused(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(errors.IllegalConsumerGroupError):
        endpoint.broker.create_group(name)
    with pytest.raises(errors.IllegalConsumerGroupError):
        endpoint.broker.ensure_group(name)


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
    endpoint: Endpoint, unused: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.create_group(unused, **settings)

    with pytest.raises(errors.ConsumerGroupNotFoundError):
        endpoint.broker.describe_group(unused)


def test_altered_attempts_and_backoff_hold_from_then_on(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=9, backoff_ms=[60_000])
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.alter_group(readers, max_attempts=2, backoff_ms=[10])

    fail(readers, got)
    endpoint.advance(10)
    last = endpoint.broker.receive(readers, name)
    fail(readers, last)
    assert last["delivery_attempt"].to_pylist() == [2]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]


def test_the_order_of_a_group_that_has_read_does_not_change(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="none")
    endpoint.broker.send(name, messages(2, groups=["a"]))
    endpoint.broker.receive(readers, name, limit=1)

    with pytest.raises(errors.RocketMQError):
        endpoint.broker.alter_group(readers, order="message_group")

    assert endpoint.broker.describe_group(readers)["order"] == "none"


def test_a_group_with_messages_in_flight_is_in_use(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.InUseError):
        endpoint.broker.delete_group(readers)

    endpoint.broker.ack(got)
    endpoint.broker.delete_group(readers)
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        endpoint.broker.receive(readers, name)


def test_a_group_made_again_shares_nothing_with_the_deleted_one(
    endpoint: Endpoint, unused: str, topic: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    old = endpoint.broker.create_group(unused, order="message_group")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    endpoint.drain(name, unused, limit=2)
    endpoint.broker.send(name, messages(2, start=4, groups=["a"]))
    late = endpoint.broker.receive(unused, name, limit=1)
    endpoint.broker.delete_group(unused, force=True)

    new = endpoint.broker.create_group(unused, order="message_group")

    assert new["group_id"] != old["group_id"]
    with pytest.raises((errors.ReceiptHandleError, errors.ConsumerGroupNotFoundError)):
        endpoint.broker.ack(late)
    got = endpoint.broker.receive(unused, name)
    assert got["body"].to_pylist() == [str(i).encode() for i in range(6)]
    assert got["delivery_attempt"].to_pylist() == [1] * 6


def test_deleting_a_group_leaves_the_others_alone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, mine, theirs = topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(3))
    endpoint.drain(name, mine)
    got = endpoint.broker.receive(theirs, name, limit=1)

    endpoint.broker.delete_group(mine)

    endpoint.broker.ack(got)
    assert endpoint.drain(name, theirs) == [b"1", b"2"]
