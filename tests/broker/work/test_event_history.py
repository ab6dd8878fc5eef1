"""Snapshots are taken, files of events are merged and forgotten, and every event counts once."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from rmq_pipeline.broker.work import event_history
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import FencedError, QueryError
from rmq_pipeline.store.history import NOTHING
from tests.broker.sealed_home import messages, open_broker
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rmq_pipeline.broker import Broker

HOUR_MS = 3_600_000
COUNTS = 'SELECT count(*) AS n, count(DISTINCT (position, "row")) AS events FROM events'


@pytest.fixture
def prepared(tmp_path: Path, clock: ManualClock) -> Iterator[Callable[..., Broker]]:
    """Opens a broker with a topic and a group that reads it."""
    with ExitStack() as opened:

        def prepare(**settings: Any) -> Broker:
            chosen = {"snapshot_events": 100, **settings}
            broker = opened.enter_context(open_broker(tmp_path / "home", clock, **chosen))
            broker.create_topic("t", queues=1)
            broker.create_group("g")
            return broker

        yield prepare


@pytest.fixture
def broker(prepared: Callable[..., Broker]) -> Broker:
    return prepared()


def work(broker: Broker, n: int = 60) -> None:
    """Some messages go through, and one more is held."""
    broker.send("t", messages(n))
    got = broker.receive("g", "t", limit=n, invisible_duration_ms=12 * HOUR_MS)
    broker.ack(got.slice(1))


def files(broker: Broker, folder: str) -> list[str]:
    names = sorted(file.name for file in (broker.engine.home.path / folder).iterdir())
    assert names[0] == NOTHING
    return names[1:]


def in_flight_at(broker: Broker, at_ms: int) -> int:
    return int(broker.sql(f"SELECT count(*) AS n FROM in_flight_at({at_ms})")["n"][0].as_py())


def counted(broker: Broker) -> int:
    """How many events there are; each is there once."""
    [row] = broker.sql(COUNTS).to_pylist()
    assert row["n"] == row["events"]
    return int(row["n"])


def test_every_step_of_a_seal_leaves_each_event_there_once(broker: Broker) -> None:
    steps: list[tuple[str, int]] = []
    for _ in range(10):
        work(broker)
        seal(
            broker.engine,
            limit_bytes=1 << 20,
            window=None,
            fault=lambda step: steps.append((step, counted(broker))),
        )

    known = [n for _, n in steps]
    seen = {step for step, _ in steps}
    assert known == sorted(known)
    assert {"events_renamed", "registered", "events_deleted", "snapshot_registered"} <= seen
    assert {"events_merged", "events_replaced"} <= seen


def test_files_of_events_stay_few_and_those_of_a_message_lie_together(broker: Broker) -> None:
    for _ in range(40):
        work(broker, 10)
        broker.seal()

    kept = broker.engine.database.kept_history().event_files.to_pylist()
    assert len(kept) < 8
    assert [row["from_position"] for row in kept[1:]] == [row["to_position"] for row in kept[:-1]]
    merged = pq.read_table(broker.engine.home.path / kept[0]["path"])
    keys = ("topic_id", "queue_id", "queue_offset", "position", "row")
    placed = list(zip(*(merged[name].to_pylist() for name in keys), strict=True))
    assert placed == sorted(placed)
    assert merged.num_rows == kept[0]["rows"]


def test_what_was_merged_goes_when_no_query_can_be_reading_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_pipeline.store.history.GRACE_S", 0.0)
    for _ in range(12):
        work(broker, 10)
        broker.seal()

    broker.seal()

    registered = broker.engine.database.kept_history().event_files["path"].to_pylist()
    assert [f"events/{name}" for name in files(broker, "events")] == sorted(registered)
    assert counted(broker) > 0


def test_damaged_files_of_events_are_not_merged(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    work(broker, 10)
    broker.seal()
    damaged = broker.engine.home.path / "events" / files(broker, "events")[0]
    content = bytearray(damaged.read_bytes())
    content[40] ^= 0x10
    damaged.write_bytes(content)

    for _ in range(12):
        work(broker, 10)
        broker.seal()

    assert damaged.read_bytes() == content
    assert len(files(broker, "events")) == 13
    assert f"{damaged} is damaged and is not merged" in caplog.text


def test_queries_go_on_while_files_are_merged(broker: Broker) -> None:
    done = threading.Event()
    found: list[int] = []

    def ask() -> None:
        while not done.is_set():
            found.append(counted(broker))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(20):
            before = len(found)
            work(broker, 10)
            broker.seal()
            until(lambda before=before: len(found) > before)  # type: ignore[misc]
    finally:
        done.set()
        asking.join()

    assert found == sorted(found)
    assert len(found) > 5


def test_a_snapshot_is_taken_after_so_many_events_or_after_an_hour(
    prepared: Callable[..., Broker], clock: ManualClock
) -> None:
    settings = {"snapshot_events": 3_000, "snapshot_every_ms": HOUR_MS}
    broker = prepared(**settings)
    work(broker, 100)
    broker.seal()
    assert files(broker, "snapshots") == []  # not worth it

    work(broker, 600)
    broker.seal()
    assert len(files(broker, "snapshots")) == 1  # there was none

    clock.advance(HOUR_MS - 1)
    work(broker, 600)
    broker.seal()
    assert len(files(broker, "snapshots")) == 1  # young, and not so many

    clock.advance(1)
    broker.seal()
    assert len(files(broker, "snapshots")) == 2  # old

    work(broker, 2_000)
    broker.seal()
    assert len(files(broker, "snapshots")) == 3  # young, and so many


def test_history_goes_when_it_is_old_and_earlier_moments_are_refused(
    prepared: Callable[..., Broker], clock: ManualClock
) -> None:
    settings = {"history_retention_ms": 5 * HOUR_MS, "snapshot_every_ms": HOUR_MS}
    broker = prepared(**settings)
    broker.create_topic("short")
    broker.send("short", messages(5))
    broker.delete_topic("short")
    moments = []
    for _ in range(12):
        work(broker)
        moments.append((clock.now_ms(), in_flight_at(broker, clock.now_ms())))
        clock.advance(HOUR_MS)
        broker.seal()

    kept = [(at_ms, n) for at_ms, n in moments if at_ms >= clock.now_ms() - 5 * HOUR_MS]
    assert [(at_ms, in_flight_at(broker, at_ms)) for at_ms, _ in kept] == kept
    with pytest.raises(QueryError, match="The kept history begins at"):
        in_flight_at(broker, moments[0][0])
    assert len(broker.engine.database.kept_history().snapshots) <= 7
    assert broker.sql("SELECT min(at_ms) AS at_ms FROM events")["at_ms"][0].as_py() > moments[3][0]
    left = "SELECT count(*) FROM store.consume_queue WHERE topic_id NOT IN (SELECT topic_id FROM "
    assert broker.engine.database._root.sql(left + "store.topics)").fetchall() == [(0,)]


def test_the_history_is_the_same_after_the_home_was_opened_again(
    tmp_path: Path, prepared: Callable[..., Broker], clock: ManualClock
) -> None:
    home = tmp_path / "home"
    broker = prepared()
    moments = []
    for _ in range(10):
        work(broker)
        moments.append((clock.now_ms(), in_flight_at(broker, clock.now_ms()), counted(broker)))
        clock.advance(1_000)
        broker.seal()
        broker.close()
        (home / "snapshots" / "left.parquet").write_bytes(b"never registered")
        broker = open_broker(home, clock, snapshot_events=100)

    for at_ms, in_flight, events in moments:
        assert in_flight_at(broker, at_ms) == in_flight
        happened = broker.sql(f"SELECT count(*) AS n FROM events WHERE at_ms <= {at_ms}")
        assert happened["n"][0].as_py() == events
    broker.seal()
    assert "left.parquet" not in files(broker, "snapshots")
    broker.close()


def test_a_window_that_was_taken_over_registers_nothing(broker: Broker, clock: ManualClock) -> None:
    old = broker.open_window("upkeep/seal", owner="a", duration_ms=1)
    clock.advance(5)
    broker.open_window("upkeep/seal", owner="b", duration_ms=1_000)
    work(broker)

    with pytest.raises(FencedError), broker.engine.segments.sealing:
        event_history.keep(
            broker.engine, window=("upkeep/seal", old["epoch"]), fault=lambda _: None
        )

    assert broker.engine.database.kept_history().snapshots["path"].to_pylist() == [None]


def test_a_full_disk_leaves_the_history_as_it_is(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(broker)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with broker.engine.segments.sealing:
        report = event_history.keep(broker.engine, window=None, fault=lambda _: None)

    assert report["snapshot_rows"] == 0
    monkeypatch.undo()
    assert in_flight_at(broker, broker.engine.clock.now_ms()) == 1


def test_nothing_of_the_state_is_missing_from_a_snapshot(broker: Broker, tmp_path: Path) -> None:
    work(broker)
    broker.engine.dispatched()
    file = tmp_path / "snapshot.parquet"

    taken = broker.engine.database.export_snapshot(file)

    rows = pq.read_table(file).to_pylist()
    assert taken.rows == len(rows)
    assert {row["position"] for row in rows} == {taken.position}
    [lease] = [row for row in rows if row["what"] == "lease"]
    assert (lease["queue_offset"], lease["attempt"], lease["detail"]) == (0, 1, None)
    heads = {row["topic_id"]: row["queue_offset"] for row in rows if row["what"] == "head"}
    assert 60 in heads.values()
