"""Dispatch takes small frames together, and gets of them what it would get of each by itself."""

import tempfile
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log.commit_log import CommitLog, Section
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES, HEADER_BYTES
from rmq_pipeline.store.log.stretch import Rows, Stretches
from tests.store.log_batches import (
    EVENTS,
    MESSAGES,
    SCHEMAS,
    STATE,
    OpenLog,
    events,
    flip,
    messages,
    random_body,
    sections,
    write,
)

#: One section of a frame: its kind, its rows, and the bytes of a body.
Part = tuple[int, int, int]


def cut(all_rows: list[Rows], kind: int) -> list[tuple[int, list[dict[str, object]]]]:
    """The sections with rows of a kind: position and rows."""
    found = []
    for rows in all_rows:
        if rows.kind == kind:
            listed = rows.batch.to_pylist()
            assert sum(rows.counts) == len(listed)
            for position, count in zip(rows.positions, rows.counts, strict=True):
                found.append((position, listed[:count]))
                del listed[:count]
    return [(position, rows) for position, rows in found if rows]


def one_by_one(some: list[Section], kind: int) -> list[tuple[int, list[dict[str, object]]]]:
    """The same of sections as the log reads them, without bodies."""
    found = []
    for section in some:
        if section.kind == kind and section.batch.num_rows:
            kept = [name for name in section.batch.schema.names if name != "body"]
            found.append((section.position, section.batch.select(kept).to_pylist()))
    return found


def state(n: int) -> pa.RecordBatch:
    """Keyed state brings its own schema."""
    columns = pa.schema([("total", pa.int64())], metadata={"group_id": str(n)})
    return pa.RecordBatch.from_arrays([pa.array(range(n), pa.int64())], schema=columns)


def staged(log: CommitLog, part: Part) -> None:
    kind, rows, size = part
    if kind == MESSAGES:
        log.stage(kind, messages(*[random_body(size, seed=i) for i in range(rows)]))
    else:
        log.stage(kind, events(rows) if kind == EVENTS else state(rows))


PARTS = st.tuples(
    st.sampled_from([MESSAGES, MESSAGES, EVENTS, STATE]),
    st.integers(0, 5),
    st.sampled_from([1, 100, 3_000, 20_000]),
)


@settings(max_examples=60, deadline=None)
@given(frames=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=30))
def test_what_comes_of_stretches_is_what_the_frames_have(frames: list[list[Part]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = CommitLog.open(Path(folder), schemas=SCHEMAS, file_bytes=64 << 10, reserve_bytes=0)
        ends = []
        for parts in frames:
            for part in parts:
                staged(log, part)
            ends.append(log.commit())

        found = list(Stretches(log).between(0, log.end))

        expected = list(sections(log))
        for kind in (MESSAGES, EVENTS, STATE):
            rows = [rows for stretch in found for rows in stretch.rows]
            assert cut(rows, kind) == one_by_one(expected, kind)
        assert {stretch.end for stretch in found} <= set(ends)
        log.close()


def test_small_frames_in_a_row_are_one_stretch_and_large_ones_are_not(open_log: OpenLog) -> None:
    log = open_log(file_bytes=1 << 20)
    ends = []
    for size in (100, 100, 100, 20_000, 20_000, 100, 100):
        write(log, messages(random_body(size)))
        ends.append(log.end)

    found = list(Stretches(log).between(0, log.end))

    assert [stretch.end for stretch in found] == [ends[2], ends[3], ends[4], ends[6]]
    assert "body" not in found[0].rows[0].batch.schema.names
    assert "body" not in found[1].rows[0].batch.schema.names


def test_what_is_not_to_be_read_yet_is_not_read(open_log: OpenLog) -> None:
    log = open_log()
    ends = [0]
    for i in range(6):
        write(log, messages(b"%d" % i))
        ends.append(log.end)

    for start, stop in ((0, 3), (1, 2), (2, 6)):
        found = list(Stretches(log).between(ends[start], ends[stop]))

        assert found[-1].end == ends[stop]
        assert sum(sum(rows.counts) for stretch in found for rows in stretch.rows) == stop - start
    assert list(Stretches(log).between(log.end, log.end + 64)) == []


@pytest.mark.parametrize("at", [8, HEADER_BYTES + 8, 2 * HEADER_BYTES + 300])
def test_a_damaged_frame_is_named_and_those_before_it_are_read(
    open_log: OpenLog, tmp_path: Path, at: int
) -> None:
    log = open_log()
    starts = []
    for i in range(9):
        starts.append(log.end)
        write(log, messages(random_body(1000, seed=i)))
    flip(tmp_path / "log" / f"{0:020d}.log", FILE_HEADER_BYTES + starts[5] + at)
    found = Stretches(log).between(0, log.end)

    assert next(found).end == starts[5]
    section = starts[5] + HEADER_BYTES
    named = starts[5] if at < HEADER_BYTES else section
    with pytest.raises(CorruptLogError, match=f"at position {named} "):
        next(found)


def test_a_sound_section_that_is_no_arrow_is_named(open_log: OpenLog) -> None:
    log = open_log()
    write(log, events(3))
    write(log, events(2))
    position = log.stage_payload(EVENTS, (b"no arrow",))
    log.commit()
    write(log, events(1))

    found = Stretches(log).between(0, log.end)

    assert [next(found).rows[0].counts, next(found).rows[0].counts] == [[3], [2]]
    with pytest.raises(CorruptLogError, match=f"no Arrow .* at position {position} "):
        next(found)


def test_files_that_were_read_do_not_stay_in_memory(open_log: OpenLog, tmp_path: Path) -> None:
    log, files = open_log(file_bytes=MIB, flush="async"), 6
    body = random_body(4_000)
    while log.end < files * MIB:
        write(log, messages(body))

    assert sum(1 for _ in Stretches(log).between(0, log.end)) >= files

    mapped = psutil.Process().memory_maps(grouped=True)
    resident = {Path(each.path): each.rss for each in mapped if each.path.startswith(str(tmp_path))}
    assert len(resident) > files
    # But of the last one, which is read on.
    del resident[max(resident)]
    assert sum(resident.values()) == 0


def test_a_file_that_was_read_and_dropped_is_gone(open_log: OpenLog, tmp_path: Path) -> None:
    log = open_log()
    first = tmp_path / "log" / f"{0:020d}.log"
    while log.end < log._file_bytes:
        write(log, messages(random_body(1_000)))
    stretches = Stretches(log)
    list(stretches.between(0, log.end // 2))

    assert log.drop_before(log.end) == [first]

    mapped = psutil.Process().memory_maps(grouped=True)
    assert not [each for each in mapped if each.path.startswith(str(first))]
