"""Answered frames that are gone from the end of a log are missed, never taken for a torn write."""

import logging
import shutil
from pathlib import Path

import pytest

from rmq_pipeline.store.log import frame, recovery
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.store.log.recovery import LostLogError
from tests.store.log_batches import (
    OpenLog,
    bodies,
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


def test_answered_frames_that_are_gone_from_the_end_are_missed(
    open_log: OpenLog, log_file: Path
) -> None:
    log = open_log()
    write(log, messages(b"kept"))
    kept = log.end
    write(log, messages(b"answered"))
    end = log.end
    log.close()
    whole = log_file.read_bytes()

    def refused(**settings: int) -> str:
        with pytest.raises(LostLogError) as refusal:
            open_log(**settings)
        return refusal.value.message

    overwrite(log_file, PAGE + kept, bytes(end - kept))
    place = f"{log_file} ends at position {kept} (byte {PAGE + kept})"
    assert f"{place}, {end - kept} bytes before what was on disk and answered" in refused()

    overwrite(log_file, 0, whole)
    flip(log_file, PAGE + kept + 300)
    assert place in refused()

    overwrite(log_file, 0, whole)
    log = open_log()
    assert bodies(log) == [b"kept", b"answered"]


def test_what_dispatch_has_read_and_is_gone_is_missed(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    write(log, messages(b"kept"))
    kept = log.end
    for i in range(3):
        write(log, messages(b"%d" % i))
    end = log.end
    log.close()

    overwrite(log_file, PAGE + kept, bytes(end - kept))
    forget_mark(log_file.parent)

    with pytest.raises(
        LostLogError, match=f"from position {kept} .*dispatch has read {end - kept}"
    ):
        open_log(dispatched_position=end)


def test_a_file_that_was_cut_off_is_missed_without_a_mark(
    open_log: OpenLog, log_file: Path
) -> None:
    log = open_log()
    write(log, messages(b"kept"))
    kept = log.end
    write(log, messages(random_body(9_000)))
    log.close()
    whole = log_file.read_bytes()
    forget_mark(log_file.parent)

    log_file.write_bytes(whole[: PAGE + kept + 4096 - (PAGE + kept) % 4096])
    with pytest.raises(LostLogError, match=f"position {kept} .*, in a frame of which .* cut off"):
        open_log()

    log_file.write_bytes(whole[: PAGE + kept + 30])
    with pytest.raises(LostLogError, match="what was behind is not known"):
        open_log()


def test_a_file_of_any_size_is_sound(
    open_log: OpenLog, log_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 100_003
    with monkeypatch.context() as of_an_older_version:
        of_an_older_version.setattr(
            "rmq_pipeline.store.log.log_file.whole_pages", lambda size: size
        )
        log = open_log(file_bytes=size)
    assert log_file.stat().st_size == size
    write(log, messages(b"answered"))
    killed = tmp_path / "killed"
    shutil.copytree(log_file.parent, killed)
    log.close()
    forget_mark(log_file.parent)

    for folder in (killed, log_file.parent):
        assert bodies(open_log(folder)) == [b"answered"]


def test_new_files_are_whole_pages(open_log: OpenLog, log_file: Path) -> None:
    open_log(file_bytes=100_003)
    assert log_file.stat().st_size == 25 * PAGE


def test_a_last_file_that_is_gone_is_missed(open_log: OpenLog, log_file: Path) -> None:
    log = open_log()
    for i in range(6):
        write(log, messages(random_body(20_000, seed=i)))
    log.close()
    files = sorted(log_file.parent.glob("*.log"))

    files[-1].unlink()
    with pytest.raises(LostLogError, match="before what was on disk"):
        open_log()

    for file in files[:-1]:
        file.unlink()
    with pytest.raises(LostLogError, match="all its files are gone"):
        open_log()


def test_a_loss_that_is_accepted_is_told_and_the_log_goes_on(
    open_log: OpenLog, log_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    write(log, messages(b"kept"))
    kept = log.end
    write(log, messages(b"lost"))
    log.close()
    overwrite(log_file, PAGE + kept, bytes(64))
    accepted = log_file.parent / recovery.ACCEPTED
    accepted.touch()

    with caplog.at_level(logging.ERROR):
        log = open_log()

    assert "answered frames are lost" in caplog.text
    assert not accepted.exists(), "it would be accepted the next time, too"
    assert bodies(log) == [b"kept"]
    write(log, messages(b"next"))
    log.close()
    log = open_log()
    assert bodies(log) == [b"kept", b"next"]


def test_an_accepted_loss_of_what_dispatch_has_read_stays_accepted(
    open_log: OpenLog, log_file: Path
) -> None:
    log = open_log()
    write(log, messages(b"kept"))
    kept = log.end
    write(log, messages(b"lost"))
    end = log.end
    log.close()
    overwrite(log_file, PAGE + kept, bytes(end - kept))
    (log_file.parent / recovery.ACCEPTED).touch()
    open_log(dispatched_position=end).close()

    # Nothing is written, so that the gap is as it was.
    for _ in range(2):
        open_log(dispatched_position=end).close()

    log = open_log(dispatched_position=end)
    write(log, messages(b"next"))
    after = log.end
    log.close()
    overwrite(log_file, PAGE + end, bytes(after - end))
    with pytest.raises(LostLogError, match=f"dispatch has read {after - kept} bytes"):
        open_log(dispatched_position=after)


def test_a_mark_is_never_beyond_what_is_on_disk(open_log: OpenLog, log_file: Path) -> None:
    log = open_log(flush="async")
    write(log, messages(b"synced"))
    log.sync()
    synced = log.end
    write(log, messages(b"not synced"))
    log.refill_reserve()

    header = frame.unpack_file_header(memoryview(log_file.read_bytes()[:PAGE]))
    assert header is not None
    for seed, expected in ((header.seed, synced), (header.seed + 1, 0)):
        mark = recovery.SyncedMark(log_file.parent)
        assert mark.read(seed=seed) == expected
        mark.close()


def test_what_a_failed_sync_left_is_written_again_before_the_log_goes_on(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(flush="async")
    write(log, messages(b"synced"))
    log.sync()
    synced = log.end
    write(log, messages(b"answered"))
    end = log.end
    log._break("Syncing", OSError("the disk"))
    log.close()
    written: list[tuple[int, int]] = []
    rewrite = LogFile.rewrite

    def note(file: LogFile, start: int, stop: int) -> None:
        written.append((start, stop))
        rewrite(file, start, stop)

    monkeypatch.setattr(LogFile, "rewrite", note)
    log = open_log(flush="async")

    assert written == [(synced, end)]
    assert bodies(log) == [b"synced", b"answered"]
