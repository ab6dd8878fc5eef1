"""A scheduled message that cannot be read when it is due: no other waits for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.background import Due
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.state.schedule import Schedule, Scheduled, keys_of
from rmq_pipeline.broker.work import schedule as delivery
from rmq_pipeline.broker.work import unreadable
from rmq_pipeline.broker.work.reading import fetch, segments_of
from rmq_pipeline.broker.work.unreadable import Stored
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.broker.sealed_home import messages, open_broker, seal_all
from tests.damaged import MARK, damage

DELAY_MS = 1_000
AGAIN_MS = 60_000


def schedule(broker: Broker, topic: str, *bodies: bytes, in_ms: int = DELAY_MS) -> None:
    """A frame for each."""
    due = broker.engine.clock.now_ms() + in_ms
    for body in bodies:
        broker.send(topic, pa.table({"body": [body], "deliver_at_ms": [due]}))


def delivered(broker: Broker, topic: str) -> list[bytes]:
    found: list[bytes] = broker.read(topic, 0, offset=0, limit=1_000)["body"].to_pylist()
    return found


def create_topics(broker: Broker) -> None:
    for name in ("one", "two"):
        broker.create_topic(name, type="delay", queues=1)


class Away:
    """The real reading, counted, but for these offsets: the store fails when they are read."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = set(offsets)
        self.reads = 0

    def __call__(self, engine: Any, places: Any, *, offset: Any, **how: Any) -> pa.Table:
        self.reads += 1
        if self.offsets.intersection(offset.tolist()):
            raise StorageError("The archive is away.")
        return fetch(engine, places, offset=offset, **how)


def test_a_damaged_scheduled_message_keeps_no_other_from_being_delivered(
    broker: Broker, clock: ManualClock
) -> None:
    create_topics(broker)
    schedule(broker, "one", MARK)
    schedule(broker, "one", b"beside", b"it")
    schedule(broker, "two", b"other", in_ms=2 * DELAY_MS)
    damage(broker)
    clock.advance(3 * DELAY_MS)

    report = broker.deliver_scheduled()

    assert report["delivered"] == 3
    assert delivered(broker, "one") == [b"beside", b"it"]
    assert delivered(broker, "two") == [b"other"]
    assert len(broker.engine.state.schedule) == 1


def test_what_is_away_comes_when_it_is_back_and_is_due_for_nobody_until_it_is_tried(
    broker: Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create_topics(broker)
    schedule(broker, "one", b"away", b"there")
    clock.advance(DELAY_MS)
    away = Away(0)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(unreadable, "fetch", away)
        broker.deliver_scheduled()
        assert delivered(broker, "one") == [b"there"]
        job = broker.engine.submit(Due())["jobs"]["deliver_scheduled"]
        assert job["due"] == 0
        assert job["next_due_ms"] == clock.now_ms() + 10_000
        reads = away.reads
        assert broker.deliver_scheduled()["delivered"] == 0
        assert away.reads == reads
        for _ in range(5):
            clock.advance(AGAIN_MS)
            assert broker.deliver_scheduled()["delivered"] == 0
    assert len(caplog.records) == 1  # not with each try

    clock.advance(AGAIN_MS)
    broker.deliver_scheduled()

    assert delivered(broker, "one") == [b"there", b"away"]
    assert not len(broker.engine.state.schedule)


def test_what_was_away_comes_in_its_order_once_it_is_back(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    for i in range(4):  # the earlier ones are sent later
        schedule(broker, "one", b"%d" % i, in_ms=(8 - i) * DELAY_MS)
    clock.advance(30 * DELAY_MS)
    with monkeypatch.context() as patched:
        patched.setattr(unreadable, "fetch", Away(*range(4)))
        broker.deliver_scheduled()

    clock.advance(AGAIN_MS)
    broker.deliver_scheduled()

    assert delivered(broker, "one") == [b"3", b"2", b"1", b"0"]


def test_what_is_away_is_delivered_once_after_a_restart(
    home: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_broker(home, clock) as broker, monkeypatch.context() as patched:
        create_topics(broker)
        schedule(broker, "one", b"away", b"there")
        clock.advance(DELAY_MS)
        patched.setattr(unreadable, "fetch", Away(0))
        broker.deliver_scheduled()

    with open_broker(home, clock) as broker:
        broker.deliver_scheduled()  # at once

        assert delivered(broker, "one") == [b"there", b"away"]


def test_a_message_that_was_put_off_can_be_recalled(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    due = clock.now_ms() + DELAY_MS
    sent = broker.send("one", pa.table({"body": [b"away"], "deliver_at_ms": [due]}))
    clock.advance(DELAY_MS)
    with monkeypatch.context() as patched:
        patched.setattr(unreadable, "fetch", Away(0))
        broker.deliver_scheduled()

    broker.recall("one", sent.select(["recall_handle"]))

    clock.advance(AGAIN_MS)
    assert broker.deliver_scheduled()["delivered"] == 0
    assert delivered(broker, "one") == []


def test_only_what_is_in_a_segment_that_is_gone_waits(home: Path, clock: ManualClock) -> None:
    rows = 4
    with open_broker(home, clock) as broker:
        create_topics(broker)
        due_ms = clock.now_ms() + AGAIN_MS
        for start in range(3):
            due = {"deliver_at_ms": [due_ms + i for i in range(rows)]}
            broker.send("one", messages(rows, start=rows * start, body_bytes=400_000, **due))
            seal_all(broker)
        schedule(broker, "two", b"in the log", in_ms=AGAIN_MS)
    # Opened anew, nothing of them is decoded.
    with open_broker(home, clock) as broker:
        engine = broker.engine
        gone, *others = segments_of(engine).of_topic(SCHEDULE_TOPIC_ID)
        assert others
        path = home / "topics" / gone.kept
        away = path.with_suffix(".away")
        path.rename(away)
        clock.advance(2 * AGAIN_MS)

        broker.deliver_scheduled()

        assert len(engine.state.schedule) == gone.rows
        assert len(delivered(broker, "one")) == 3 * rows - gone.rows
        assert delivered(broker, "two") == [b"in the log"]
        away.rename(path)
        clock.advance(AGAIN_MS)
        broker.deliver_scheduled()
        assert len(delivered(broker, "one")) == 3 * rows


def test_a_damaged_message_is_found_in_few_reads(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    n = 100
    schedule(broker, "one", *[MARK if i == 37 else b"%d" % i for i in range(n)])
    damage(broker)
    clock.advance(DELAY_MS)
    counted = Away()
    monkeypatch.setattr(unreadable, "fetch", counted)

    broker.deliver_scheduled()

    assert delivered(broker, "one") == [b"%d" % i for i in range(n) if i != 37]
    assert counted.reads <= 2 * n.bit_length() + 4


def test_what_there_is_no_time_to_halve_is_tried_again_and_nobody_waits_for_it(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    n = 16
    schedule(broker, "one", *[b"%d" % i for i in range(n)])
    clock.advance(DELAY_MS)
    away = Away(*range(0, n, 2))

    def slow(*args: Any, **how: Any) -> pa.Table:
        clock.advance(unreadable.WITHIN_MS // 5)
        return away(*args, **how)

    monkeypatch.setattr(unreadable, "fetch", slow)

    for _ in range(8 * n):
        broker.deliver_scheduled()
        assert away.reads <= 20
        away.reads = 0
        clock.advance(AGAIN_MS // 4)

    assert sorted(map(int, delivered(broker, "one"))) == list(range(1, n, 2))
    assert len(broker.engine.state.schedule) == n // 2


def test_a_store_that_fails_only_when_messages_are_read_to_be_delivered_is_told_of(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    schedule(broker, "one", b"1")
    clock.advance(DELAY_MS)
    calls = []

    def every_other(*args: Any, **how: Any) -> pa.Table:
        calls.append(args)
        if len(calls) % 2:
            raise StorageError("The disk comes and goes.")
        return fetch(*args, **how)

    monkeypatch.setattr(unreadable, "fetch", every_other)

    with pytest.raises(StorageError):
        broker.deliver_scheduled()


def test_reading_in_parts_keeps_the_order_and_tells_what_it_leaves_out(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topics(broker)
    schedule(broker, "one", *[b"%d" % i for i in range(8)])
    rows = broker.engine.state.schedule.due(1 << 60, 100).take(np.arange(7, -1, -1))
    monkeypatch.setattr(unreadable, "fetch", Away(2, 5))
    left: list[int] = []

    found = [
        body
        for _, part in unreadable.read_parts(
            broker.engine,
            Stored(
                SCHEDULE_TOPIC_ID,
                rows.queue_id,
                rows.queue_offset,
                Places(rows.position, rows.row),
            ),
            columns=("body",),
            bound_bytes=delivery.READ_BYTES,
            leave_out=lambda out: left.extend(out.rows.tolist()),
        )
        for body in part["body"].to_pylist()
    ]

    assert found == [b"7", b"6", b"4", b"3", b"1", b"0"]
    assert sorted(left) == [2, 5]


def test_what_was_put_off_is_due_then_and_waits_as_before() -> None:
    n = 6
    at = np.arange(n, dtype=np.int64)
    queue = np.zeros(n, np.int32)
    kept = Schedule()
    kept.add(Scheduled(at, queue, at, at, at.astype(np.int32), queue + 5))
    keys = keys_of(0, at)
    untried = np.array([False, False])

    assert kept.not_put_off(keys[[1, 3]]) == 2
    kept.put_off(keys[[1, 3]], until_ms=np.array([40, 50]), alone=untried)
    assert kept.not_put_off(keys[[1, 0]]) == 1
    kept.put_off(keys[[1, 0]], until_ms=np.array([60, 50]), alone=untried)

    assert kept.due(30, 10).queue_offset.tolist() == [2, 4, 5]
    assert kept.count_due(50) == 5
    assert kept.due(60, 10).queue_offset.tolist() == list(range(n))
    assert kept.open(keys).all()
    assert len(kept) == kept.waiting_for(5) == n
    kept.remove(keys[[0, 2, 4, 5]])
    assert kept.next_due_ms() == 50
    assert kept.first_offset(0) == 1
    kept.remove(keys[[1, 3]])
    assert kept.next_due_ms() is None
    assert not len(kept)
    assert kept.not_put_off(keys) == 0
    kept.put_off(keys, until_ms=at, alone=at < 0)
    assert not len(kept)


def test_what_could_not_be_read_comes_alone_when_nothing_else_is_due() -> None:
    at = np.arange(4, dtype=np.int64)
    queue = np.zeros(4, np.int32)
    kept = Schedule()
    kept.add(Scheduled(at, queue, at, at, at.astype(np.int32), queue + 5))
    keys = keys_of(0, at)
    until_ms = np.full(2, 10)

    kept.put_off(keys[:2], until_ms=until_ms, alone=np.array([True, False]))

    assert kept.count_due(10) == 4
    assert kept.due(10, 10).queue_offset.tolist() == [1, 2, 3]
    kept.remove(keys[1:])
    assert kept.due(10, 10).queue_offset.tolist() == [0]
    # It is known still when there was no time to try it.
    assert kept.not_put_off(keys[:1]) == 0
    kept.put_off(keys[:1], until_ms=until_ms[:1], alone=np.array([False]))
    kept.add(Scheduled(at[1:2] + 4, queue[:1], at[1:2] + 4, at[:1], queue[:1], queue[:1]))
    assert kept.due(10, 10).queue_offset.tolist() == [5]
