"""PullMessage and the offsets of groups and queues."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rmq_pipeline.rocketmq.encoding import timestamp
from rmq_pipeline.rocketmq.protocol import (
    FilterExpression,
    GetOffsetRequest,
    MessageQueue,
    PullMessageRequest,
    QueryOffsetPolicy,
    QueryOffsetRequest,
    Resource,
    UpdateOffsetRequest,
)
from tests.metrics.samples import value
from tests.rocketmq.consuming import EMPTY, OK, Consumer, Stand, duration
from tests.waiting import until

ILLEGAL_TOPIC = 40002


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=1)
    yield stand
    stand.close()


@pytest.fixture
def one(stand: Stand) -> Consumer:
    return stand.consumer("one")


def queue(topic: str = "t", queue_id: int = 0) -> MessageQueue:
    return MessageQueue(topic=Resource(name=topic), id=queue_id)


def pull(stand: Stand, one: Consumer, offset: int, **how: Any) -> tuple[int, list[bytes], int]:
    """Its status, the bodies, and the offset to go on from; -1 when there is none."""
    request = PullMessageRequest(
        group=Resource(name=how.get("group", "g")),
        message_queue=queue(queue_id=how.get("queue_id", 0)),
        offset=offset,
        batch_size=how.get("batch", 32),
        filter_expression=FilterExpression(expression=how.get("tags", "")),
        long_polling_timeout=duration(how.get("wait_ms", 0)),
    )
    first, *rest = stand.stub.PullMessage(request, metadata=one.metadata, timeout=20)
    bodies = [frame.message.body for frame in rest if frame.HasField("message")]
    return first.status.code, bodies, rest[-1].next_offset if rest else -1


def test_a_pull_reads_from_an_offset_and_leases_nothing(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"0", b"1", b"2", b"3")

    assert pull(stand, one, 1, batch=2) == (OK, [b"1", b"2"], 3)
    assert pull(stand, one, 3) == (OK, [b"3"], 4)
    assert pull(stand, one, 4) == (EMPTY, [], 4)
    assert one.receive("t", "g").bodies == [b"0", b"1", b"2", b"3"]


def test_a_pull_with_a_filter_says_how_far_it_looked(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"0", b"1", b"2", tag=["a", "b", "a"])

    assert pull(stand, one, 0, tags="b", batch=2) == (OK, [b"1"], 2)
    assert pull(stand, one, 2, tags="b") == (EMPTY, [], 3)


def test_a_pull_waits_at_the_end_for_what_comes(stand: Stand, one: Consumer) -> None:
    call = stand.pool.submit(pull, stand, one, 0, wait_ms=20_000)
    until(lambda: stand.waiting() == 1)

    stand.send("t", b"0")

    assert call.result(60) == (OK, [b"0"], 1)


def test_pulls_of_groups_that_do_not_exist_count_together(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"0", b"1")
    stand.broker.create_group("g")
    pull(stand, one, 0)

    for number in range(3):
        pull(stand, one, 0, group=f"made-up-{number}", batch=1)

    found = stand.broker.metrics()
    out = "rocketmq_messages_out_total"
    assert value(found, out, consumer_group="g", topic="t") == 2
    assert value(found, out, consumer_group="", topic="t") == 3
    assert value(found, "rocketmq_throughput_out_total", consumer_group="", topic="t") == 3
    assert len(stand.broker.engine.meter._counts.pulled) == 2


@pytest.mark.parametrize(
    ("offset", "how", "code"),
    [(1, {}, 40019), (0, {"queue_id": 7}, 40019), (-1, {}, 40000), (0, {"batch": 0}, 40000)],
)
def test_a_wrong_pull_is_answered_with_its_status(
    stand: Stand, one: Consumer, offset: int, how: dict[str, int], code: int
) -> None:
    assert pull(stand, one, offset, **how) == (code, [], -1)


def test_a_reader_keeps_its_place_with_the_broker(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"0", b"1", b"2")

    def place() -> tuple[int, int]:
        request = GetOffsetRequest(group=Resource(name="g"), message_queue=queue())
        reply = stand.stub.GetOffset(request, metadata=one.metadata, timeout=20)
        return reply.status.code, reply.offset

    def update(offset: int) -> int:
        request = UpdateOffsetRequest(
            group=Resource(name="g"), message_queue=queue(), offset=offset
        )
        reply = stand.stub.UpdateOffset(request, metadata=one.metadata, timeout=20)
        return int(reply.status.code)

    assert place() == (40403, 0)
    assert update(2) == OK
    assert place() == (OK, 2)
    assert update(4) == 40019
    assert update(1) == OK
    assert place() == (OK, 2)
    stand.broker.create_group("new")
    request = GetOffsetRequest(group=Resource(name="new"), message_queue=queue())
    reply = stand.stub.GetOffset(request, metadata=one.metadata, timeout=20)
    assert reply.status.code == 40404


def test_offsets_of_a_queue_by_policy(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"0", b"1")
    stand.clock.advance(1_000)
    later = stand.clock.now_ms()
    stand.send("t", b"2")

    def ask(policy: int, at: Timestamp | None = None, queue_id: int = 0) -> tuple[int, int]:
        request = QueryOffsetRequest(
            message_queue=queue(queue_id=queue_id),
            query_offset_policy=policy,
            timestamp=at,
        )
        reply = stand.stub.QueryOffset(request, metadata=one.metadata, timeout=20)
        return reply.status.code, reply.offset

    assert ask(QueryOffsetPolicy.BEGINNING) == (OK, 0)
    assert ask(QueryOffsetPolicy.END) == (OK, 3)
    assert ask(QueryOffsetPolicy.TIMESTAMP, timestamp(later)) == (OK, 2)
    assert ask(QueryOffsetPolicy.TIMESTAMP, Timestamp(seconds=2**62, nanos=-1)) == (OK, 3)
    assert ask(QueryOffsetPolicy.TIMESTAMP, Timestamp(seconds=-(2**62))) == (40000, 0)
    assert ask(QueryOffsetPolicy.TIMESTAMP, Timestamp(nanos=-1_000_000)) == (40000, 0)
    assert ask(QueryOffsetPolicy.END, queue_id=9) == (40019, 0)


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"])
def test_every_call_refuses_what_waits_for_its_time(
    stand: Stand, one: Consumer, topic: str
) -> None:
    group, lies_in = Resource(name="g"), queue(topic)
    request = PullMessageRequest(group=group, message_queue=lies_in, batch_size=1)
    request.long_polling_timeout.FromMilliseconds(0)
    pulled, *_ = stand.stub.PullMessage(request, metadata=one.metadata, timeout=20)

    answers = [
        pulled,
        stand.stub.UpdateOffset(
            UpdateOffsetRequest(group=group, message_queue=lies_in, offset=0),
            metadata=one.metadata,
            timeout=20,
        ),
        stand.stub.GetOffset(
            GetOffsetRequest(group=group, message_queue=lies_in), metadata=one.metadata, timeout=20
        ),
        stand.stub.QueryOffset(
            QueryOffsetRequest(message_queue=lies_in), metadata=one.metadata, timeout=20
        ),
    ]

    assert [answer.status.code for answer in answers] == [ILLEGAL_TOPIC] * 4
    assert one.receive(topic, "g").code == ILLEGAL_TOPIC
