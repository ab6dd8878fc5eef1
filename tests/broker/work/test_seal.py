"""Sealed messages are where they were, for the broker and for whoever reads the folders."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from rmq_pipeline import errors, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.seal import due, seal
from rmq_pipeline.clock import ManualClock
from tests.broker.sealed_home import (
    DELAY_MS,
    MIB,
    assert_folders_hold,
    events,
    fill,
    folders,
    messages,
    open_broker,
    read_folder,
    seal_all,
    stored,
)

HOUR_MS = 3_600_000
NOTHING = dict.fromkeys(
    (
        *("segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files"),
        *("snapshot_rows", "merged_event_rows", "forgotten_files"),
    ),
    0,
)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with open_broker(home, clock) as opened:
        yield opened


def log_files(home: Path) -> list[Path]:
    return sorted((home / "log").glob("*.log"))


def assert_same(found: dict[str, list[pa.Table]], expected: dict[str, list[pa.Table]]) -> None:
    assert found.keys() == expected.keys()
    for topic, queues in expected.items():
        for queue_id, table in enumerate(queues):
            assert found[topic][queue_id].equals(table), (topic, queue_id)


def test_folders_and_manifests_hold_what_was_published(broker: Broker, home: Path) -> None:
    fill(broker)
    expected = stored(broker)

    report = seal_all(broker)

    assert_folders_hold(home, expected)
    kept = sum(len(table) for queues in expected.values() for table in queues)
    assert report["rows"] == kept + len(broker.sql("SELECT * FROM scheduled"))
    assert report["dropped_files"] >= 2
    assert len(log_files(home)) == 1


def test_pandas_and_pyarrow_read_the_folder_of_a_topic_as_one_table(
    broker: Broker, home: Path
) -> None:
    fill(broker)
    expected = pa.concat_tables(stored(broker)["plain"]).combine_chunks()
    seal_all(broker)
    folder = folders(home)["plain"]

    arrow = ds.dataset(folder, partitioning="hive").to_table(columns=schema.READ.names)
    frame = pd.read_parquet(folder, columns=["queue_id", "queue_offset", "message_id"])

    order = [("queue_id", "ascending"), ("queue_offset", "ascending")]
    assert arrow.sort_by(order).combine_chunks().equals(expected)
    wanted = expected.select(["queue_id", "queue_offset", "message_id"]).to_pandas()
    frame = frame.astype({"queue_id": "int32"}).sort_values(["queue_id", "queue_offset"])
    pd.testing.assert_frame_equal(frame.reset_index(drop=True), wanted)


def test_what_is_sealed_is_read_and_delivered_as_before(
    broker: Broker, home: Path, clock: ManualClock
) -> None:
    fill(broker)
    broker.create_group("new", order="message_group")
    before = stored(broker)
    seal_all(broker)

    assert_same(stored(broker), before)
    broker.close()
    with open_broker(home, clock) as again:
        assert_same(stored(again), before)
        got = again.receive("new", "ordered", limit=10_000)
        sent = pa.concat_tables(before["ordered"])
        assert sorted(got["body"].to_pylist()) == sorted(sent["body"].to_pylist())


def test_a_scheduled_message_is_delivered_out_of_its_segment(
    broker: Broker, clock: ManualClock
) -> None:
    fill(broker)
    seal_all(broker)
    clock.advance(DELAY_MS)

    report = broker.deliver_scheduled()

    assert report["delivered"] == 40
    bodies = broker.read("late", 0, offset=0, limit=100)["body"].to_pylist()
    assert sorted(int(body.partition(b":")[0]) for body in bodies) == list(range(40))


def test_a_exhausted_message_is_dead_lettered_out_of_its_segment(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", messages(600, body_bytes=4000))
    got = broker.receive("g", "t", limit=1)
    seal_all(broker)
    assert broker.engine.log.first > 0

    broker.forward_to_dead_letter_queue(got, reason="rejected")

    buried = broker.read("%DLQ%g", 0, offset=0, limit=10)
    assert buried["body"].to_pylist() == got["body"].to_pylist()


def test_one_read_takes_from_segments_and_from_the_log(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.send("t", messages(600, body_bytes=4000))
    seal_all(broker)
    broker.send("t", messages(100, start=600))

    table = broker.read("t", 0, offset=0, limit=1000)

    assert broker.engine.log.first > 0
    assert table["queue_offset"].to_pylist() == list(range(700))
    numbers = [int(body.partition(b":")[0]) for body in table["body"].to_pylist()]
    assert numbers == list(range(700))


def test_every_event_is_in_parquet_or_in_duckdb_once(broker: Broker, home: Path) -> None:
    fill(broker)
    before = events(broker, home)

    report = seal_all(broker)
    after = events(broker, home)

    assert set(after.values()) == {1}
    assert before.keys() <= after.keys()
    assert report["event_rows"] >= len(before)


def test_young_messages_stay_in_the_log(home: Path, clock: ManualClock) -> None:
    with open_broker(home, clock, seal_after_ms=10 * 60_000) as broker:
        broker.create_topic("t", queues=1)
        broker.send("t", messages(10))
        assert due(broker.engine)["due"] == 0
        clock.advance(9 * 60_000)
        broker.send("t", messages(5))

        assert broker.seal() == NOTHING
        clock.advance(60_000)
        assert due(broker.engine) == {"next_due_ms": clock.now_ms(), "due": broker.engine.log.end}
        assert broker.seal()["rows"] == 10

        assert broker.seal() == NOTHING
        assert due(broker.engine)["next_due_ms"] == clock.now_ms() + 9 * 60_000


def test_a_long_log_is_sealed_however_young(home: Path) -> None:
    with open_broker(home, seal_after_ms=HOUR_MS) as broker:
        broker.create_topic("t", queues=1)
        for i in range(4):
            broker.send("t", messages(200, start=200 * i, body_bytes=4000))
        assert broker.seal() == NOTHING
        for i in range(4, 12):
            broker.send("t", messages(200, start=200 * i, body_bytes=4000))

        log = broker.engine.log
        broker.engine.dispatched()
        assert (due(broker.engine)["due"] or 0) > 0
        report = broker.seal()

        assert 0 < report["rows"] < 2400
        assert report["dropped_files"] > 0
        assert 3 * MIB < log.end - log.first < 7 * MIB
        assert broker.seal() == NOTHING


def test_sealing_is_no_reason_to_seal(broker: Broker, clock: ManualClock) -> None:
    fill(broker, rounds=1)
    seal_all(broker)
    clock.advance(HOUR_MS)
    broker.create_group("another")

    assert due(broker.engine) == {"next_due_ms": None, "due": 0}
    assert broker.seal() == NOTHING


def test_a_seal_goes_one_frame_beyond_its_limit_at_most(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    for i in range(20):
        broker.send("t", messages(10, start=10 * i, body_bytes=4000))

    assert broker.seal(limit_bytes=1)["rows"] == 0  # the frame that made the topic's siblings
    rows = [broker.seal(limit_bytes=100_000)["rows"] for _ in range(3)]

    assert all(10 <= n <= 40 for n in rows)
    with pytest.raises(errors.RequestError):
        broker.seal(limit_bytes=0)


def test_a_deleted_topic_leaves_nothing(broker: Broker, home: Path) -> None:
    broker.create_topic("t", queues=2)
    broker.send("t", messages(50))
    seal_all(broker)
    assert "t" in folders(home)
    old = folders(home)["t"]
    broker.delete_topic("t")
    broker.create_topic("t", queues=2)
    broker.send("t", messages(7))

    report = seal_all(broker)

    assert report["rows"] == 7
    assert not old.exists()
    assert read_folder(folders(home)["t"]).num_rows == 7


def test_a_fenced_seal_registers_nothing(broker: Broker, home: Path) -> None:
    fill(broker, rounds=2)
    expected = stored(broker)
    window = "upkeep/seal", broker.open_window("upkeep/seal", owner="a", duration_ms=1000)["epoch"]

    def take_over(step: str) -> None:
        if step == "events_renamed":
            broker.open_window("upkeep/seal", owner="b", duration_ms=1000, takeover=True)

    with pytest.raises(errors.FencedError):
        seal(broker.engine, limit_bytes=MIB, window=window, fault=take_over)

    assert_same(stored(broker), expected)
    assert not broker.sql("SELECT * FROM segments").num_rows
    seal_all(broker)
    assert_folders_hold(home, stored(broker))


def test_bodies_are_read_by_several_threads_while_their_log_goes(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    for i in range(6):
        broker.send("t", messages(200, start=200 * i, body_bytes=4000))
    expected = broker.read("t", 0, offset=0, limit=1200)
    seen = []

    def read(step: str) -> None:
        if step in {"registered", "log_dropped"}:
            seen.append(broker.read("t", 0, offset=0, limit=1200).equals(expected))

    seal_all(broker, read)

    assert seen.count(True) == len(seen) >= 6


KILLS = [
    ("segments_written", 1),
    ("segments_renamed", 3),
    ("events_written", 2),
    ("events_renamed", 2),
    ("registered", 1),
    ("registered", 3),
    ("manifests_written", 2),
    ("events_deleted", 1),
    ("checkpointed", 2),
    ("log_dropped", 1),
    ("snapshot_written", 1),
    ("snapshot_registered", 1),
]
Filled = tuple[Path, dict[str, list[pa.Table]], set[tuple[int, int, int]]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """A home with an unsealed log of several files, its messages, its events."""
    home = tmp_path_factory.mktemp("filled") / "home"
    with open_broker(home) as broker:
        fill(broker)
        return home, stored(broker), set(events(broker, home))


@pytest.mark.chaos
@pytest.mark.parametrize(("step", "count"), KILLS)
def test_a_kill_at_any_step_loses_and_doubles_nothing(
    step: str, count: int, home: Path, filled: Filled
) -> None:
    full, expected, published = filled
    shutil.copytree(full, home)

    child = [sys.executable, "-m", "tests.broker.sealed_home", str(home), step, str(count)]
    died = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr

    with open_broker(home) as broker:
        assert_same(stored(broker), expected)
        seal_all(broker)
        assert_same(stored(broker), expected)
        assert_folders_hold(home, expected)
        found = events(broker, home)
        assert set(found.values()) == {1}
        assert published <= found.keys()
        assert [file.name for file in (home / "events").glob(".*")] == [".nothing.parquet"]
    assert len(log_files(home)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    command = [mount, "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small tmpfs here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_disk(broker: Broker, batch: pa.Table) -> int:
    """Send until it is refused; how many messages were answered."""
    sent = 0
    try:
        while True:
            broker.send("t", batch)
            sent += batch.num_rows
    except errors.StoreFullError:
        return sent


@pytest.mark.chaos
def test_on_a_full_disk_sealing_leaves_room_for_settling(small_disk: Path) -> None:
    home = small_disk / "home"
    with open_broker(home, reserve_bytes=8 * MIB, seal_after_ms=HOUR_MS) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        sent = fill_disk(broker, messages(100, body_bytes=4000))

        # These bodies take as much room in Parquet: sealing them gains nothing.
        with pytest.raises(errors.StoreFullError):
            broker.seal(limit_bytes=1 << 30)

        assert (home / "log/reserve").stat().st_size >= 3 * MIB
        broker.ack(broker.receive("g", "t", limit=1000))
        offsets = broker.read("t", 0, offset=0, limit=sent)["queue_offset"].to_numpy()
        assert np.array_equal(offsets, np.arange(sent))


@pytest.mark.chaos
def test_on_a_full_disk_sealing_makes_room_again(small_disk: Path) -> None:
    home = small_disk / "home"
    with open_broker(home, reserve_bytes=8 * MIB, seal_after_ms=HOUR_MS) as broker:
        broker.create_topic("t", queues=1)
        blank = pa.table([[bytes(4000)] * 100], schema=pa.schema([schema.SEND.field("body")]))
        sent = fill_disk(broker, blank)

        report = broker.seal(limit_bytes=1 << 30)

        assert report["dropped_files"] > 0
        broker.engine.clock.advance(2000)  # type: ignore[attr-defined]
        broker.send("t", blank)
        offsets = broker.read("t", 0, offset=0, limit=sent + 100)["queue_offset"].to_numpy()
        assert np.array_equal(offsets, np.arange(sent + 100))
        assert json.loads((next((home / "topics/t").iterdir()) / "_manifest.json").read_text())
