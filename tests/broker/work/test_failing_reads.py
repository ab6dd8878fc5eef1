"""Reading fails because the store does: that says nothing of the messages, and charges none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.deliver import Delivery
from rmq_pipeline.broker.work import dead_letter, unreadable
from rmq_pipeline.broker.work.chunks import parts
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import delivered, fetch
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import CorruptLogError, StorageError
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.broker.held import WITHIN_S, Held
from tests.broker.sealed_home import messages, open_broker, seal_all
from tests.waiting import until

BACKOFF_MS = 30_000
LEASE_MS = 10


class Rebuilding(Engine):
    """An engine whose log, once a write has failed, stays closed until somebody waits for it."""

    closed = Event()

    @override
    def _open_log(self) -> CommitLog:
        if hasattr(self, "writer"):
            self.closed.set()
            until(lambda: self.writer._turns._waiting or not self.writer._queue.empty())
        return super()._open_log()


@pytest.fixture
def rebuilding(home: Path) -> Iterator[Held]:
    Rebuilding.closed.clear()
    held = Held(home, engine=Rebuilding)
    held.let_go.set()
    yield held
    held.broker.close()


def fail_a_write(rebuilding: Held, pool: ThreadPoolExecutor) -> Future[Any]:
    """Have a send fail, to another topic; returns when the log is closed for it."""
    rebuilding.arm(error="The disk fails once.")
    failing = pool.submit(rebuilding.broker.send, "other", pa.table({"body": [b"x"]}))
    assert Rebuilding.closed.wait(WITHIN_S)
    return failing


def test_messages_are_sound_although_anothers_write_fails_as_they_are_read(
    rebuilding: Held, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, failing = rebuilding.broker, list[Future[Any]]()
    broker.create_topic("other", queues=1)
    broker.create_group("g", max_attempts=1)
    broker.send("t", pa.table({"body": [b"1", b"2", b"3"]}))

    def read(engine: Engine, delivery: Delivery) -> pa.Table:
        if not failing:
            failing.append(fail_a_write(rebuilding, pool))
        return delivered(engine, delivery)

    monkeypatch.setattr(unreadable, "delivered", read)

    received = broker.receive("g", "t", limit=10)

    assert isinstance(failing[0].exception(WITHIN_S), StorageError)
    assert received["body"].to_pylist() == [b"1", b"2", b"3"]
    assert received["delivery_attempt"].to_pylist() == [1, 1, 1]
    assert broker.revive()["dead_lettered"] == 0
    broker.ack(received)


def test_messages_are_dead_lettered_although_anothers_write_fails_as_they_are_read(
    rebuilding: Held,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, failing = rebuilding.broker, list[Future[Any]]()
    broker.create_topic("other", queues=1)
    broker.create_group("g", max_attempts=1)
    broker.send("t", pa.table({"body": [b"1", b"2", b"3"]}))
    broker.receive("g", "t", limit=10, invisible_duration_ms=LEASE_MS)
    assert isinstance(broker.engine.clock, ManualClock)
    broker.engine.clock.advance(LEASE_MS)

    def read(*what: Any, **how: Any) -> pa.Table:
        if not failing:
            failing.append(fail_a_write(rebuilding, pool))
        return fetch(*what, **how)

    monkeypatch.setattr(dead_letter, "fetch", read)

    report = broker.revive()

    assert isinstance(failing[0].exception(WITHIN_S), StorageError)
    assert (report["dead_lettered"], report["dead_letter_failures"]) == (3, 0)
    assert "dead-lettered" not in caplog.text


def test_what_was_dead_lettered_before_anothers_write_failed_is_counted(
    rebuilding: Held, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, reads = rebuilding.broker, 0
    broker.create_topic("other", queues=1)
    broker.create_group("g", max_attempts=1)
    broker.send("t", pa.table({"body": [b"1", b"2", b"3"]}))
    broker.receive("g", "t", limit=10, invisible_duration_ms=LEASE_MS)
    assert isinstance(broker.engine.clock, ManualClock)
    broker.engine.clock.advance(LEASE_MS)

    def read(*what: Any, **how: Any) -> pa.Table:
        nonlocal reads
        reads += 1
        if reads == 2:
            fail_a_write(rebuilding, pool)
        return fetch(*what, **how)

    monkeypatch.setattr(dead_letter, "fetch", read)
    monkeypatch.setattr(dead_letter, "parts", partial(parts, bound_bytes=1))  # a frame for each

    assert broker.revive()["dead_lettered"] == 3
    assert reads > 3


@pytest.fixture
def sealed(home: Path, clock: ManualClock) -> Iterator[Broker]:
    """A broker with messages that are in segments only, and some after them."""
    with open_broker(home, clock) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g", max_attempts=2, backoff_ms=[BACKOFF_MS])
        for turn in range(6):
            broker.send("t", messages(100, start=100 * turn, body_bytes=4_000))
        seal_all(broker)
        broker.send("t", pa.table({"body": [b"last"]}))
        yield broker


def segment(home: Path) -> Path:
    """The first segment, under the name that it is read by."""
    found: Path = min((home / "topics").glob("t/*/.segments/*/*.kept"))
    return found


def test_nothing_is_charged_while_the_archive_is_away(
    sealed: Broker, home: Path, clock: ManualClock
) -> None:
    there, away = home / "topics", home / "away"
    there.rename(away)

    for _ in range(3):
        with pytest.raises(StorageError, match="cannot be read"):
            sealed.receive("g", "t", limit=10)
    away.rename(there)

    received = sealed.receive("g", "t", limit=10)
    assert received["delivery_attempt"].to_pylist() == [1] * 10
    assert sealed.sql("SELECT max(delivery_attempts) AS n FROM retrying")["n"].to_pylist() == [0]
    sealed.ack(received)
    clock.advance(BACKOFF_MS)
    again = sealed.receive("g", "t", limit=30)
    assert again["queue_offset"].to_pylist() == list(range(30))
    assert again["delivery_attempt"].to_pylist() == [1] * 30


@pytest.mark.parametrize("limit", [50, 1_000])
def test_what_lies_behind_a_segment_that_is_gone_is_given(
    sealed: Broker, home: Path, clock: ManualClock, limit: int
) -> None:
    there = segment(home)
    gone = pq.read_metadata(there).num_rows
    away = there.rename(home / "away")

    got: list[int] = []
    for _ in range(-(-601 // limit)):
        try:
            received = sealed.receive("g", "t", limit=limit)
        except StorageError:
            continue
        got += received["queue_offset"].to_pylist()
        sealed.ack(received)

    assert got == list(range(gone, 601))
    assert sealed.receive("g", "t", limit=limit).num_rows == 0
    away.rename(there)
    clock.advance(BACKOFF_MS)
    received = sealed.receive("g", "t", limit=1_000)
    assert received["queue_offset"].to_pylist() == list(range(gone))
    assert received["delivery_attempt"].to_pylist() == [1] * gone


def test_a_segment_that_is_gone_is_found_in_few_reads(
    sealed: Broker, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = segment(home)
    gone = pq.read_metadata(there).num_rows
    there.unlink()
    reads = []

    def read(engine: Engine, delivery: Delivery) -> pa.Table:
        reads.append(len(delivery))
        return delivered(engine, delivery)

    monkeypatch.setattr(unreadable, "delivered", read)

    assert sealed.receive("g", "t", limit=1_000).num_rows == 601 - gone
    assert len(reads) <= 4 * (601).bit_length()


@pytest.mark.parametrize("part", ["page", "footer"])
def test_what_a_damaged_segment_has_fails_and_what_is_behind_it_is_given(
    sealed: Broker, home: Path, clock: ManualClock, part: str
) -> None:
    path = segment(home)
    body = pq.read_schema(path).get_field_index("body")
    footer = pq.read_metadata(path)
    spoilt = footer.num_rows if part == "footer" else footer.row_group(0).num_rows
    at = footer.row_group(0).column(body).data_page_offset
    with path.open("r+b") as file:
        file.seek(*((-8, 2) if part == "footer" else (at,)))
        file.write(b"\xff" * 8)

    received = sealed.receive("g", "t", limit=1_000)

    assert received.num_rows == 601 - spoilt
    assert received["body"].to_pylist()[-1] == b"last"
    sealed.ack(received)
    retrying = sealed.sql("SELECT delivery_attempts AS n, reason FROM retrying").to_pylist()
    assert [row["n"] for row in retrying] == [1] * spoilt
    assert "is damaged" in retrying[0]["reason"]
    clock.advance(BACKOFF_MS)
    with pytest.raises(CorruptLogError, match="is damaged"):
        sealed.receive("g", "t", limit=1_000)
    assert sealed.receive("g", "t", limit=1_000).num_rows == 0
