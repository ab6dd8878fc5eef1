"""A pull consumer goes where it is told, and where its group is put."""

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer import MessageQueue, PullConsumer
from rmq_pipeline.consumer.message_queue import queues_of
from rmq_pipeline.errors import (
    ConsumerUsageError,
    IllegalOffsetError,
)
from tests.consumer.between import Between
from tests.consumer.conftest import Make, Open, bodies, read
from tests.consumer.pieces import Gate
from tests.waiting import until

# ------------------------------------------------------------------------------ seeking and pausing


@pytest.fixture
def ten(verbs: Broker, topic: Make, group: Make, reader: Open) -> tuple[PullConsumer, MessageQueue]:
    """A consumer that has read 0 to 9 of the only queue."""
    name = topic(queues=1)
    verbs.send(name, bodies(0, 10))
    consumer = reader(group()).subscribe(name)
    assert read(consumer, 10) == list(range(10))
    return consumer, queues_of(name, 1)[0]


def test_seek_goes_to_an_offset_the_begin_or_the_end(
    verbs: Broker, ten: tuple[PullConsumer, MessageQueue]
) -> None:
    consumer, queue = ten

    consumer.seek(queue, 7)
    assert consumer.position(queue) == 7
    assert read(consumer, 3) == [7, 8, 9]
    consumer.seek(queue, "begin")
    assert read(consumer, 10) == list(range(10))
    consumer.seek(queue, 2)
    consumer.seek(queue, "end")
    verbs.send(queue.topic, bodies(10, 11))
    assert read(consumer, 1) == [10]


def test_a_seek_is_what_is_committed_next(
    verbs: Broker, ten: tuple[PullConsumer, MessageQueue]
) -> None:
    consumer, queue = ten
    consumer.poll(0.0)
    until(lambda: consumer.committed(queue) == 10)

    consumer.seek(queue, 4)

    until(lambda: consumer.committed(queue) == 4)
    assert verbs.start_offsets(consumer.group, queue.topic, where="last") == {0: 4}
    assert read(consumer, 6) == [4, 5, 6, 7, 8, 9]


def test_seek_to_a_time_finds_the_first_message_from_then_on(
    verbs: Broker, ten: tuple[PullConsumer, MessageQueue]
) -> None:
    consumer, queue = ten
    stored = verbs.read(queue.topic, 0, offset=9, limit=1)["stored_at_ms"][0].as_py()

    consumer.seek_to_time(queue, stored)
    assert consumer.position(queue) == consumer.offset_for_time(queue, stored) <= 9
    consumer.seek_to_time(queue, stored + 10**9)
    assert consumer.position(queue) == 10


def test_a_seek_outside_of_the_queue_is_refused_and_says_what_it_keeps(
    ten: tuple[PullConsumer, MessageQueue],
) -> None:
    consumer, queue = ten

    for offset in (-1, 11):
        with pytest.raises(IllegalOffsetError, match=f"0 to 10, not {offset}"):
            consumer.seek(queue, offset)
    assert consumer.position(queue) == 10


def test_a_seek_to_nothing_and_of_a_queue_of_others_is_refused(
    ten: tuple[PullConsumer, MessageQueue],
) -> None:
    consumer, queue = ten

    with pytest.raises(ConsumerUsageError, match="begin or end"):
        consumer.seek(queue, "middle")  # type: ignore[arg-type]
    with pytest.raises(ConsumerUsageError, match="does not read"):
        consumer.seek(MessageQueue(queue.topic, "rmq", 9), 0)


def test_a_paused_queue_gives_nothing_until_it_is_resumed(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=2)
    first, second = queues_of(name, 2)
    consumer = reader(group()).subscribe(name)
    until(lambda: len(consumer.assignment()) == 2)

    consumer.pause(first)
    verbs.send(name, bodies(0, 100))

    found = pa.concat_tables([consumer.poll(10.0), *(consumer.poll(0.2) for _ in range(3))])
    assert set(found["queue_id"].to_pylist()) == {1}
    assert consumer.paused() == [first]
    consumer.resume(first)
    assert len(read(consumer, 100 - found.num_rows)) == 100 - found.num_rows
    assert consumer.position(first) + consumer.position(second) == 100


# --------------------------------------------------------------------- put elsewhere while it reads


def test_a_reset_is_followed_live(verbs: Broker, ten: tuple[PullConsumer, MessageQueue]) -> None:
    consumer, queue = ten

    verbs.reset_offset(consumer.group, queue.topic, to_offset=6)

    assert read(consumer, 4) == [6, 7, 8, 9]


def test_what_has_accumulated_is_skipped_live(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 1000))
    consumer = reader(readers).subscribe(name)
    read(consumer, 5, limit=5)

    verbs.reset_offset(readers, name, to_latest=True)
    until(lambda: consumer.position(queues_of(name, 1)[0]) == 1000)

    verbs.send(name, bodies(1000, 1001))
    assert read(consumer, 1) == [1000]


def test_offsets_of_another_group_are_cloned_live(
    verbs: Broker, ten: tuple[PullConsumer, MessageQueue], group: Make
) -> None:
    consumer, queue = ten
    other = group()
    verbs.start_offsets(other, queue.topic, where="first")
    verbs.commit_offsets(other, queue.topic, offsets={0: (0, 3)})

    verbs.clone_offsets(other, consumer.group, topic=queue.topic)

    assert read(consumer, 7) == [3, 4, 5, 6, 7, 8, 9]


def test_who_assigns_follows_a_reset_by_its_next_commit(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))
    consumer = reader(readers).assign(queues_of(name, 1))
    assert read(consumer, 10) == list(range(10))

    verbs.reset_offset(readers, name, to_offset=8)

    assert read(consumer, 2) == [8, 9]


@pytest.mark.parametrize("how", ["assign", "subscribe"])
def test_a_reset_to_the_committed_offset_is_followed_before_anybody_tells_of_it(
    how: str, verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    (queue,) = queues_of(name, 1)
    verbs.send(name, bodies(0, 10))
    between = Between(verbs, only=("heartbeat",))
    consumer = reader(readers, auto_commit_ms=None, verbs=between)
    consumer.assign([queue]) if how == "assign" else consumer.subscribe(name)
    assert read(consumer, 4, limit=4) == [0, 1, 2, 3]
    assert consumer.commit() == {queue: 4}
    assert read(consumer, 3, limit=3) == [4, 5, 6]
    between.gate = told = Gate()
    if how == "subscribe":
        verbs.heartbeat(readers, "other", topics=[], details={})
        assert told.arrived.wait(30)

    verbs.reset_offset(readers, name, to_offset=4)

    assert consumer.commit() == {queue: 4}
    assert read(consumer, 3, limit=3) == [4, 5, 6]
    assert consumer.commit() == {queue: 7}
    told.open()
    assert read(consumer, 3, limit=3) == [7, 8, 9], "and nothing is read once more for that"
    assert verbs.committed_offsets(readers, name) == {0: (7, 1)}
