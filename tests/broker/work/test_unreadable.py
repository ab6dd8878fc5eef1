"""A receive that fails after it has leased: nobody else waits for that, or pays for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.deliver import Delivery
from rmq_pipeline.broker.work import receive, unreadable
from rmq_pipeline.broker.work.reading import delivered
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import CorruptLogError, StorageError
from tests.damaged import MARK, damage

BACKOFF_MS = 30_000


def send(broker: Broker, *bodies: bytes, message_group: str | None = None) -> None:
    """A frame for each."""
    for body in bodies:
        columns: dict[str, Any] = {"body": [body]}
        if message_group is not None:
            columns["message_group"] = [message_group]
        broker.send("t", pa.table(columns))


def bodies(received: pa.Table) -> list[bytes]:
    found: list[bytes] = received["body"].to_pylist()
    return found


def test_what_lies_beside_a_message_that_cannot_be_read_is_given(
    broker: Broker, clock: ManualClock
) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g", max_attempts=2, backoff_ms=[BACKOFF_MS])
    send(broker, b"1", MARK, b"2")
    damage(broker)

    received = broker.receive("g", "t", limit=10)

    assert bodies(received) == [b"1", b"2"]
    broker.ack(received)
    # It is not the next one again, but comes after the backoff, for its last attempt.
    assert not broker.receive("g", "t", limit=10).num_rows
    [retrying] = broker.sql("SELECT delivery_attempts, reason FROM retrying").to_pylist()
    assert retrying["delivery_attempts"] == 1
    assert "cannot be read" in retrying["reason"]
    clock.advance(BACKOFF_MS)
    with pytest.raises(CorruptLogError):
        broker.receive("g", "t", limit=10)
    assert not broker.receive("g", "t", limit=10).num_rows


def test_nothing_of_a_message_group_goes_past_one_that_cannot_be_read(broker: Broker) -> None:
    broker.create_topic("t", queues=1, type="fifo")
    broker.create_group("g", order="message_group", backoff_ms=[BACKOFF_MS])
    send(broker, b"a1", MARK, b"a3", message_group="A")
    send(broker, b"b1", message_group="B")
    damage(broker)

    received = broker.receive("g", "t", limit=10)

    assert bodies(received) == [b"a1", b"b1"]
    broker.ack(received)
    assert not broker.receive("g", "t", limit=10).num_rows


def test_an_unreadable_message_charges_no_other_lite_topic(broker: Broker) -> None:
    """A lite topic is a message group, also for a group that declares order by queue."""
    broker.create_topic("t", queues=1, type="lite")
    broker.create_group("g", order="queue", max_attempts=1)
    broker.sync_lite_subscription("g", "t", client_id="c", action="replace", lite_topics=["a", "b"])
    for lite_topic, body in (("a", MARK), ("b", b"b1")):
        broker.send("t", pa.table({"body": [body], "lite_topic": [lite_topic]}))
    damage(broker)

    received = broker.receive("g", "t", client_id="c", limit=10)

    assert bodies(received) == [b"b1"]


@pytest.mark.parametrize("order", ["none", "message_group", "queue"])
@pytest.mark.parametrize("step", ["load_missing", "readable"])
def test_what_a_failed_receive_has_leased_is_released(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, step: str, order: str
) -> None:
    broker.create_topic("t", queues=1, type="fifo")
    broker.create_group("g", order=order)
    send(broker, b"1", b"2", message_group="A")

    def fails(*_: object, **__: object) -> None:
        raise StorageError("The disk has gone.")

    with monkeypatch.context() as patched:
        patched.setattr(receive, step, fails)
        with pytest.raises(StorageError):
            broker.receive("g", "t", limit=10)

    received = broker.receive("g", "t", limit=10)
    assert bodies(received) == [b"1", b"2"]
    assert received["delivery_attempt"].to_pylist() == [1, 1]


class Reads:
    """The real reading of messages, counted, with something that happens before each."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.sizes: list[int] = []
        self._before = before

    def __call__(self, engine: Any, delivery: Delivery) -> pa.Table:
        self.sizes.append(len(delivery))
        self._before()
        return delivered(engine, delivery)


def test_what_is_damaged_is_found_in_few_reads(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[BACKOFF_MS])
    frames, rows = 20, 200
    for frame in range(frames):
        body = MARK if frame == 7 else b"sound"
        broker.send("t", pa.table({"body": [body, *[b"%d" % frame] * (rows - 1)]}))
    damage(broker)
    reads = Reads()
    monkeypatch.setattr(unreadable, "delivered", reads)

    received = broker.receive("g", "t", limit=frames * rows)

    assert received.num_rows == (frames - 1) * rows
    assert b"7" not in bodies(received)
    # Of halves: the bad one and the good one at each step, and the whole at first and at last.
    assert len(reads.sizes) <= 2 * frames.bit_length() + 8
    assert broker.sql("SELECT count(*) AS n FROM retrying").to_pylist() == [{"n": rows}]


def test_what_was_found_counts_although_there_is_no_time_for_the_rest(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[BACKOFF_MS], max_attempts=2)
    every = [MARK, b"1", MARK, b"2", MARK, b"3", b"4", MARK]
    send(broker, *every)
    damage(broker)
    lease_ms = 10_000
    slow = Reads(before=lambda: clock.advance(1_000))
    monkeypatch.setattr(unreadable, "delivered", slow)

    got: list[bytes] = []
    for _ in range(10):
        try:
            received = broker.receive("g", "t", limit=10, invisible_duration_ms=lease_ms)
        except CorruptLogError:
            continue
        got += bodies(received)
        broker.ack(received)

    assert sorted(got) == [b"1", b"2", b"3", b"4"]
    failed = broker.sql("SELECT delivery_attempts AS n FROM retrying")["n"].to_pylist()
    assert failed == [1, 1, 1, 1]


class Away:
    """The real reading of messages, but for these: the store fails when they are read."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = set(offsets)

    def __call__(self, engine: Any, delivery: Delivery) -> pa.Table:
        if any(self.offsets.intersection(taken.offset.tolist()) for _, taken in delivery.taken):
            raise StorageError("A sector cannot be read.")
        return delivered(engine, delivery)


@pytest.mark.parametrize(
    ("order", "given"), [("none", [0, 2, 3]), ("message_group", [0, 3]), ("queue", [0])]
)
def test_what_is_away_comes_later_and_nothing_of_its_order_before_it(
    broker: Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    given: list[int],
) -> None:
    broker.create_topic("t", queues=1, type="fifo")
    broker.create_group("g", order=order, max_attempts=1)
    send(broker, b"a0", b"a1", b"a2", message_group="A")
    send(broker, b"b3", message_group="B")
    with monkeypatch.context() as patched:
        patched.setattr(unreadable, "delivered", Away(1))
        received = broker.receive("g", "t", limit=10)
        assert received["queue_offset"].to_pylist() == given
        broker.ack(received)
        for _ in range(3):
            assert not broker.receive("g", "t", limit=10).num_rows
            clock.advance(unreadable.AWAY_MS)
            with pytest.raises(StorageError):
                broker.receive("g", "t", limit=10)

    clock.advance(unreadable.AWAY_MS)
    received = broker.receive("g", "t", limit=10)
    assert received["queue_offset"].to_pylist() == sorted({0, 1, 2, 3}.difference(given))
    assert set(received["delivery_attempt"].to_pylist()) == {1}


def test_one_that_is_damaged_behind_one_that_is_away_is_not_charged(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", queues=1, type="fifo")
    broker.create_group("g", order="message_group")
    send(broker, b"a0", MARK, message_group="A")
    damage(broker)
    monkeypatch.setattr(unreadable, "delivered", Away(0))

    with pytest.raises(CorruptLogError):
        broker.receive("g", "t", limit=10)

    failed = broker.sql("SELECT delivery_attempts AS n FROM retrying")["n"].to_pylist()
    assert failed == [0, 0]


def test_a_damaged_message_behind_slow_reads_keeps_nobody_from_the_others(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[BACKOFF_MS], max_attempts=2)
    send(broker, b"0", b"1", b"2", MARK, b"4", b"5", b"6", b"7")
    damage(broker)

    def slow(engine: Any, delivery: Delivery) -> pa.Table:
        clock.advance(700 * len(delivery))
        return delivered(engine, delivery)

    monkeypatch.setattr(unreadable, "delivered", slow)

    got: list[bytes] = []
    for _ in range(4):
        received = broker.receive("g", "t", limit=8, invisible_duration_ms=10_000)
        got += bodies(received)
        assert set(received["delivery_attempt"].to_pylist()) <= {1}
        broker.ack(received)

    assert sorted(got) == [b"0", b"1", b"2", b"4", b"5", b"6", b"7"]


def test_leases_that_ended_while_it_was_read_give_nothing(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    send(broker, b"1", b"2")
    lease_ms = 10_000
    failures = iter([StorageError("The disk was away for a moment.")])

    def late() -> None:
        for failure in failures:
            clock.advance(lease_ms)
            raise failure

    monkeypatch.setattr(unreadable, "delivered", Reads(before=late))

    assert not broker.receive("g", "t", limit=10, invisible_duration_ms=lease_ms).num_rows
    received = broker.receive("g", "t", limit=10, invisible_duration_ms=lease_ms)

    assert bodies(received) == [b"1", b"2"]
