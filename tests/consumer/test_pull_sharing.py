"""Pull consumers share queues, or read all of them; mistakes are told."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer import MessageQueue
from rmq_pipeline.consumer.allocation import MachineRoomNearby
from rmq_pipeline.consumer.message_queue import queues_of
from rmq_pipeline.consumer.offset_store import DamagedOffsetsError, OffsetFile
from rmq_pipeline.consumer.pace import LOCK_MS
from rmq_pipeline.errors import (
    AllocationError,
    BrokerUnavailableError,
    BusyError,
    ConsumerGroupNotFoundError,
    ConsumerUsageError,
    FilterExpressionError,
    InUseError,
    RequestError,
    TopicNotFoundError,
)
from tests.consumer.between import Between
from tests.consumer.conftest import Make, Open, bodies, numbers, read
from tests.waiting import until

# ------------------------------------------------------------------------------- members and queues


def test_members_share_a_topic_and_each_message_is_read_once(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=4), group()
    verbs.send(name, bodies(0, 400))
    first = reader(readers).subscribe(name)
    found = read(first, 50, limit=50)
    second = reader(readers).subscribe(name)

    def poll() -> bool:
        found.extend(numbers(first.poll(0.0, limit=10)))
        found.extend(numbers(second.poll(0.0, limit=10)))
        return len(found) >= 400

    until(lambda: poll() and len(first.assignment()) == 2 == len(second.assignment()))

    assert sorted(found) == list(range(400)), "handed over between two polls, nothing comes twice"


def test_a_queue_is_not_handed_over_while_what_was_polled_is_worked_on(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    first = reader(readers, client_id="a").subscribe(name)
    assert len(read(first, 20)) == 20
    second = reader(readers, client_id="b").subscribe(name)
    assert second.poll(0.2).num_rows == 0

    first.poll(0.0)

    until(second.assignment)
    assert second.poll(0.2).num_rows == 0
    assert second.position(second.assignment()[0]) == 10


def test_a_member_that_closes_leaves_its_queues_to_the_others(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    first = reader(readers).subscribe(name)
    second = reader(readers).subscribe(name)
    until(lambda: len(first.assignment()) == 1 == len(second.assignment()))

    first.close()
    verbs.send(name, bodies(0, 10))

    assert sorted(read(second, 10)) == list(range(10))


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_listener_hears_of_queues_that_come(
    how: str, verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=2)
    heard: list[tuple[int, int]] = []

    def listener(_: str, queues: list[MessageQueue], own: list[MessageQueue]) -> None:
        heard.append((len(queues), len(own)))

    consumer = reader(group())
    consumer.message_queue_changed(name, listener)
    if how == "subscribe":
        consumer.subscribe(name)
        until(lambda: heard == [(2, 2)])
    else:
        consumer.assign(queues_of(name, 2))
        until(lambda: consumer._listened)

    verbs.alter_topic(name, queues=3)

    expected = (3, 3) if how == "subscribe" else (3, 2)
    until(lambda: bool(heard) and heard[-1] == expected)


def test_assigned_queues_are_read_next_to_other_readers(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=3), group()
    queues = queues_of(name, 3)
    verbs.send(name, bodies(0, 30))
    consumer = reader(readers).assign(queues[:2])

    assert len(read(consumer, 20)) == 20
    assert consumer.assignment() == queues[:2]
    consumer.poll(0.0)
    consumer.assign(queues[1:])

    assert len(read(consumer, 10)) == 10
    # A timetable commits what the assignment took away.
    until(lambda: verbs.start_offsets(readers, name, where="last") == {0: 10, 1: 10, 2: 0})


# ------------------------------------------------------------------------------------- broadcasting


def test_broadcasting_members_read_all_and_keep_their_offsets_in_a_file(
    verbs: Broker, topic: Make, group: Make, reader: Open, tmp_path: Path
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    for member in ("a", "b"):
        with reader(readers, model="broadcasting", client_id=member).subscribe(name) as consumer:
            assert sorted(read(consumer, 20)) == list(range(20))
    verbs.send(name, bodies(20, 22))

    file = tmp_path / "offsets" / "a" / readers / "offsets.json"
    assert json.loads(file.read_text()) == {name: {"0": 10, "1": 10}}
    again = reader(readers, model="broadcasting", client_id="a").subscribe(name)
    assert sorted(read(again, 2)) == [20, 21]
    assert verbs.sql(f"select * from progress where consumer_group = '{readers}'").num_rows == 0


def test_two_consumers_do_not_share_a_file(reader: Open, group: Make) -> None:
    readers = group()
    reader(readers, model="broadcasting", client_id="a")

    with pytest.raises(ConsumerUsageError, match="its own client_id"):
        reader(readers, model="broadcasting", client_id="a")


@pytest.mark.parametrize(
    "text", ['{"t": {"1":', "", "[]", '{"t": 5}', '{"t": {"x": 5}}', '{"t": {"1": -5}}', "\x00" * 9]
)
def test_a_damaged_file_is_refused_and_not_overwritten(text: str, tmp_path: Path) -> None:
    with_offsets = OffsetFile("a", "g", folder=tmp_path)
    with_offsets.put({MessageQueue("t", "rmq", 1): 5})
    with_offsets.close()
    with_offsets.path.write_text(text)

    with pytest.raises(DamagedOffsetsError) as refused:
        OffsetFile("a", "g", folder=tmp_path)

    told = "is damaged. Restore it, or remove it to start at start_from."
    assert str(refused.value) == f"{with_offsets.path} {told}"
    assert with_offsets.path.read_text() == text
    with_offsets.path.unlink()
    OffsetFile("a", "g", folder=tmp_path).close()


#: Writes offset after offset, the same in every queue, and says which are kept.
WRITER = """
import sys
from rmq_pipeline.consumer.message_queue import queues_of
from rmq_pipeline.consumer.offset_store import OffsetFile

file = OffsetFile("a", "g", folder=sys.argv[1])
queues = queues_of("t", 5_000)
number = (file.get(queues[0]) or 0) + 1
while True:
    file.put(dict.fromkeys(queues, number))
    print(number, flush=True)
    number += 1
"""


@pytest.mark.chaos
def test_a_file_whose_writer_is_killed_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    kept = 0
    for writes in range(1, 9):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(writes):
                kept = int(writer.stdout.readline())
            writer.kill()  # it has begun with the next one
            kept = int(([str(kept), *writer.stdout.read().split()])[-1])

        file = OffsetFile("a", "g", folder=tmp_path)
        found = {file.get(queue) for queue in queues_of("t", 5_000)}
        file.close()

        assert found in ({kept}, {kept + 1}), (
            "never some of each, and nothing that was kept is lost"
        )


def test_a_file_that_was_written_is_found_again(tmp_path: Path) -> None:
    queue = MessageQueue("t", "rmq", 1)
    first = OffsetFile("host@1/../2", "g%x", folder=tmp_path)
    first.put({queue: 5})
    first.put({queue: 3})
    first.close()

    again = OffsetFile("host@1/../2", "g%x", folder=tmp_path)
    assert (again.get(queue), again.get(MessageQueue("t", "rmq", 2))) == (3, None)
    assert again.path.is_relative_to(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["host@1%2F..%2F2"]
    again.close()


# ----------------------------------------------------------------------------------------- mistakes


def test_a_subscription_that_fails_half_way_is_none(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, other, readers = topic(queues=1), topic(queues=1), group()
    between = Between(verbs, only=("heartbeat",))
    consumer = reader(readers, verbs=between).subscribe(name)
    until(consumer.assignment)

    between.refusal = BrokerUnavailableError("It is away.")
    with pytest.raises(BrokerUnavailableError):
        consumer.subscribe(other)
    between.refusal = None

    verbs.send(other, bodies(7, 8))
    verbs.send(name, bodies(0, 1))
    assert read(consumer, 1) == [0]
    assert consumer.assignment() == queues_of(name, 1)
    until(lambda: topics_of(verbs, readers) == {consumer.client_id: [name]})
    consumer.subscribe(other)
    assert read(consumer, 1) == [7]


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_first_subscription_that_fails_half_way_is_none(
    how: str, verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 1))
    between = Between(verbs, only=("heartbeat",))
    consumer = reader(readers, verbs=between)

    between.lost_after = 1
    with pytest.raises(BrokerUnavailableError):
        consumer.subscribe(name)

    assert topics_of(verbs, readers) == {}, "the broker had heard of it"
    consumer.subscribe(name) if how == "subscribe" else consumer.assign(queues_of(name, 1))
    assert read(consumer, 1) == [0]


def topics_of(verbs: Broker, group: str) -> dict[str, list[str]]:
    members = verbs.describe_group(group)["members"]
    return {client_id: facts["topics"] for client_id, facts in members.items()}


def test_what_is_not_committed_as_its_lock_is_doubtful_is_named(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 4))
    between = Between(verbs, only=("lock_queues",))
    consumer = reader(readers, verbs=between, auto_commit_ms=None).subscribe(name)
    assert read(consumer, 4) == [0, 1, 2, 3]
    (queue,) = consumer.assignment()

    between.refusal = BrokerUnavailableError("It is away.")
    assert consumer._rebalancer is not None
    assert consumer._rebalancer._locks is not None
    # Half of the time it holds goes by at once: to wait for it, others might have it meanwhile.
    consumer._rebalancer._locks._now_s = lambda: time.monotonic() + LOCK_MS / 2000
    until(lambda: not consumer._reading.holds(queue))
    with pytest.raises(BusyError, match=rf"Nothing is committed of .*{name}.*another member"):
        consumer.commit()
    assert consumer.committed(queue) == 0
    between.refusal = None
    until(lambda: consumer._reading.holds(queue))

    assert consumer.commit() == {queue: 4}
    assert consumer.poll(0.1).num_rows == 0, "nobody had it: nothing comes again"


def test_subscribe_and_assign_exclude_each_other(topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=1)
    subscribed, assigned = reader(group()).subscribe(name), reader(group())
    assigned.assign(queues_of(name, 1))

    with pytest.raises(ConsumerUsageError, match=r"cannot subscribe.*not both"):
        assigned.subscribe(name)
    with pytest.raises(ConsumerUsageError, match=r"has subscriptions.*not both"):
        subscribed.assign(queues_of(name, 1))


def test_mistakes_are_told_before_anything_is_read(topic: Make, group: Make, reader: Open) -> None:
    name = topic(queues=2)
    with pytest.raises(ConsumerUsageError, match="reads nothing yet"):
        reader(group()).poll()
    with pytest.raises(ConsumerUsageError, match="queueId=7"):
        reader(group()).assign([MessageQueue(name, "rmq", 7)])
    with pytest.raises(TopicNotFoundError):
        reader(group()).subscribe("nothing")
    with pytest.raises(ConsumerGroupNotFoundError):
        reader("nobody").subscribe(name)
    with pytest.raises(FilterExpressionError):
        reader(group()).subscribe(name, "a >", filter_type="sql92")
    with pytest.raises(RequestError, match="last, first, or ms"):
        reader(group(), start_from="now")
    for wrong in (-1, 1_893_456_000_000_000):  # µs taken for ms
        with pytest.raises(RequestError, match="from 0 to"):
            reader(group(), start_from=wrong)
    with pytest.raises(AllocationError, match="AVG"):
        reader(group(), strategy="fair")
    with pytest.raises(ConsumerUsageError, match="clustering or broadcasting"):
        reader(group(), model="both")


def test_a_group_that_is_given_messages_is_not_read_by_offset(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))
    verbs.receive(readers, name, limit=1)
    consumer = reader(readers).assign(queues_of(name, 1))

    with pytest.raises(InUseError, match="either receives messages or reads them by offset"):
        read(consumer, 100, limit=1)
    with pytest.raises(InUseError):
        consumer.close()


def test_a_broadcasting_member_follows_a_reset(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 10))
    consumer = reader(readers, model="broadcasting").subscribe(name)
    assert read(consumer, 10) == list(range(10))

    verbs.reset_offset(readers, name, to_offset=6)

    assert read(consumer, 4) == [6, 7, 8, 9]


def test_a_closed_consumer_says_so(topic: Make, group: Make, reader: Open) -> None:
    consumer = reader(group()).subscribe(topic())
    consumer.close()
    consumer.close()

    with pytest.raises(ConsumerUsageError, match=r"closed.*new consumer"):
        consumer.poll()


def test_poll_says_why_nothing_can_come(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name = topic(queues=1)
    homeless = reader(group(), strategy=MachineRoomNearby()).subscribe(name)
    with pytest.raises(AllocationError, match="room of"):
        homeless.poll(10.0)

    consumer = reader(group()).subscribe(name)
    until(consumer.assignment)
    verbs.delete_topic(name, force=True)
    with pytest.raises(TopicNotFoundError):
        consumer.poll(10.0)
