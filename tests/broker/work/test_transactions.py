"""Transactions where only the inside shows: one frame, sealed logs, the broker's own upkeep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.transaction import EndHalves, FindHalves
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.broker.work.transaction import prepare
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError, TransactionNotFoundError
from rmq_pipeline.settings import Settings
from rmq_pipeline.transaction import decode
from tests.broker.sealed_home import MIB, messages, open_broker
from tests.waiting import until

DELAY_MS = 6_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def ends(halves: pa.Table, resolution: str = "commit") -> pa.Table:
    ids = halves["transaction_id"]
    return pa.table([ids, pa.array([resolution] * len(ids))], schema=schema.RESOLUTION)


def bodies(broker: Broker, topic: str) -> list[bytes]:
    found: list[bytes] = broker.read(topic, 0, offset=0, limit=1_000_000)["body"].to_pylist()
    return found


def test_halves_of_several_producers_in_one_frame_are_told_apart_after_a_crash(home: Path) -> None:
    clock = ManualClock()
    with open_broker(home, clock) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        requests = [
            prepare(
                broker.engine,
                "orders",
                messages=messages(2, start=10 * i),
                producer_group=f"p{i}",
                immunity_ms=DELAY_MS,
            )
            for i in range(3)
        ]
        broker.writer.submit_together(requests)
    for file in home.glob("state.duckdb*"):
        file.unlink()

    clock.advance(DELAY_MS)
    with open_broker(home, clock) as broker:
        broker.check_transactions()
        found = [broker.fetch_checks(producer_group=f"p{i}") for i in range(3)]

    told = [[int(body.split(b":")[0]) for body in one["body"].to_pylist()] for one in found]
    assert told == [[0, 1], [10, 11], [20, 21]]


def test_two_ends_in_one_frame_deliver_once(home: Path) -> None:
    from rmq_pipeline.broker.decide.transaction import EndHalves, FindHalves
    from rmq_pipeline.broker.work.transaction import copies
    from rmq_pipeline.transaction import decode

    with open_broker(home) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        halves = broker.send_half("orders", messages(3), producer_group="p")
        place = decode(halves["transaction_id"].combine_chunks())
        rows, is_open, _ = broker.engine.submit(FindHalves(*place))
        request = EndHalves(rows, is_open, copies(broker.engine, rows))

        answers = broker.writer.submit_together([request, request])

        assert answers == [True, False]
        assert len(bodies(broker, "orders")) == 3


def test_an_open_half_message_is_read_after_its_log_file_was_sealed(home: Path) -> None:
    clock = ManualClock()
    with open_broker(home, clock) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        broker.create_topic("others", queues=1)
        halves = broker.send_half("orders", messages(20, body_bytes=2_000), producer_group="p")
        wanted = broker.read("RMQ_SYS_TRANS_HALF_TOPIC", 0, offset=0, limit=20)["body"].to_pylist()
        for _ in range(6):
            broker.send("others", messages(100, body_bytes=9_000))
        clock.advance(DELAY_MS)

        report = seal(broker.engine, limit_bytes=1 << 40, window=None)
        broker.check_transactions()
        checks = broker.fetch_checks(topics=["orders"])
        broker.end_transactions(ends(halves.slice(0, 10)))

        folder = next((home / "topics" / "RMQ_SYS_TRANS_HALF_TOPIC").glob("*/queue_id=0"))
        sealed = pq.read_table(folder)
        orders = broker.describe_topic("orders")["topic_id"]
        assert sealed["target_topic_id"].to_pylist() == [orders] * 20
        assert report["dropped_files"] > 0
        assert broker.engine.log.first > 0
        assert checks["body"].to_pylist() == wanted
        assert bodies(broker, "orders") == wanted[:10]
    with open_broker(home, clock) as broker:
        broker.end_transactions(ends(halves))
        assert bodies(broker, "orders") == wanted


def test_the_broker_checks_by_itself_without_dagster(home: Path) -> None:
    clock = ManualClock()
    small = Settings(reserve_bytes=MIB, log_file_bytes=8 * MIB)
    with Broker.open(home, clock=clock, upkeep="self", settings=small) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        broker.send_half("orders", messages(2), producer_group="p")

        for check in range(1, 16):
            clock.advance(DELAY_MS if check == 1 else 30_000)
            until(lambda: broker.fetch_checks(topics=["orders"]).num_rows == 2)
        clock.advance(30_000)

        until(lambda: len(bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC")) == 2)


def test_the_broker_checks_what_dagster_has_not_for_a_minute(home: Path) -> None:
    clock = ManualClock()
    small = Settings(reserve_bytes=MIB, log_file_bytes=8 * MIB)

    def fallbacks(broker: Broker) -> list[Any]:
        found = broker.sql("SELECT detail FROM events WHERE kind = 'upkeep_fallback'")
        return list(found["detail"].to_pylist())

    def later() -> bool:
        # The time may pass before upkeep waits for it: it then waits for the next.
        clock.advance(1_000)
        return bool(fallbacks(broker))

    with Broker.open(home, clock=clock, upkeep="dagster", settings=small) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        broker.send_half("orders", messages(1), producer_group="p")

        clock.advance(DELAY_MS + 60_000)
        until(lambda: bool(clock._waiting))
        assert fallbacks(broker) == []
        until(later)

        assert '"job": "check_transactions"' in fallbacks(broker)[0]
        assert broker.fetch_checks(topics=["orders"]).num_rows == 1
        assert broker.status()["upkeep"]


def test_an_end_is_forgotten_after_its_time_and_not_before(home: Path) -> None:
    clock = ManualClock()
    with open_broker(home, clock) as broker:
        broker.create_topic("orders", type="transaction", queues=1)

        def begin_and_commit() -> pa.Table:
            halves = broker.send_half("orders", messages(1), producer_group="p")
            broker.end_transactions(ends(halves))
            return halves

        first = begin_and_commit()
        clock.advance(limits.TRANSACTION_REMEMBERED_MS)
        second = begin_and_commit()
        assert broker.end_transactions(ends(first))["first_time"].to_pylist() == [False]
        clock.advance(1)
        begin_and_commit()
        broker.engine.dispatched()  # which forgets the first

        with pytest.raises(TransactionNotFoundError):
            broker.end_transactions(ends(first))
        assert broker.end_transactions(ends(second))["first_time"].to_pylist() == [False]
        assert len(bodies(broker, "orders")) == 3


@pytest.mark.alone
@pytest.mark.parametrize("n", [50_000])
def test_halves_are_swept_and_ended_in_bulk(home: Path, n: int) -> None:
    clock = ManualClock()
    with open_broker(home, clock, log_file_bytes=64 * MIB) as broker:
        broker.create_topic("orders", type="transaction", queues=4)
        halves = broker.send_half("orders", messages(n), producer_group="p")
        clock.advance(DELAY_MS)

        began = time.perf_counter()
        report = broker.check_transactions(limit=n)
        swept_s = time.perf_counter() - began
        checks = broker.fetch_checks(limit=n)
        ended = broker.end_transactions(ends(halves))

        assert report["checked"] == n
        assert checks["transaction_id"].equals(halves["transaction_id"])
        assert ended["first_time"].to_pylist() == [True] * n
        offsets = broker.describe_topic("orders")["offsets"]
        assert sum(each["max_offset"] for each in offsets) == n
        # A row at a time would take minutes; a busy machine takes a few times of 0.1 s.
        assert swept_s < 5


def test_an_end_that_was_prepared_before_a_rebuild_names_its_producer(home: Path) -> None:
    with open_broker(home) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        first = broker.send_half("orders", messages(1), producer_group="first")
        second = broker.send_half("orders", messages(1, start=1), producer_group="second")
        broker.end_transactions(ends(first))
        decoded = decode(second["transaction_id"].combine_chunks())
        rows, *_ = broker.engine.submit(FindHalves(decoded[0], decoded[1]))
        broker.sql("SELECT 1")
        broker.writer.rebuild(StorageError("a write has failed"))

        assert broker.engine.submit(EndHalves(rows, np.array([False]), ()))

        kind = "kind = 'half_rolled_back'"
        found = broker.sql(f"SELECT client_id FROM events WHERE {kind}")
        assert found["client_id"].to_pylist() == ["second"]
