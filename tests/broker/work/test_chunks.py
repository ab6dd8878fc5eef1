"""What is copied by the broker goes in parts, however much of it is due at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.chunks import cut, parts, sizes
from rmq_pipeline.broker.work.schedule import READ_BYTES
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.topic import GIVEN_UP_TOPIC_ID
from tests.broker.sealed_home import open_broker

MIB = limits.MIB
#: As large as a body may be; more of them than one frame takes.
LARGE = 4 * MIB
MANY = 20


@pytest.fixture
def broker(tmp_path: Path, clock: ManualClock) -> Iterator[Broker]:
    with open_broker(tmp_path / "home", clock, log_file_bytes=8 * MIB) as broker:
        yield broker


def frames(broker: Broker, topic_id: int, *, n: int) -> list[int]:
    """Sizes of the sections that hold the first ``n`` messages of a topic's first queue."""
    broker.engine.dispatched()
    index = broker.engine.database.index(topic_id, 0, start=0, stop=n)
    assert len(index.position) == n
    log = broker.engine.log
    return [log.read(position).batch.nbytes for position in np.unique(index.position).tolist()]


def assert_in_parts(frame_bytes: list[int], bound_bytes: int = limits.STEP_BYTES) -> None:
    fitting = (bound_bytes - 1) // LARGE  # beside a body there is always something
    assert len(frame_bytes) == -(-MANY // fitting)
    assert max(frame_bytes) <= bound_bytes


def large(n: int) -> pa.Array:
    return pa.array([bytes([i]) * LARGE for i in range(n)], pa.binary())


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 60))
def test_slices_follow_each_other_and_keep_the_bound(lengths: list[int], bound: int) -> None:
    slices = cut(np.array(lengths, dtype=np.int64), bound)

    covered = [i for rows in slices for i in range(rows.start, rows.stop)]
    assert covered == list(range(len(lengths)))
    for rows, after in zip(slices, [*slices[1:], None], strict=True):
        total = sum(lengths[rows])
        assert total <= bound or rows.stop - rows.start == 1
        if after is not None:  # no slice ends early
            assert total + lengths[after.start] > bound


@pytest.mark.parametrize("is_sealed", [False, True])
def test_sizes_are_known_of_messages_in_the_log_and_in_segments(
    broker: Broker, is_sealed: bool
) -> None:
    broker.create_topic("t", queues=1)
    lengths = [10, 70_000, 300_000, 5, 200_000, 2_000_000, 1, 900_000] * 3
    for start in range(0, len(lengths), 4):
        bodies = [os.urandom(n) for n in lengths[start : start + 4]]
        broker.send("t", pa.table({"body": bodies}))
    topic_id = broker.engine.state.topic("t").topic.topic_id
    broker.engine.dispatched()
    index = broker.engine.database.index(topic_id, 0, start=0, stop=len(lengths))
    if is_sealed:
        broker.send("t", pa.table({"body": [os.urandom(LARGE)] * 3}))
        assert broker.seal()["dropped_files"]
        assert index.position[0] < broker.engine.log.first

    found = list(
        parts(
            broker.engine,
            Places(index.position, index.row),
            topic_id=topic_id,
            queue_id=np.zeros(len(lengths), np.int32),
            offset=np.arange(len(lengths)),
            bound_bytes=MIB,
        )
    )

    totals = [sum(lengths[rows]) for rows in found]
    assert sum(totals) == sum(lengths)
    assert all(
        n <= MIB or rows.stop - rows.start == 1 for n, rows in zip(totals, found, strict=True)
    )
    assert len(found) <= 2 * sum(lengths) // MIB + 1


def test_what_lies_between_messages_counts_unless_it_is_looked_at(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_topic("other", queues=1)
    for _ in range(5):
        broker.send("t", pa.table({"body": [b"x" * 100]}))
        broker.send("other", pa.table({"body": [os.urandom(50_000)]}))
    topic_id = broker.engine.state.topic("t").topic.topic_id
    broker.engine.dispatched()
    index = broker.engine.database.index(topic_id, 0, start=0, stop=5)
    where: dict[str, Any] = {
        "topic_id": topic_id,
        "queue_id": np.zeros(5, np.int32),
        "offset": np.arange(5),
    }
    places = Places(index.position, index.row)

    loose = sizes(broker.engine, places, **where)
    exact = sizes(broker.engine, places, near_bytes=0, **where)

    assert all(loose[:4] > 50_000)
    assert all((exact > 100) & (exact < 1_000))


def test_messages_of_a_few_sends_are_sized_and_read_together(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    n = 5_000
    for _ in range(2):
        broker.send("t", pa.table({"body": [b"x" * 100] * n}))
    topic_id = broker.engine.state.topic("t").topic.topic_id
    broker.engine.dispatched()
    index = broker.engine.database.index(topic_id, 0, start=0, stop=2 * n)
    alternating = np.arange(2 * n).reshape(2, n).T.ravel()

    found = parts(
        broker.engine,
        Places(index.position[alternating], index.row[alternating]),
        topic_id=topic_id,
        queue_id=np.zeros(2 * n, np.int32),
        offset=alternating,
    )

    assert list(found) == [slice(0, 2 * n)]


def test_large_messages_that_are_due_at_once_are_delivered_in_parts(
    broker: Broker, clock: ManualClock
) -> None:
    broker.create_topic("later", type="delay", queues=1)
    for start in range(0, MANY, 10):
        bodies = large(MANY)[start : start + 10]
        broker.send("later", pa.table({"body": bodies, "delay_level": [1] * 10}))
    clock.advance(1_000)

    report = broker.deliver_scheduled()

    assert report["delivered"] == MANY
    topic_id = broker.engine.state.topic("later").topic.topic_id
    assert_in_parts(frames(broker, topic_id, n=MANY), READ_BYTES)
    order = [broker.read("later", 0, offset=i, limit=1)["body"][0].as_py()[0] for i in range(MANY)]
    assert order == list(range(MANY))


def test_large_messages_are_dead_lettered_in_parts(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("readers")
    broker.send("t", pa.table({"body": large(MANY)}))

    broker.forward_to_dead_letter_queue(
        broker.receive("readers", "t", limit=MANY)["receipt_handle"]
    )

    dead_letters = broker.engine.state.group("readers").dead_letter_topic_id
    assert_in_parts(frames(broker, dead_letters, n=MANY))
    assert broker.sql("FROM in_flight").num_rows == 0


def test_large_half_messages_are_asked_about_and_given_up_in_parts(
    broker: Broker, clock: ManualClock
) -> None:
    broker.create_topic("t", type="transaction", queues=1)
    broker.send_half("t", pa.table({"body": large(MANY)}), producer_group="makers")
    settings = broker.engine.settings
    clock.advance(settings.transaction_immunity_ms)
    broker.check_transactions()

    asked = []
    while (checks := broker.fetch_checks(limit=MANY)).num_rows:
        asked.append(checks.num_rows)
    given_up = 0
    for _ in range(settings.transaction_check_max):
        clock.advance(settings.transaction_check_interval_ms)
        given_up += broker.check_transactions()["given_up"]

    assert sum(asked) == MANY
    assert len(asked) > 1
    assert given_up == MANY
    assert_in_parts(frames(broker, GIVEN_UP_TOPIC_ID, n=MANY))
