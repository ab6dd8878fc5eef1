"""The mark of a log whose sections were all validated before they were written."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.store.log import recovery
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.stretch import Stretches
from tests.damaged_tables import DAMAGES
from tests.store.log_batches import (
    MESSAGE_SCHEMA,
    OpenLog,
    bodies,
    forget_validation,
    messages,
    sections,
    write,
)


def damaged() -> pa.RecordBatch:
    """Three messages whose bodies have decreasing offsets."""
    body = DAMAGES["back"].table("body")["body"].chunk(0).view(pa.binary())
    sound = messages(b"a", b"b", b"c")
    return sound.set_column(4, MESSAGE_SCHEMA.field(4), body)


def is_whole(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def in_place(log: CommitLog) -> bool:
    """Return True if the log returns a damaged section as it was written."""
    return not all(is_whole(section.batch) for section in sections(log))


def test_a_new_log_is_marked_and_reads_without_validating(open_log: OpenLog) -> None:
    log = open_log()
    write(log, damaged())
    assert not log.validates
    assert in_place(log)
    log.close()

    again = open_log()

    assert not again.validates
    assert in_place(again)


def test_a_log_without_the_mark_is_validated_and_stays_without(
    open_log: OpenLog, tmp_path: Path
) -> None:
    write(log := open_log(), messages(b"one"), damaged())
    log.close()
    forget_validation(tmp_path / "log")

    for _ in range(2):
        log = open_log()
        assert log.validates
        assert not in_place(log)
        log.close()
    assert not (tmp_path / "log" / recovery.VALIDATED_FILE).exists()


def test_adjacent_small_frames_are_validated_only_without_the_mark(
    open_log: OpenLog, tmp_path: Path
) -> None:
    log = open_log()
    ids = pa.array([b"\xff"]).view(pa.string())
    for _ in range(2):
        write(log, messages(b"a").set_column(1, MESSAGE_SCHEMA.field(1), ids))
    (together,) = Stretches(log).between(0, log.end)
    assert len(together.rows[0].positions) == 2
    log.close()
    forget_validation(tmp_path / "log")

    log = open_log()
    apart = list(Stretches(log).between(0, log.end))

    assert [len(stretch.rows[0].positions) for stretch in apart] == [1, 1]


def test_a_crash_before_the_first_file_leaves_a_mark_of_no_log(
    open_log: OpenLog, tmp_path: Path
) -> None:
    def crash(step: str) -> None:
        if step == "marked_validated":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_log(fault=crash)
    mark = tmp_path / "log" / recovery.VALIDATED_FILE
    left = mark.read_bytes()
    assert list((tmp_path / "log").glob("*.log")) == []

    log = open_log()

    assert not log.validates
    assert mark.read_bytes() != left


def test_the_mark_of_another_log_is_none(open_log: OpenLog, tmp_path: Path) -> None:
    """The files of an older log were put in the place of those of a newer one."""
    old, new = tmp_path / "old", tmp_path / "new"
    write(log := open_log(old), damaged())
    log.close()
    forget_validation(old)
    open_log(new).close()
    for file in [*new.glob("*.log"), new / recovery.MARK_FILE]:
        file.unlink()
    for file in old.glob("*.log"):
        shutil.copy(file, new)

    log = open_log(new)

    assert log.validates
    assert not in_place(log)


def test_a_mark_without_its_log_is_replaced(open_log: OpenLog, tmp_path: Path) -> None:
    """All files of the log were deleted by hand, and the loss was accepted."""
    write(log := open_log(), messages(b"lost"))
    log.close()
    folder = tmp_path / "log"
    left = (folder / recovery.VALIDATED_FILE).read_bytes()
    for file in folder.glob("*.log"):
        file.unlink()
    (folder / recovery.ACCEPTED).touch()

    log = open_log()

    assert bodies(log) == []
    assert not log.validates
    assert (folder / recovery.VALIDATED_FILE).read_bytes() != left


def test_a_copied_log_has_its_mark_with_it(open_log: OpenLog, tmp_path: Path) -> None:
    write(log := open_log(), messages(b"one"))
    log.close()
    shutil.copytree(tmp_path / "log", tmp_path / "copy")

    log = open_log(tmp_path / "copy")

    assert not log.validates
    assert bodies(log) == [b"one"]


@pytest.mark.parametrize("left", [b"", b"\0\0", b"[]", b'{"crc32": "0", "seed": 1}'])
def test_a_damaged_mark_is_none(open_log: OpenLog, tmp_path: Path, left: bytes) -> None:
    open_log().close()
    (tmp_path / "log" / recovery.VALIDATED_FILE).write_bytes(left)

    assert open_log().validates
