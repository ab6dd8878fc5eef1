"""Small segments become large ones, and no reader finds an offset twice, or misses one."""

import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rmq_pipeline import errors
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment_file import Merger, merge
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.archiving import compact, plan
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from tests.broker.archive_home import (
    SMALL,
    by_glob,
    by_manifest,
    everything,
    fill,
    kept,
    offsets_in,
    opened,
)
from tests.broker.sealed_home import MIB, messages
from tests.conftest import Eventually


def test_small_segments_become_large_ones(broker: Broker, home: Path) -> None:
    fill(broker)
    before = everything(broker)

    report = broker.compact()

    assert report["compactions"] >= 2
    assert report["inputs"] > 3 * report["compactions"]
    assert 0 < report["bytes"] < report["bytes_before"] * 1.1
    assert everything(broker).equals(before)
    assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)
    assert len(by_manifest(home)) == broker.sql("SELECT * FROM segments").num_rows < 24
    assert broker.compact() == dict.fromkeys(report, 0)


def test_what_was_compacted_is_there_after_a_restart(
    broker: Broker, home: Path, clock: ManualClock
) -> None:
    fill(broker)
    broker.compact()
    before, listed = everything(broker), by_manifest(home)
    broker.close()

    with opened(home, clock) as again:
        assert everything(again).equals(before)
        assert by_manifest(home) == listed
        assert again.compact()["compactions"] == 0


def test_replaced_files_stay_for_their_grace(
    broker: Broker, home: Path, clock: ManualClock
) -> None:
    fill(broker)
    old = by_manifest(home)
    broker.compact()

    assert all(path.exists() for path in old)
    assert broker.expire()["deleted_files"] == 0
    clock.advance(60_000)
    gone = set(old) - set(by_manifest(home))
    assert broker.expire()["deleted_files"] == len(gone) > 0

    assert not any(path.exists() for path in gone)
    assert offsets_in(by_manifest(home)) == kept(broker)
    assert broker.expire()["deleted_files"] == 0


def test_a_restart_keeps_the_grace(broker: Broker, home: Path, clock: ManualClock) -> None:
    fill(broker)
    old = by_manifest(home)
    broker.compact()
    broker.close()

    with opened(home, clock) as again:
        again.send("t", messages(1))
        again.seal()
        assert all(path.exists() for path in old)
        clock.advance(60_000)
        assert again.expire()["deleted_files"] > 0


def test_large_segments_are_left_alone(home: Path) -> None:
    with opened(home, compact_target_bytes=1000) as broker:
        fill(broker)

        assert plan(broker.engine, topic=None, limit_bytes=1 << 40) == []


def test_few_small_ones_wait_for_more(home: Path) -> None:
    with opened(home, compact_min_inputs=8) as broker:
        fill(broker, turns=4, queues=1)
        assert plan(broker.engine, topic=None, limit_bytes=1 << 40) == []
        fill(broker, turns=4, queues=1)

        (merger,) = plan(broker.engine, topic="t", limit_bytes=1 << 40)

        assert len(merger.inputs) > 3


def test_the_limit_counts_inputs(broker: Broker) -> None:
    fill(broker)

    assert len(plan(broker.engine, topic=None, limit_bytes=1)) == 1
    with pytest.raises(errors.RequestError):
        broker.compact(limit_bytes=0)
    with pytest.raises(errors.TopicNotFoundError):
        broker.compact("nowhere")


@pytest.mark.parametrize("turns", [32, pytest.param(64, marks=pytest.mark.long)])
def test_each_message_is_written_a_few_times_only(home: Path, turns: int) -> None:
    with opened(home, compact_target_bytes=1 << 30) as broker:
        written = 0
        for _ in range(turns):
            fill(broker, turns=1, queues=1)
            written += broker.compact()["rows"]

        assert turns * 40 <= written < 4 * turns * 40


def test_another_process_may_do_the_work(broker: Broker, home: Path) -> None:
    fill(broker)
    before = everything(broker)

    for planned in broker.plan_compaction():
        merger = Merger.from_json(planned)
        added = merger.run()
        first = broker.replace_segments(planned["inputs"], added=added.relative)
        assert broker.replace_segments(planned["inputs"], added=added.relative) == first
        assert first["inputs"] == len(merger.inputs)

    assert everything(broker).equals(before)
    assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)


def test_inputs_that_no_longer_count_are_refused(broker: Broker, home: Path) -> None:
    fill(broker)
    planned = broker.plan_compaction()[0]
    added = Merger.from_json(planned).run()

    with pytest.raises(errors.RequestError, match="to be replaced"):
        broker.replace_segments(planned["inputs"][:-1], added=added.relative)

    assert not list((home / "topics").glob(f"**/{added.kept.rpartition('/')[2]}"))
    assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)
    with pytest.raises(errors.RequestError, match="not that of a segment"):
        broker.replace_segments(["nonsense"], added=added.relative)


def test_a_file_that_holds_something_else_is_refused(broker: Broker, home: Path) -> None:
    fill(broker)
    planned = broker.plan_compaction()[0]
    added = Merger.from_json(planned).run()
    whole = pq.ParquetFile(home / "topics" / added.kept).read()
    pq.write_table(whole.slice(1), home / "topics" / added.kept)

    with pytest.raises(errors.StorageError, match="offsets"):
        broker.replace_segments(planned["inputs"], added=added.relative)

    assert offsets_in(by_manifest(home)) == kept(broker)


def test_a_fenced_run_replaces_nothing(broker: Broker, home: Path) -> None:
    fill(broker)
    before = by_manifest(home)
    window = "upkeep/compact", 1
    broker.open_window("upkeep/compact", owner="a", duration_ms=1000)
    broker.open_window("upkeep/compact", owner="b", duration_ms=1000, takeover=True)

    with pytest.raises(errors.FencedError):
        broker.compact(window=window)

    assert by_manifest(home) == before


def test_a_deleted_topic_is_not_compacted(broker: Broker, home: Path) -> None:
    fill(broker)
    planned = broker.plan_compaction()[0]
    added = Merger.from_json(planned).run()
    broker.delete_topic("t")

    with pytest.raises(errors.RequestError, match="was deleted"):
        broker.replace_segments(planned["inputs"], added=added.relative)

    broker.seal()
    assert not (home / "topics" / "t").exists()


def test_what_a_reader_has_begun_is_read_to_its_end(broker: Broker) -> None:
    fill(broker)
    expected = everything(broker)
    seen = []

    def read(_step: str) -> None:
        seen.append(everything(broker).equals(expected))

    compact(broker.engine, topic=None, limit_bytes=1 << 40, window=None, fault=read)

    assert len(seen) >= 5
    assert all(seen)


def test_no_reader_of_the_manifest_finds_an_offset_twice_or_misses_one(
    broker: Broker, home: Path, eventually: Eventually
) -> None:
    fill(broker, turns=8, queues=1)
    expected = kept(broker)
    over, readings, wrong = threading.Event(), [0, 0], []

    def read(at: int) -> None:
        while not over.is_set() or not readings[at]:
            if offsets_in(by_manifest(home)) != expected:
                wrong.append(at)
            readings[at] += 1

    threads = [threading.Thread(target=read, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    segments = broker.engine.segments
    (topic_id,) = segments.topics_sealed()
    try:
        for _ in range(40):
            # Merge neighbours two by two, from whatever there is.
            counted = segments.of_topic(topic_id)
            if len(counted) == 1:
                break
            one, two = counted[:2]
            seen = min(readings)
            added = merge(segments.root, [one, two])
            broker.replace_segments([one.relative, two.relative], added=added.relative)
            # Seven merges are a moment, in which a reader may not get its turn.
            eventually(lambda seen=seen: min(readings) > seen)
    finally:
        over.set()
    for thread in threads:
        thread.join()

    assert min(readings) > 3
    assert not wrong
    assert len(manifest.read(segments.root, f"t/{topic_id}").replaced) == 14  # of eight


def test_a_broker_that_does_its_own_upkeep_tends_its_archive(
    home: Path, clock: ManualClock, eventually: Eventually
) -> None:
    with opened(home, clock) as broker:
        fill(broker)
        fill(broker, turns=2, topic="old")
        broker.alter_topic("old", retention_bytes=1)
    settings = Settings(**SMALL, log_file_bytes=MIB, reserve_bytes=MIB, seal_after_ms=0)
    with Broker.open(home, clock=clock, upkeep="self", settings=settings) as broker:

        def tended() -> bool:
            clock.advance(60_000)
            return len(by_manifest(home)) < 12 and not any(kept(broker, "old").values())

        eventually(tended)
        assert offsets_in(by_manifest(home)) == kept(broker)


@pytest.mark.parametrize("step", ["before_write", "written"])
def test_a_write_that_fails_loses_neither_the_old_nor_the_new(home: Path, step: str) -> None:
    with opened(home) as broker:
        fill(broker)
        broker.alter_topic("t", retention_bytes=1_000_000)
        before = everything(broker)
    armed = [False]

    def fault(name: str) -> None:
        if armed[0] and name == step:
            armed[0] = False
            raise OSError("the disk fails")

    settings = Settings(**SMALL, log_file_bytes=MIB, reserve_bytes=MIB, seal_after_ms=0)
    engine = Engine.open(home, clock=ManualClock(), settings=settings, flush="sync", fault=fault)
    with Broker(engine, "none") as broker:
        armed[0] = True
        with pytest.raises(errors.StorageError):
            broker.compact()

        assert everything(broker).equals(before)
        broker.seal()
        assert everything(broker).equals(before)
        assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)
        broker.compact()
        broker.alter_topic("t", retention_bytes=1)
        armed[0] = True
        with pytest.raises(errors.StorageError):
            broker.expire()
        broker.seal()
        assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home))
        broker.expire()
        assert kept(broker) == {0: [], 1: []}
        assert by_manifest(home) == by_glob(home) == []
