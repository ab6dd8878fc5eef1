"""Segments hold a queue in order, are read by offset, and count when they are registered."""

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import schema
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment, columns_of
from rmq_pipeline.archive.segment_file import SegmentWriter, show
from rmq_pipeline.errors import CorruptLogError, StorageError
from rmq_pipeline.message import hash64
from rmq_pipeline.storage import place as root
from rmq_pipeline.store.segment_reader import Segments
from rmq_pipeline.topic import SCHEDULE_TOPIC, SCHEDULE_TOPIC_ID

NAMES = {SCHEDULE_TOPIC_ID: SCHEDULE_TOPIC, 7: "t", 8: "%DLQ%g"}
ALL = schema.MESSAGE.names


def rows(
    topic_id: int, *, queue_ids: list[int], first: list[int], body_bytes: int = 20
) -> pa.RecordBatch:
    """Messages of one section: their queues in turn, offsets dense from ``first`` of each queue."""
    heads, n = list(first), len(queue_ids)
    offsets = []
    for queue_id in queue_ids:
        offsets.append(heads[queue_id])
        heads[queue_id] += 1
    groups = pa.array([None if o % 5 == 0 else f"g{o % 3}" for o in offsets], pa.string())
    columns = {
        "topic_id": [topic_id] * n,
        "queue_id": queue_ids,
        "queue_offset": offsets,
        "message_id": [f"{topic_id}-{q}-{o}" for q, o in zip(queue_ids, offsets, strict=True)],
        "tag": [None if o % 4 == 0 else "t" for o in offsets],
        "keys": [None if o % 3 == 0 else ["a", f"k{o}"] for o in offsets],
        "message_group": groups,
        "message_group_hash": hash64(groups),
        "properties": [[] if o % 2 else [("p", str(o)), ("q", None)] for o in offsets],
        "body": [os.urandom(body_bytes) for _ in offsets],
        "born_at_ms": [None if o % 7 == 0 else 1000 + o for o in offsets],
        "stored_at_ms": [5000 + o for o in offsets],
        "deliver_at_ms": [9000 if topic_id == SCHEDULE_TOPIC_ID else None] * n,
        "target_topic_id": [7 if topic_id == SCHEDULE_TOPIC_ID else None] * n,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in schema.MESSAGE]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.MESSAGE)


def write(topics: Path, *parts: list[pa.RecordBatch]) -> list[Segment]:
    """One stretch of the log as segments."""
    archive = root.opened(topics)
    writer = SegmentWriter(archive, NAMES.get)
    for part in parts:
        writer.add(part)
    writer.finish()
    segments = writer.publish()
    show(archive, segments)
    return segments


def listed(topics: Path, segments: list[Segment]) -> list[dict[str, Any]]:
    """The manifest of topic 7, written for these segments."""
    archive = root.opened(topics)
    manifest.write(archive, segments, topic="t", topic_id=7)
    return manifest.read(archive, "t/7").files


def opened(topics: Path, segments: Iterable[Segment], **settings: int) -> Segments:
    """Segments as if the log had registered them."""
    found = Segments(root.opened(topics), **settings)  # type: ignore[arg-type]
    found.add(segments, sealed_to=1)
    return found


def of_queue(batches: Iterable[pa.RecordBatch], queue_id: int) -> pa.Table:
    """What a queue was given, in order."""
    table = pa.Table.from_batches(batches)
    return table.filter(pa.compute.equal(table["queue_id"], queue_id)).combine_chunks()


@pytest.fixture
def topics(tmp_path: Path) -> Path:
    return tmp_path / "topics"


def test_every_queue_of_every_topic_has_its_own_file(topics: Path) -> None:
    plain = [
        rows(7, queue_ids=[0, 2, 0, 2, 2], first=[10, 0, 5]),
        rows(7, queue_ids=[2, 0], first=[12, 0, 8]),
    ]
    dead = [rows(8, queue_ids=[0, 0], first=[0])]
    deleted = [rows(9, queue_ids=[0], first=[0])]

    segments = write(topics, [plain[0], *dead, *deleted], [plain[1]])

    assert sorted(segments) == [
        Segment("%DLQ%g", 8, 0, 0, 2),
        Segment("t", 7, 0, 10, 13),
        Segment("t", 7, 2, 5, 9),
    ]
    assert Segment.from_path(segments[0].relative) in segments
    name = f"queue_id=2/{5:020d}-{9:020d}.parquet"
    assert sorted(topics.glob("t/7/queue_id=2/*")) == [topics / "t/7" / name]
    found = opened(topics, segments)
    for queue_id, offsets in ((0, [10, 11, 12]), (2, [5, 6, 7, 8])):
        table = found.read(7, queue_id, offsets=np.array(offsets), columns=ALL)
        assert table.combine_chunks().equals(of_queue(plain, queue_id))


def test_messages_come_in_the_order_that_is_asked_for(topics: Path) -> None:
    batches = [rows(7, queue_ids=[0] * 50, first=[50 * i]) for i in range(4)]
    segments = [segment for batch in batches for segment in write(topics, [batch])]
    found = opened(topics, reversed(segments))
    asked = np.array([199, 3, 60, 60, 120, 0, 61])

    table = found.read(7, 0, offsets=asked, columns=["body", "queue_id", "queue_offset"])

    whole = of_queue(batches, 0)
    assert table.equals(whole.take(asked).select(["body", "queue_id", "queue_offset"]))
    assert found.read(7, 0, offsets=asked[:0], columns=ALL).equals(schema.MESSAGE.empty_table())


@pytest.mark.parametrize(("topic_id", "queue_id", "offset"), [(7, 0, 49), (7, 0, 60), (7, 1, 50)])
def test_an_offset_that_is_nowhere_is_not_found(
    topics: Path, topic_id: int, queue_id: int, offset: int
) -> None:
    found = opened(topics, write(topics, [rows(7, queue_ids=[0] * 10, first=[50])]))

    with pytest.raises(LookupError):
        found.read(topic_id, queue_id, offsets=np.array([offset]), columns=ALL)


def test_scheduled_messages_keep_their_target(topics: Path) -> None:
    batch = rows(SCHEDULE_TOPIC_ID, queue_ids=[18, 18], first=[0] * 19)

    found = opened(topics, write(topics, [batch]))

    table = found.read(SCHEDULE_TOPIC_ID, 18, offsets=np.array([0, 1]), columns=ALL)
    assert table.combine_chunks().equals(pa.Table.from_batches([batch]))
    assert "target_topic_id" not in columns_of(7).names


@pytest.mark.parametrize(("body_bytes", "n"), [(10, 40_000), (1024, 8_000), (1_500_000, 6)])
def test_a_look_up_decodes_about_a_megabyte(topics: Path, body_bytes: int, n: int) -> None:
    batch = rows(7, queue_ids=[0] * n, first=[0], body_bytes=body_bytes)

    (segment,) = write(topics, [batch])

    footer = pq.read_metadata(topics / segment.relative)
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    assert max(group.total_byte_size for group in groups) < max(1.6 * 2**20, 1.1 * body_bytes)
    assert max(group.num_rows for group in groups) <= 8192
    assert len(groups) <= 1 + n * (body_bytes + 128) / 2**20 + n / 4096
    found = opened(topics, [segment])
    assert (
        found.read(7, 0, offsets=np.arange(n), columns=ALL)
        .combine_chunks()
        .equals(pa.Table.from_batches([batch]))
    )


def test_what_is_kept_in_memory_has_a_bound(topics: Path) -> None:
    batch = rows(7, queue_ids=[0] * 8_000, first=[0], body_bytes=1024)
    found = opened(topics, write(topics, [batch]), kept_bytes=3 << 20)

    for offset in range(0, 8_000, 100):
        found.read(7, 0, offsets=np.array([offset]), columns=["body"])

    assert 0 < found._groups._used_bytes <= 3 << 20
    assert len(found._groups._kept) == 3


def test_many_queues_do_not_pile_up_in_memory(topics: Path) -> None:
    writer = SegmentWriter(root.opened(topics), NAMES.get)
    queues = list(range(64))
    batches = [rows(7, queue_ids=queues, first=[i] * 64, body_bytes=100_000) for i in range(12)]

    most = 0
    for batch in batches:
        writer.add([batch])
        most = max(most, sum(queue.pending_bytes for queue in writer._queues.values()))
    writer.finish()

    assert most < 56 << 20
    found = opened(topics, writer.publish())
    table = found.read(7, 63, offsets=np.arange(12), columns=ALL)
    assert table.combine_chunks().equals(of_queue(batches, 63))


def test_a_gap_is_refused_and_nothing_is_left(topics: Path) -> None:
    writer = SegmentWriter(root.opened(topics), NAMES.get)
    writer.add([rows(7, queue_ids=[0, 1], first=[3, 0], body_bytes=5 << 20)])

    with pytest.raises(StorageError, match="Queue 0"):
        writer.add([rows(7, queue_ids=[0], first=[5])])
    writer.abort()

    assert not list(topics.glob("*/*/*/*/*"))


def test_a_damaged_segment_is_named(topics: Path) -> None:
    segments = write(topics, [rows(7, queue_ids=[0] * 10, first=[0])])
    path = topics / segments[0].kept
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))

    with pytest.raises(CorruptLogError, match="parquet"):
        opened(topics, segments).read(7, 0, offsets=np.array([1]), columns=ALL)


def test_the_folder_of_a_topic_is_one_table(topics: Path) -> None:
    batches = [rows(7, queue_ids=[0, 1, 2] * 20, first=[20 * i] * 3) for i in range(3)]
    segments = [segment for batch in batches for segment in write(topics, [batch])]
    listed(topics, sorted(segments))
    (topics / "t/7/.segments/queue_id=0/.00000000000000000060.new").write_bytes(b"torn")
    folder = topics / "t/7"

    by_arrow = ds.dataset(folder, partitioning="hive").to_table()
    with duckdb.connect() as connection:
        by_duckdb = connection.sql(
            f"SELECT queue_id, count(*), min(queue_offset), max(queue_offset) "
            f"FROM '{folder}/*/*.parquet' GROUP BY queue_id ORDER BY queue_id"
        ).fetchall()

    assert by_arrow.num_rows == 180
    assert by_arrow.schema.field("queue_id").type == pa.int32()
    assert by_duckdb == [(queue_id, 60, 0, 59) for queue_id in range(3)]


def test_a_manifest_says_what_is_in_its_files(topics: Path) -> None:
    segments = write(topics, [rows(7, queue_ids=[0] * 30 + [1], first=[0, 7])])

    first, second = listed(topics, sorted(segments))
    path = f".segments/queue_id=0/{0:020d}-{30:020d}.kept"
    assert first == {
        "path": path,
        "name": f"queue_id=0/{0:020d}-{30:020d}.parquet",
        "queue_id": 0,
        "base": 0,
        "end": 30,
        "rows": 30,
        "bytes": (topics / "t/7" / path).stat().st_size,
        "min_stored_at_ms": 5000,
        "max_stored_at_ms": 5029,
        "min_born_at_ms": 1001,
        "max_born_at_ms": 1029,
    }
    assert (second["base"], second["end"], second["min_born_at_ms"]) == (7, 8, None)
    assert (topics / "t/7" / first["name"]).samefile(topics / "t/7" / path)
    assert manifest.read(root.opened(topics), "none") == manifest.Manifest()


def test_tidying_leaves_what_is_registered(topics: Path) -> None:
    kept = write(topics, [rows(7, queue_ids=[0, 1], first=[0, 0])])
    write(topics, [rows(7, queue_ids=[0], first=[1])], [rows(8, queue_ids=[0], first=[0])])
    unfinished = topics / "t/7/.segments/queue_id=0/.00000000000000000009.new"
    unfinished.write_bytes(b"torn")
    archive = root.opened(topics)

    for _ in range(2):
        manifest.tidy(archive, kept, exists=NAMES.__contains__, now_ms=0)

    assert sorted(topics.glob("t/7/q*/*")) == sorted(topics / s.relative for s in kept)
    hidden = {topics / path for s in kept for path in (s.kept, s.index)}
    assert set(topics.glob("*/*/.segments/*/*")) == hidden
    entries = manifest.read(archive, "t/7").files
    assert [entry["name"] for entry in entries] == [s.name for s in kept]


def test_tidying_removes_topics_that_are_gone(topics: Path) -> None:
    kept = write(topics, [rows(7, queue_ids=[0], first=[0])])
    write(topics, [rows(8, queue_ids=[0], first=[0])])

    manifest.tidy(root.opened(topics), kept, exists=lambda topic_id: topic_id == 7, now_ms=0)

    assert not (topics / "%DLQ%g").exists()
    assert (topics / "t").exists()


def test_row_groups_follow_one_another(topics: Path) -> None:
    batch = rows(7, queue_ids=[0] * 5_000, first=[100], body_bytes=1024)

    (segment,) = write(topics, [batch])

    file = pq.ParquetFile(topics / segment.relative)
    stats = [file.metadata.row_group(i).column(0).statistics for i in range(file.num_row_groups)]
    assert stats[0].min == 100
    assert all(a.max + 1 == b.min for a, b in pairwise(stats))
    assert stats[-1].max == 5_099
