"""Requests that share one frame see one another: each decides on what the one before left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rmq_pipeline import errors, schema
from rmq_pipeline.broker.decide.background import OpenWindow
from rmq_pipeline.broker.decide.deliver import Delivery, Receive
from rmq_pipeline.broker.decide.publish import Send, prepare
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.message import MessageIds
from rmq_pipeline.tables import columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from tests.behaviour.conftest import Endpoint, Make

# In process only: at no endpoint a caller chooses what shares a frame, so these go to the writer.


def receiving(topic: str, group: str, *, limit: int, delivery: int) -> Receive:
    return Receive(
        topic=topic,
        group=group,
        limit=limit,
        invisible_duration_ms=60_000,
        row_filter=None,
        client_id="",
        window=None,
        delivery=delivery,
    )


def leased(delivery: Delivery) -> set[tuple[int, int]]:
    return {
        (queue_id, offset) for queue_id, taken in delivery.taken for offset in taken.offset.tolist()
    }


def sending(endpoint: Endpoint, topic: str, table: pa.Table) -> Send:
    state = endpoint.inside.writer.state.topic(topic)
    return prepare(
        state.topic,
        columns_of(table, schema.SEND),
        ids=MessageIds(),
        delay_max_ms=1_000,
        now_ms=endpoint.clock.now_ms(),
    )


def test_two_receives_of_one_frame_lease_different_messages(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    inside.broker.send(name, messages(10))

    answers = inside.inside.writer.submit_together(
        [receiving(name, readers, limit=4, delivery=n) for n in (11, 12, 13)]
    )

    places = [leased(answer) for answer in answers]
    assert [len(p) for p in places] == [4, 4, 2]
    assert len(set.union(*places)) == 10


def test_two_receives_of_one_frame_do_not_share_a_message_group(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    inside.broker.send(name, messages(10, groups=["a", "b"]))

    answers = inside.inside.writer.submit_together(
        [receiving(name, readers, limit=1, delivery=n) for n in (11, 12, 13)]
    )

    assert sorted(len(leased(answer)) for answer in answers) == [0, 1, 1]
    assert set.union(*(leased(answer) for answer in answers)) == {(0, 0), (0, 1)}


def test_two_sends_of_one_frame_get_different_offsets(
    inside: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=2)
    tables = [messages(5, start=start) for start in (0, 5, 10)]

    answers: list[Sent] = inside.inside.writer.submit_together(
        [sending(inside, name, table) for table in tables]
    )

    places = [
        place
        for answer in answers
        for place in zip(answer.queue_id.tolist(), answer.queue_offset.tolist(), strict=True)
    ]
    assert len(set(places)) == 15
    assert inside.stored(name) == 15
    assert sorted(inside.bodies(name)) == sorted(str(i).encode() for i in range(15))


def test_what_a_frame_sends_a_later_request_of_it_receives(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()

    _, delivery = inside.inside.writer.submit_together(
        [
            sending(inside, name, messages(3)),
            receiving(name, readers, limit=5, delivery=11),
        ]
    )

    assert leased(delivery) == {(0, 0), (0, 1), (0, 2)}
    assert inside.bodies(name) == [b"0", b"1", b"2"]


def test_a_refused_request_leaves_the_rest_of_its_frame_alone(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(3))

    refused, delivery = inside.inside.writer.submit_together(
        [
            receiving("nowhere", readers, limit=1, delivery=11),
            receiving(name, readers, limit=5, delivery=12),
        ]
    )

    assert isinstance(refused, errors.TopicNotFoundError)
    assert leased(delivery) == {(0, 0), (0, 1), (0, 2)}
    assert np.all(delivery.taken[0][1].attempt == 1)


def test_a_receive_and_what_it_acks_share_a_frame(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(2))
    batch = inside.broker.receive(readers, name, limit=1)
    start = inside.inside.engine.log.synced

    inside.broker.receive(readers, name, limit=1, ack=batch)

    frames = list(inside.inside.engine.log.frames(start, inside.inside.engine.log.synced))
    assert len(frames) == 1


def test_windows_opened_in_one_frame_are_told_apart_when_the_log_is_read_again(
    inside: Endpoint, group: Make
) -> None:
    names = [f"consumer/{group()}" for _ in range(3)]
    inside.inside.writer.submit_together([OpenWindow(name, "me", 60_000, False) for name in names])

    inside.close()
    for file in inside.home.glob("state.duckdb*"):
        file.unlink()
    inside.open()

    assert set(names) <= set(inside.inside.engine.state.windows)
