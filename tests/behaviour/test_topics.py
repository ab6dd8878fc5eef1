"""Making, changing and deleting topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_a_topic_is_what_it_was_made_as(door: Door, unused: str) -> None:
    made = door.broker.create_topic(unused, type="fifo", queues=4, partition_time="born")

    described = door.broker.describe_topic(unused)

    fields = {"name": unused, "type": "fifo", "queues": 4, "partition_time": "born"}
    assert {k: made[k] for k in fields} == fields
    assert {k: described[k] for k in fields} == fields
    assert described["topic_id"] == made["topic_id"]
    assert made["created_at_ms"] == door.clock.now_ms()
    assert door.max_offsets(unused) == [0] * 4


def test_a_topic_has_eight_queues_unless_it_says_otherwise(door: Door, topic: Make) -> None:
    assert len(door.max_offsets(topic())) == 8


def test_a_name_is_taken_once(door: Door, topic: Make, messages: Make) -> None:
    name = topic()
    door.broker.send(name, messages(3))

    with pytest.raises(errors.AlreadyExistsError):
        door.broker.create_topic(name)

    assert door.stored(name) == 3


def test_ensuring_a_topic_twice_is_as_good_as_once(door: Door, unused: str) -> None:
    first = door.broker.ensure_topic(unused, type="delay", queues=3)

    second = door.broker.ensure_topic(unused, type="delay", queues=3)

    assert first == second


@pytest.mark.parametrize("other", [{"type": "fifo"}, {"queues": 2}, {"partition_time": "born"}])
def test_ensuring_a_topic_with_other_settings_is_a_conflict(
    door: Door, unused: str, other: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"type": "delay", "queues": 3, "partition_time": "stored"}
    made = door.broker.ensure_topic(unused, **settings)

    with pytest.raises(errors.AlreadyExistsError):
        door.broker.ensure_topic(unused, **{**settings, **other})

    assert door.broker.ensure_topic(unused, **settings) == made


def test_a_topic_that_does_not_say_is_partitioned_by_born_time(door: Door, topic: Make) -> None:
    assert door.broker.describe_topic(topic())["partition_time"] == "born"


def test_ensuring_a_topic_leaves_the_partition_time_that_it_has(door: Door, unused: str) -> None:
    door.broker.create_topic(unused, partition_time="stored")

    assert door.broker.ensure_topic(unused)["partition_time"] == "stored"


def test_topics_are_listed(door: Door, topic: Make) -> None:
    names = {topic(), topic(type="fifo"), topic(type="delay", queues=1)}

    listed = door.broker.list_topics().to_pylist()

    found = {row["name"]: (row["type"], row["queues"]) for row in listed}
    assert names <= set(found)
    assert sorted(found[n] for n in names) == [("delay", 1), ("fifo", 8), ("normal", 8)]


@pytest.mark.parametrize("name", ["a", "x" * 127, "A-z_0|%9", "%"])
def test_a_topic_name_within_the_rules_is_taken(door: Door, messages: Make, name: str) -> None:
    door.broker.create_topic(name)

    door.broker.send(name, messages(1))

    assert door.bodies(name) == [b"0"]


@pytest.mark.parametrize(
    "name", ["", "x" * 128, "a b", "a.b", "a/b", "é", "a\n", "SCHEDULE_TOPIC_XXXX", "../x"]
)
def test_a_topic_name_that_breaks_the_rules_is_refused(door: Door, name: str) -> None:
    with pytest.raises((errors.IllegalTopicError, errors.AlreadyExistsError)):
        door.broker.create_topic(name)
    with pytest.raises((errors.IllegalTopicError, errors.AlreadyExistsError)):
        door.broker.ensure_topic(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "strange"},
        {"queues": 0},
        {"queues": -1},
        {"queues": limits.QUEUES + 1},
        {"partition_time": ""},
    ],
)
def test_topic_settings_out_of_range_are_refused(
    door: Door, unused: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        door.broker.create_topic(unused, **settings)

    with pytest.raises(errors.TopicNotFoundError):
        door.broker.describe_topic(unused)


def test_a_topic_may_have_1024_queues(door: Door, unused: str) -> None:
    door.broker.create_topic(unused, queues=limits.QUEUES)

    assert door.max_offsets(unused) == [0] * limits.QUEUES


def test_a_topic_may_grow(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=2), group()
    door.broker.send(name, messages(4))
    door.drain(name, readers)

    altered = door.broker.alter_topic(name, queues=6)

    door.broker.send(name, messages(24, start=4))
    assert altered["queues"] == 6
    assert len(door.max_offsets(name)) == 6
    assert all(door.max_offsets(name))
    assert len(door.drain(name, readers)) == 24


def test_a_grown_fifo_topic_keeps_each_group_in_order_from_then_on(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    door.broker.send(name, messages(20, groups=["a", "b"]))
    door.drain(name, readers)

    door.broker.alter_topic(name, queues=16)
    door.broker.send(name, messages(40, start=20, groups=["a", "b", "2", "order-1002"]))

    got = door.broker.receive(readers, name, limit=100).to_pylist()
    for i, one in enumerate(["a", "b", "2", "order-1002"]):
        mine = [int(r["body"]) for r in got if r["message_group"] == one]
        assert mine == list(range(20 + i, 60, 4))
    assert {r["queue_id"] for r in got if r["message_group"] == "order-1002"} == {15}


def test_a_topic_does_not_shrink(door: Door, topic: Make, messages: Make) -> None:
    name = topic(queues=4)
    door.broker.send(name, messages(4))

    with pytest.raises(errors.RocketMQError):
        door.broker.alter_topic(name, queues=2)

    assert door.max_offsets(name) == [1] * 4


def test_the_partition_time_may_be_altered(door: Door, topic: Make) -> None:
    name = topic()

    door.broker.alter_topic(name, partition_time="born")

    assert door.broker.describe_topic(name)["partition_time"] == "born"


# ------------------------------------------------------------------------------- deleting topics


def test_a_deleted_topic_is_gone(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(5))
    door.drain(name, readers)

    door.broker.delete_topic(name)

    verbs: list[Callable[[], object]] = [
        lambda: door.broker.describe_topic(name),
        lambda: door.broker.send(name, messages(1)),
        lambda: door.broker.receive(readers, name),
        lambda: door.broker.read(name, 0, offset=0, limit=1),
        lambda: door.broker.delete_topic(name),
    ]
    for verb in verbs:
        with pytest.raises(errors.TopicNotFoundError):
            verb()
    assert name not in door.broker.list_topics()["name"].to_pylist()


def test_a_topic_with_messages_in_flight_is_in_use(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(5))
    got = door.broker.receive(readers, name, limit=1)

    with pytest.raises(errors.InUseError):
        door.broker.delete_topic(name)

    door.broker.ack(got)
    door.broker.delete_topic(name)


def test_a_topic_with_scheduled_messages_is_in_use(door: Door, topic: Make, messages: Make) -> None:
    name = topic(type="delay")
    door.broker.send(name, messages(5, delay_level=1))

    with pytest.raises(errors.InUseError):
        door.broker.delete_topic(name)

    door.advance(1_000)
    door.broker.deliver_scheduled()
    door.broker.delete_topic(name)


def test_a_topic_in_use_may_be_deleted_by_force(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(5))
    got = door.broker.receive(readers, name)

    door.broker.delete_topic(name, force=True)

    with pytest.raises((errors.ReceiptHandleError, errors.TopicNotFoundError)):
        door.broker.ack(got)
    with pytest.raises(errors.TopicNotFoundError):
        door.broker.receive(readers, name)


def test_a_topic_made_again_shares_nothing_with_the_deleted_one(
    door: Door, unused: str, group: Make, messages: Make
) -> None:
    readers = group(order="message_group")
    old = door.broker.create_topic(unused, type="fifo", queues=1)
    door.broker.send(unused, messages(6, groups=["a", "b"]))
    late = door.broker.receive(readers, unused, limit=3)
    door.broker.delete_topic(unused, force=True)

    new = door.broker.create_topic(unused, type="fifo", queues=1)

    assert new["topic_id"] != old["topic_id"]
    assert door.max_offsets(unused) == [0]
    assert door.broker.receive(readers, unused).num_rows == 0
    door.broker.send(unused, messages(2, start=6, groups=["a", "b"]))
    with pytest.raises((errors.ReceiptHandleError, errors.TopicNotFoundError)):
        door.broker.ack(late)
    got = door.broker.receive(readers, unused)
    assert got["body"].to_pylist() == [b"6", b"7"]
    assert got["queue_offset"].to_pylist() == [0, 1]
    assert got["delivery_attempt"].to_pylist() == [1, 1]


def test_who_waits_on_a_topic_learns_that_it_was_deleted(
    door: Door, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.broker.delete_topic(name)
    door.advance(30_000)

    with pytest.raises(errors.TopicNotFoundError):
        poll.result(60)
