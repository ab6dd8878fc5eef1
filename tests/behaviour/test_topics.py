"""Making, changing and deleting topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_a_topic_is_what_it_was_made_as(endpoint: Endpoint, unused: str) -> None:
    made = endpoint.broker.create_topic(unused, type="fifo", queues=4, partition_time="born")

    described = endpoint.broker.describe_topic(unused)

    fields = {"name": unused, "type": "fifo", "queues": 4, "partition_time": "born"}
    assert {k: made[k] for k in fields} == fields
    assert {k: described[k] for k in fields} == fields
    assert described["topic_id"] == made["topic_id"]
    assert made["created_at_ms"] == endpoint.clock.now_ms()
    assert endpoint.max_offsets(unused) == [0] * 4


def test_a_topic_has_eight_queues_unless_it_says_otherwise(endpoint: Endpoint, topic: Make) -> None:
    assert len(endpoint.max_offsets(topic())) == 8


def test_a_name_is_taken_once(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic()
    endpoint.broker.send(name, messages(3))

    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.create_topic(name)

    assert endpoint.stored(name) == 3


def test_ensuring_a_topic_twice_is_as_good_as_once(endpoint: Endpoint, unused: str) -> None:
    first = endpoint.broker.ensure_topic(unused, type="delay", queues=3)

    second = endpoint.broker.ensure_topic(unused, type="delay", queues=3)

    assert first == second


@pytest.mark.parametrize("other", [{"type": "fifo"}, {"queues": 2}, {"partition_time": "born"}])
def test_ensuring_a_topic_with_other_settings_is_a_conflict(
    endpoint: Endpoint, unused: str, other: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"type": "delay", "queues": 3, "partition_time": "stored"}
    made = endpoint.broker.ensure_topic(unused, **settings)

    with pytest.raises(errors.AlreadyExistsError):
        endpoint.broker.ensure_topic(unused, **{**settings, **other})

    assert endpoint.broker.ensure_topic(unused, **settings) == made


def test_a_topic_that_does_not_say_is_partitioned_by_born_time(
    endpoint: Endpoint, topic: Make
) -> None:
    assert endpoint.broker.describe_topic(topic())["partition_time"] == "born"


def test_ensuring_a_topic_leaves_the_partition_time_that_it_has(
    endpoint: Endpoint, unused: str
) -> None:
    endpoint.broker.create_topic(unused, partition_time="stored")

    assert endpoint.broker.ensure_topic(unused)["partition_time"] == "stored"


def test_topics_are_listed(endpoint: Endpoint, topic: Make) -> None:
    names = {topic(), topic(type="fifo"), topic(type="delay", queues=1)}

    listed = endpoint.broker.list_topics().to_pylist()

    found = {row["name"]: (row["type"], row["queues"]) for row in listed}
    assert names <= set(found)
    assert sorted(found[n] for n in names) == [("delay", 1), ("fifo", 8), ("normal", 8)]


@pytest.mark.parametrize("name", ["a", "x" * 127, "A-z_0|%9", "%"])
def test_a_topic_name_within_the_rules_is_taken(
    endpoint: Endpoint, messages: Make, name: str
) -> None:
    endpoint.broker.create_topic(name)

    endpoint.broker.send(name, messages(1))

    assert endpoint.bodies(name) == [b"0"]


@pytest.mark.parametrize(
    "name", ["", "x" * 128, "a b", "a.b", "a/b", "é", "a\n", "SCHEDULE_TOPIC_XXXX", "../x"]
)
def test_a_topic_name_that_breaks_the_rules_is_refused(endpoint: Endpoint, name: str) -> None:
    with pytest.raises((errors.IllegalTopicError, errors.AlreadyExistsError)):
        endpoint.broker.create_topic(name)
    with pytest.raises((errors.IllegalTopicError, errors.AlreadyExistsError)):
        endpoint.broker.ensure_topic(name)


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
    endpoint: Endpoint, unused: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.create_topic(unused, **settings)

    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.describe_topic(unused)


def test_a_topic_may_have_1024_queues(endpoint: Endpoint, unused: str) -> None:
    endpoint.broker.create_topic(unused, queues=limits.QUEUES)

    assert endpoint.max_offsets(unused) == [0] * limits.QUEUES


def test_a_topic_may_grow(endpoint: Endpoint, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=2), group()
    endpoint.broker.send(name, messages(4))
    endpoint.drain(name, readers)

    altered = endpoint.broker.alter_topic(name, queues=6)

    endpoint.broker.send(name, messages(24, start=4))
    assert altered["queues"] == 6
    assert len(endpoint.max_offsets(name)) == 6
    assert all(endpoint.max_offsets(name))
    assert len(endpoint.drain(name, readers)) == 24


def test_a_grown_fifo_topic_keeps_each_group_in_order_from_then_on(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    endpoint.broker.send(name, messages(20, groups=["a", "b"]))
    endpoint.drain(name, readers)

    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(40, start=20, groups=["a", "b", "2", "order-1002"]))

    got = endpoint.broker.receive(readers, name, limit=100).to_pylist()
    for i, one in enumerate(["a", "b", "2", "order-1002"]):
        mine = [int(r["body"]) for r in got if r["message_group"] == one]
        assert mine == list(range(20 + i, 60, 4))
    assert {r["queue_id"] for r in got if r["message_group"] == "order-1002"} == {15}


def test_a_topic_does_not_shrink(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic(queues=4)
    endpoint.broker.send(name, messages(4))

    with pytest.raises(errors.RocketMQError):
        endpoint.broker.alter_topic(name, queues=2)

    assert endpoint.max_offsets(name) == [1] * 4


def test_the_partition_time_may_be_altered(endpoint: Endpoint, topic: Make) -> None:
    name = topic()

    endpoint.broker.alter_topic(name, partition_time="born")

    assert endpoint.broker.describe_topic(name)["partition_time"] == "born"


# ------------------------------------------------------------------------------- deleting topics


def test_a_deleted_topic_is_gone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(5))
    endpoint.drain(name, readers)

    endpoint.broker.delete_topic(name)

    verbs: list[Callable[[], object]] = [
        lambda: endpoint.broker.describe_topic(name),
        lambda: endpoint.broker.send(name, messages(1)),
        lambda: endpoint.broker.receive(readers, name),
        lambda: endpoint.broker.read(name, 0, offset=0, limit=1),
        lambda: endpoint.broker.delete_topic(name),
    ]
    for verb in verbs:
        with pytest.raises(errors.TopicNotFoundError):
            verb()
    assert name not in endpoint.broker.list_topics()["name"].to_pylist()


def test_a_topic_with_messages_in_flight_is_in_use(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(5))
    got = endpoint.broker.receive(readers, name, limit=1)

    with pytest.raises(errors.InUseError):
        endpoint.broker.delete_topic(name)

    endpoint.broker.ack(got)
    endpoint.broker.delete_topic(name)


def test_a_topic_with_scheduled_messages_is_in_use(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="delay")
    endpoint.broker.send(name, messages(5, delay_level=1))

    with pytest.raises(errors.InUseError):
        endpoint.broker.delete_topic(name)

    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()
    endpoint.broker.delete_topic(name)


def test_a_topic_in_use_may_be_deleted_by_force(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(5))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.delete_topic(name, force=True)

    with pytest.raises((errors.ReceiptHandleError, errors.TopicNotFoundError)):
        endpoint.broker.ack(got)
    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.receive(readers, name)


def test_a_topic_made_again_shares_nothing_with_the_deleted_one(
    endpoint: Endpoint, unused: str, group: Make, messages: Make
) -> None:
    readers = group(order="message_group")
    old = endpoint.broker.create_topic(unused, type="fifo", queues=1)
    endpoint.broker.send(unused, messages(6, groups=["a", "b"]))
    late = endpoint.broker.receive(readers, unused, limit=3)
    endpoint.broker.delete_topic(unused, force=True)

    new = endpoint.broker.create_topic(unused, type="fifo", queues=1)

    assert new["topic_id"] != old["topic_id"]
    assert endpoint.max_offsets(unused) == [0]
    assert endpoint.broker.receive(readers, unused).num_rows == 0
    endpoint.broker.send(unused, messages(2, start=6, groups=["a", "b"]))
    with pytest.raises((errors.ReceiptHandleError, errors.TopicNotFoundError)):
        endpoint.broker.ack(late)
    got = endpoint.broker.receive(readers, unused)
    assert got["body"].to_pylist() == [b"6", b"7"]
    assert got["queue_offset"].to_pylist() == [0, 1]
    assert got["delivery_attempt"].to_pylist() == [1, 1]


def test_who_waits_on_a_topic_learns_that_it_was_deleted(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.broker.delete_topic(name)
    endpoint.advance(30_000)

    with pytest.raises(errors.TopicNotFoundError):
        poll.result(60)
