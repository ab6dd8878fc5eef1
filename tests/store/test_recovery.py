"""A torn write at the very end is cut; damage anywhere else is refused, with its place."""

import logging
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmq_pipeline.errors import CorruptLogError, HomeFormatError, StorageError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.store.log_batches import (
    EVENTS,
    MESSAGES,
    SCHEMAS,
    OpenLog,
    bodies,
    events,
    flip,
    forget_mark,
    messages,
    overwrite,
    random_body,
    write,
)

FIRST_FILE = f"{0:020d}.log"
#: What lies between two frames, seen from the file: the header page.
PAGE = 4096


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log" / FIRST_FILE


def test_a_write_torn_at_any_byte_is_cut(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, messages(b"answered"))
    kept = log.end
    write(log, events(1), events(0))
    end = log.end
    log.close()
    whole = log_file.read_bytes()
    last_byte = len(whole[: PAGE + end].rstrip(b"\0"))

    for torn_at in range(PAGE + kept, PAGE + end + 1):
        overwrite(log_file, torn_at, bytes(PAGE + end - torn_at))
        forget_mark(log_file.parent)

        log = open_log()
        complete = torn_at >= last_byte
        assert log.end == (end if complete else kept), torn_at
        assert bodies(log) == [b"answered"]
        log.close()
        if not complete:
            assert not any(log_file.read_bytes()[PAGE + kept :])
        overwrite(log_file, 0, whole)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lost_pages_and_garbage_of_the_last_write_are_cut(
    data: st.DataObject, open_log: OpenLog, tmp_path: Path
) -> None:
    folder = tmp_path / "torn"
    shutil.rmtree(folder, ignore_errors=True)
    log = open_log(folder)
    write(log, messages(b"answered"))
    kept = log.end
    write(log, messages(random_body(20_000)), messages(random_body(9000, seed=2)))
    length = log.end - kept
    log.close()
    start = data.draw(st.integers(0, length - 2000), label="start")
    size = data.draw(st.integers(1, length - start), label="size")
    zeros = data.draw(st.booleans(), label="zeros")

    junk = bytes(size) if zeros else random_body(size, seed=start)
    overwrite(folder / FIRST_FILE, PAGE + kept + start, junk)
    forget_mark(folder)

    log = open_log(folder)
    untouched = log.end > kept  # only padding was hit
    assert bodies(log)[:1] == [b"answered"]
    assert not untouched or len(bodies(log)) == 3
    write(log, messages(b"next"))
    log.close()
    log = open_log(folder)
    assert bodies(log)[-1] == b"next"
    log.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flip_before_the_last_frame_is_refused_with_its_place(
    data: st.DataObject, open_log: OpenLog, tmp_path: Path
) -> None:
    folder = tmp_path / "flipped"
    shutil.rmtree(folder, ignore_errors=True)
    log = open_log(folder)
    write(log, messages(b"first"))
    start = log.end
    (position,) = write(log, messages(random_body(5000)))
    payload_end = position + 64 + 5000
    write(log, messages(b"last"))
    log.close()
    at = data.draw(st.integers(start, payload_end - 1), label="at")

    flip(folder / FIRST_FILE, PAGE + at)

    with pytest.raises(CorruptLogError) as refusal:
        open_log(folder)
    place = refusal.value.message
    assert str(folder / FIRST_FILE) in place
    assert any(f"position {each} (byte {PAGE + each})" in place for each in (start, position))
    assert "Sound frames follow" in place
    assert refusal.value.remedy in str(refusal.value)


def test_a_flip_in_a_file_before_the_last_is_refused(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    for i in range(10):
        write(log, messages(random_body(20_000, seed=i)))
    second = sorted(log_file.parent.glob("*.log"))[1]
    base = int(second.name[:20])
    log.close()
    # The last frame of that file: nothing sound follows it there, but the log goes on.
    third = sorted(log_file.parent.glob("*.log"))[2]

    flip(second, PAGE + int(third.name[:20]) - base - 200)

    with pytest.raises(CorruptLogError, match=second.name):
        open_log()


def test_an_older_flip_does_not_stop_the_start_but_is_found_when_read(
    open_log: OpenLog, log_file: Path
) -> None:
    log = open_log()
    (position,) = write(log, messages(random_body(1000)))
    dispatched = log.end
    write(log, messages(b"new"))
    log.close()

    flip(log_file, PAGE + dispatched - 200)

    log = open_log(dispatched_position=dispatched)
    assert bodies(log, dispatched) == [b"new"]
    for read in (lambda: log.read(position), lambda: list(log.frames(0, log.end))):
        with pytest.raises(CorruptLogError, match=f"position {position} "):
            read()
    with pytest.raises(CorruptLogError, match="no sound section"):
        log.read(position + 64)


def test_nothing_dispatched_is_cut(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, messages(b"a"))
    write(log, messages(b"b"))
    end = log.end
    log.close()

    with pytest.raises(CorruptLogError, match="dispatch has reached"):
        open_log(dispatched_position=1 << 30)
    log = open_log(dispatched_position=end)
    assert log.end == end
    log.close()
    log_file.unlink()
    with pytest.raises(CorruptLogError, match="there is no log file"):
        open_log(dispatched_position=end)


def test_a_missing_file_is_refused(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    for i in range(12):
        write(log, messages(random_body(20_000, seed=i)))
    log.close()
    paths = sorted(log_file.parent.glob("*.log"))
    middle = paths[1].read_bytes()

    paths[1].unlink()
    with pytest.raises(CorruptLogError, match=f"{paths[2].name}: a file is gone"):
        open_log()

    paths[1].write_bytes(middle)
    paths[0].unlink()
    with pytest.raises(CorruptLogError, match="dispatch has reached only 0"):
        open_log()


def test_a_body_that_looks_like_a_log_is_only_a_body(open_log: OpenLog, log_file: Path) -> None:
    log = open_log(file_bytes=1 << 20)
    write(log, messages(b"answered"))
    kept = log.end
    copied = log_file.read_bytes()[PAGE : PAGE + kept]
    position = log.stage(MESSAGES, messages(copied * 50 + random_body(100)))
    log.commit()
    end = log.end
    log.close()

    # The write is torn in its header, so that the scan for later frames meets the copies.
    overwrite(log_file, PAGE + position, bytes(64))
    forget_mark(log_file.parent)
    log = open_log(file_bytes=1 << 20)

    assert (log.end, bodies(log)) == (kept, [b"answered"])
    assert end > kept + 50 * len(copied)


def test_unsynced_frames_behind_a_hole_are_cut_with_it(
    open_log: OpenLog, log_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(flush="async")
    write(log, messages(b"synced"))
    log.sync()
    ends = [log.end]
    for i in range(3):
        write(log, messages(b"%d" % i))
        ends.append(log.end)
    log.close()

    # What a power cut may do between two syncs: a later page is on disk, an earlier one is not.
    overwrite(log_file, PAGE + ends[1], bytes(ends[2] - ends[1]))
    forget_mark(log_file.parent)
    with caplog.at_level(logging.WARNING):
        log = open_log(flush="async")

    assert bodies(log) == [b"synced", b"0"]
    assert log.end == ends[1]
    assert "cut a torn write" in caplog.text


def test_a_hole_before_a_sync_is_damage(open_log: OpenLog, log_file: Path) -> None:
    log = open_log(flush="async")
    write(log, messages(b"synced"))
    lost = log.end
    write(log, messages(b"lost"))
    log.sync()
    end = log.end
    write(log, messages(b"later"))
    log.close()

    overwrite(log_file, PAGE + lost, bytes(end - lost))

    with pytest.raises(CorruptLogError, match=f"position {lost} "):
        open_log(flush="async")


def test_files_a_crash_left_unfinished_go(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, messages(b"a"))
    log.close()
    leftover = log_file.with_suffix(".new")
    leftover.write_bytes(b"half a header")

    assert bodies(open_log()) == [b"a"]

    assert not leftover.exists()


def test_another_format_is_refused(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, messages(b"a"))
    log.close()
    whole = log_file.read_bytes()

    with pytest.raises(HomeFormatError, match="other columns"):
        open_log(schemas={**SCHEMAS, EVENTS: pa.schema([("kind", pa.int32())])})

    header = frame.unpack_file_header(memoryview(whole[:PAGE]))
    assert header is not None
    overwrite(log_file, 0, frame.pack_file_header(header._replace(version=2)))
    with pytest.raises(HomeFormatError, match="format version 2"):
        open_log()

    overwrite(log_file, 0, b"\0" * PAGE)
    with pytest.raises(CorruptLogError, match="file header"):
        open_log()

    overwrite(log_file, 0, whole[:PAGE])
    log_file.rename(log_file.with_name(f"{64:020d}.log"))
    with pytest.raises(CorruptLogError, match="file header"):
        open_log()


def test_a_log_with_fewer_columns_is_read_and_goes_on_in_another_file(
    open_log: OpenLog, log_file: Path
) -> None:
    older = {**SCHEMAS, EVENTS: pa.schema(list(SCHEMAS[EVENTS])[:-1])}
    log = open_log(schemas=older)
    log.stage(EVENTS, (old := events(3)).select(older[EVENTS].names))
    log.commit()
    log.close()

    log = open_log()
    log.stage(EVENTS, new := events(2))
    log.commit()
    log.close()
    log = open_log()
    sections = [section.batch for _, found in log.frames(0, log.end) for section in found]

    last = SCHEMAS[EVENTS].names[-1]
    assert sections[0].schema.equals(SCHEMAS[EVENTS])
    assert sections[0].drop_columns([last]).equals(old.drop_columns([last]))
    assert sections[0].column(last).null_count == 3
    assert sections[1].equals(new)
    assert len(list(log_file.parent.glob("*.log"))) == 2


def test_a_file_of_another_log_is_refused(open_log: OpenLog, tmp_path: Path) -> None:
    logs = [open_log(tmp_path / name) for name in ("one", "two")]
    for log in logs:
        for i in range(6):
            write(log, messages(random_body(20_000, seed=i)))
        log.close()
    name = sorted(path.name for path in (tmp_path / "one").glob("*.log"))[1]

    shutil.copy(tmp_path / "one" / name, tmp_path / "two" / name)

    with pytest.raises(CorruptLogError, match="another log"):
        open_log(tmp_path / "two")


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StorageError, match="Opening the commit log"):
        CommitLog.open(tmp_path / "file", schemas=SCHEMAS, file_bytes=1 << 20, reserve_bytes=0)


def test_a_log_filled_to_the_last_byte_goes_on(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, events(1))
    room = (64 << 10) - PAGE - log.end
    log.stage(EVENTS, events(1))
    while log.staged_bytes() < room:
        log.stage(EVENTS, events(0))
    log.discard()
    # A body that makes the frame end where the file does.
    body = random_body(room - 4096)
    log.stage(MESSAGES, messages(body))
    short_by = room - log.staged_bytes()
    log.discard()
    write(log, messages(random_body(len(body) + short_by)))
    assert PAGE + log.end == log_file.stat().st_size
    end = log.end
    log.close()

    log = open_log()

    assert log.end == end
    write(log, events(1))
    assert [path.name for path in sorted(log_file.parent.glob("*.log"))][1] == f"{end:020d}.log"


def test_a_start_searches_the_empty_part_of_a_file_once(
    open_log: OpenLog, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_log(file_bytes=4 * MIB).close()
    log_file.read_bytes()  # pages that were read count as data, whatever is in them
    read, pread = [0], os.pread

    def noted(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", noted)
    log = open_log(file_bytes=4 * MIB)

    assert log.end == 0
    assert sum(read) < 6 * MIB
