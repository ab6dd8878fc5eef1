"""A pull consumer reads what it asks for, and commits what it is done with."""

import time
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer import PullConsumer, Thresholds
from rmq_pipeline.consumer.message_queue import queues_of
from rmq_pipeline.errors import (
    IllegalOffsetError,
)
from tests.consumer.conftest import Make, Open, bodies, committed, numbers, read
from tests.waiting import until

# ------------------------------------------------------------------------------------------ reading


def test_poll_gives_a_table_in_the_order_of_each_queue(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=3)
    verbs.send(name, bodies(0, 300))
    consumer = reader(group()).subscribe(name)

    tables = [consumer.poll(30.0)]
    while sum(table.num_rows for table in tables) < 300:
        tables.append(consumer.poll(30.0))

    assert all(table.schema.names == ["topic", *schema.READ.names] for table in tables)
    whole = pa.concat_tables(tables)
    assert set(whole["topic"].to_pylist()) == {name}
    assert sorted(numbers(whole)) == list(range(300))
    for queue_id in range(3):
        of_queue = [r["queue_offset"] for r in whole.to_pylist() if r["queue_id"] == queue_id]
        assert of_queue == list(range(len(of_queue)))


def test_poll_waits_for_messages(verbs: Broker, topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=1)
    consumer = reader(group()).subscribe(name)
    assert consumer.poll(0.05).num_rows == 0

    verbs.send(name, bodies(0, 1))

    assert numbers(consumer.poll(10.0)) == [0]


def test_poll_gives_no_more_than_is_asked_for(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=1)
    verbs.send(name, bodies(0, 25))
    consumer = reader(group()).subscribe(name)

    assert numbers(consumer.poll(30.0, limit=10)) == list(range(10))
    assert numbers(consumer.poll(30.0, limit=10)) == list(range(10, 20))
    assert numbers(consumer.poll(30.0, limit=10)) == list(range(20, 25))


def test_messages_come_one_by_one(verbs: Broker, topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=1)
    verbs.send(name, bodies(0, 5, tag="a"))
    consumer = reader(group()).subscribe(name)

    until(lambda: _cached(consumer) == 5)
    found = list(consumer.messages(0.3, limit=2))

    assert [int(message.body) for message in found] == [0, 1, 2, 3, 4]
    assert [(m.topic, m.queue_id, m.queue_offset, m.tag) for m in found] == [
        (name, 0, i, "a") for i in range(5)
    ]


def test_who_leaves_the_loop_early_finds_the_rest_at_the_next_poll(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    with reader(readers).subscribe(name) as consumer:
        # Of a first poll that brings less, the next ones bring the rest and four more.
        until(lambda: _cached(consumer) == 20)
        seen = []
        for message in consumer.messages(30.0):
            seen.append(int(message.body))
            if len(seen) == 7:
                break
        assert len(read(consumer, 4, limit=4)) == 4

    rest = read(reader(readers).subscribe(name), 9)
    assert len(set(seen)) == 7
    assert len(set(rest)) == 9
    assert not set(seen) & set(rest)


def test_an_exception_in_the_loop_leaves_its_messages_for_others(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))

    def work() -> None:
        with reader(readers).subscribe(name) as consumer:
            for message in consumer.messages(30.0, limit=4):
                if message.body == b"6":
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()

    assert read(reader(readers).subscribe(name), 6) == [4, 5, 6, 7, 8, 9]


def test_a_filter_is_the_brokers(verbs: Broker, topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=1)
    verbs.send(name, bodies(0, 100, tag=["a", "b", "c", "d"] * 25))
    readers = group()
    consumer = reader(readers).subscribe(name, "b || d")

    assert read(consumer, 50) == [i for i in range(100) if i % 4 in (1, 3)]
    consumer.poll(0.0)
    until(lambda: committed(verbs, readers, name) == 100, what="what it does not want is done with")


def test_several_topics_are_read(verbs: Broker, topic: Make, group: Make, reader: Open) -> None:
    one, other = topic(queues=2), topic(queues=2)
    consumer = reader(group()).subscribe(one).subscribe(other)

    verbs.send(one, bodies(0, 10))
    verbs.send(other, bodies(10, 20))

    assert sorted(read(consumer, 20)) == list(range(20))
    assert {queue.topic for queue in consumer.assignment()} == {one, other}


def test_no_more_is_fetched_than_the_thresholds_allow(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 5000))
    consumer = reader(readers, thresholds=Thresholds(messages=10)).subscribe(name)

    found = read(consumer, 1, limit=1)
    until(lambda: _cached(consumer) > 0)

    # One fetch may go beyond it, and none is made while there is more.
    assert _cached(consumer) <= 1010
    assert found + read(consumer, 4999, limit=500) == list(range(5000))


def _cached(consumer: PullConsumer) -> int:
    statistics = consumer._reading.report()["statistics"]
    return sum(of_topic["cached"] for of_topic in statistics.values())


def test_a_group_sees_who_reads_and_how_fast(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 10))
    consumer = reader(readers, client_id="me").subscribe(name)
    read(consumer, 10)

    def details() -> dict[str, Any]:
        found: dict[str, Any] = verbs.describe_group(readers)["members"]["me"]["details"]
        return found

    # The heartbeat under way was sent before anything was read.
    verbs.create_topic(f"{name}-more", queues=1)
    consumer.subscribe(f"{name}-more")
    until(lambda: details()["queues"].get(name) == [0, 1])
    assert details()["model"] == "clustering"
    assert details()["statistics"][name]["pulled_per_s"] > 0


# -------------------------------------------------------------------------------- start, committing


def test_a_new_group_starts_where_it_is_told(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=1)
    verbs.send(name, bodies(0, 3))
    until(
        lambda: (
            time.time_ns() // 1_000_000
            > verbs.read(name, 0, offset=2, limit=1)["stored_at_ms"][0].as_py()
        )
    )
    at_ms = time.time_ns() // 1_000_000
    verbs.send(name, bodies(3, 6))
    last = reader(group(), start_from="last").subscribe(name)
    until(last.assignment)
    verbs.send(name, bodies(6, 7))

    assert read(last, 1) == [6]
    assert read(reader(group(), start_from="first").subscribe(name), 7) == list(range(7))
    assert read(reader(group(), start_from=at_ms).subscribe(name), 4) == [3, 4, 5, 6]


def test_a_group_goes_on_where_it_was(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))
    with reader(readers).subscribe(name) as first:
        assert read(first, 4, limit=4) == [0, 1, 2, 3]

    assert read(reader(readers, start_from="last").subscribe(name), 6) == [4, 5, 6, 7, 8, 9]


def test_auto_commit_counts_only_what_the_poll_before_gave(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))
    consumer = reader(readers).subscribe(name)

    assert read(consumer, 3, limit=3) == [0, 1, 2]
    assert read(consumer, 3, limit=3) == [3, 4, 5]

    until(lambda: committed(verbs, readers, name) == 3)
    consumer.poll(0.0, limit=1)
    until(lambda: committed(verbs, readers, name) == 6)


def test_what_an_exception_interrupts_comes_again(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))

    def work() -> None:
        with reader(readers).subscribe(name) as consumer:
            read(consumer, 3, limit=3)
            read(consumer, 3, limit=3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()

    assert read(reader(readers).subscribe(name), 7) == [3, 4, 5, 6, 7, 8, 9]


def test_without_auto_commit_only_commit_commits(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    first, second = queues_of(name, 2)
    verbs.send(name, bodies(0, 20))
    with reader(readers, auto_commit_ms=None).subscribe(name) as consumer:
        read(consumer, 20)
        assert [consumer.committed(queue) for queue in (first, second)] == [0, 0]

        assert consumer.commit([first]) == {first: 10}
        assert consumer.commit({second: 4}) == {second: 4}

    again = reader(readers, auto_commit_ms=None).subscribe(name)
    assert len(read(again, 6)) == 6
    assert (again.position(first), again.position(second)) == (10, 10)
    assert again.commit() == {first: 10, second: 10}


def test_an_offset_behind_the_end_is_not_committed(topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=1)
    (queue,) = queues_of(name, 1)
    consumer = reader(group()).subscribe(name)
    until(consumer.assignment)

    with pytest.raises(IllegalOffsetError):
        consumer.commit({queue: 5})
