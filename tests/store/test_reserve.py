"""On a full disk sends are refused, the rest goes on with the reserve, and all of it comes back."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.reserve import Reserve
from tests.store.log_batches import EVENTS, OpenLog, bodies, events, messages, random_body, write

MIB = 1 << 20
SIZES = {"file_bytes": MIB, "reserve_bytes": 2 * MIB}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    command = [mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small tmpfs here: {done.stderr.strip()}")
    yield disk
    # Lazily: a mapping that is still alive keeps the mount busy.
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fits(log: CommitLog, batch: pa.RecordBatch, *, use_reserve: bool) -> bool:
    try:
        write(log, batch, use_reserve=use_reserve)
    except StoreFullError:
        log.discard()
        return False
    return True


def send_until_full(log: CommitLog) -> list[bytes]:
    """Send until it is refused; what was answered."""
    sent = [random_body(300_000)]
    while fits(log, messages(sent[-1]), use_reserve=False):
        sent.append(random_body(300_000, seed=len(sent)))
    return sent[:-1]


def receive_until_full(log: CommitLog) -> int:
    """Commit events with the reserve until it is used up; how many frames."""
    frames = 0
    while fits(log, events(1000), use_reserve=True):
        frames += 1
    return frames


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.chaos
def test_sends_are_refused_and_the_rest_goes_on_until_the_reserve_is_used_up(
    small_disk: Path, open_log: OpenLog
) -> None:
    folder = small_disk / "log"
    log = open_log(folder, **SIZES)
    assert (folder / "reserve").stat().st_size == 2 * MIB

    sent = send_until_full(log)
    full_at = log.end
    received = receive_until_full(log)

    # Six files of 1 MiB, three bodies each; then the reserve, an eighth at a time.
    assert len(sent) >= 15
    assert (log.end - full_at) > MIB
    assert received > 20
    assert (folder / "reserve").stat().st_size < MIB // 4
    with pytest.raises(StoreFullError, match="used up"):
        write(log, events(1000), use_reserve=True)
    log.discard()
    with pytest.raises(StoreFullError, match="is kept for receive"):
        write(log, events(1))
    log.discard()
    assert bodies(log) == sent
    log.close()
    log = open_log(folder, **SIZES)
    assert bodies(log) == sent
    assert sum(len(found) for _, found in log.frames(full_at, log.end)) == received


@pytest.mark.chaos
def test_the_log_goes_on_when_room_is_back(small_disk: Path, open_log: OpenLog) -> None:
    folder = small_disk / "log"
    log = open_log(folder, **SIZES)
    send_until_full(log)
    receive_until_full(log)
    assert not log.refill_reserve()

    log.drop_before(log.end)

    assert log.refill_reserve()
    assert (folder / "reserve").stat().st_size == 2 * MIB
    kept = log.end
    again = send_until_full(log)
    assert bodies(log, kept) == again
    assert len(again) >= 6


@pytest.mark.chaos
def test_a_refused_commit_leaves_everything_as_it_was(small_disk: Path, open_log: OpenLog) -> None:
    folder = small_disk / "log"
    log = open_log(folder, **SIZES)
    send_until_full(log)
    end, files = log.end, names(folder)

    position = log.stage(EVENTS, events(20_000))
    with pytest.raises(StoreFullError):
        log.commit()

    assert (log.end, names(folder)) == (end, files)
    assert log.staged_bytes() > 0
    # What is staged is still there, at the same place, for whoever may use the reserve.
    assert log.commit(use_reserve=True) > end
    assert log.read(position).batch.equals(events(20_000))


@pytest.mark.chaos
def test_room_can_be_asked_for_before_anything_is_decided(
    small_disk: Path, open_log: OpenLog
) -> None:
    log = open_log(small_disk / "log", **SIZES)
    send_until_full(log)

    with pytest.raises(StoreFullError):
        log.make_room(frame_bytes=400_000, use_reserve=False)
    log.make_room(frame_bytes=400_000, use_reserve=True)

    write(log, events(1), use_reserve=True)
    with pytest.raises(StoreFullError, match="is kept for receive"):
        log.make_room(frame_bytes=1, use_reserve=False)


@pytest.mark.chaos
def test_upkeep_can_have_a_part_of_the_reserve(small_disk: Path, open_log: OpenLog) -> None:
    folder = small_disk / "log"
    log = open_log(folder, **SIZES)
    (small_disk / "others").write_bytes(bytes(5 * MIB - 64 * 1024))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "segment.parquet").write_bytes(bytes(MIB))

    log.draw_reserve(MIB)

    (small_disk / "segment.parquet").write_bytes(bytes(MIB))
    with pytest.raises(StoreFullError):
        write(log, events(1))
    log.discard()
    with pytest.raises(StoreFullError):
        log.draw_reserve(2 * MIB)
    for path in (small_disk / "segment.parquet", small_disk / "others"):
        path.unlink()
    assert log.refill_reserve()
    write(log, events(1))


@pytest.mark.chaos
def test_a_log_on_a_full_disk_opens_without_its_reserve(
    small_disk: Path, open_log: OpenLog
) -> None:
    folder = small_disk / "log"
    log = open_log(folder, **SIZES)
    write(log, messages(b"a"))
    log.close()
    (folder / "reserve").unlink()
    (small_disk / "others").write_bytes(bytes(6 * MIB))

    log = open_log(folder, **SIZES)

    assert bodies(log) == [b"a"]
    with pytest.raises(StoreFullError):
        write(log, messages(b"b"))
    log.commit(use_reserve=True)
    assert bodies(log) == [b"a", b"b"]


@pytest.mark.chaos
def test_no_room_for_a_first_file_leaves_nothing_behind(
    small_disk: Path, open_log: OpenLog
) -> None:
    with pytest.raises(StoreFullError):
        open_log(small_disk / "log", file_bytes=16 * MIB)

    assert names(small_disk / "log") == ["reserve"]


@pytest.mark.chaos
def test_no_room_for_the_mark_of_a_new_log_is_a_full_disk(
    small_disk: Path, open_log: OpenLog
) -> None:
    folder, others = small_disk / "log", small_disk / "others"
    folder.mkdir()
    with others.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(MIB)):
            pass

    with pytest.raises(StoreFullError):
        open_log(folder)
    left = [path for path in names(folder) if path != "reserve"]
    others.unlink()

    assert left == []
    assert not open_log(folder).validates


def test_the_reserve_follows_its_setting(tmp_path: Path) -> None:
    for wanted_bytes in (MIB, 2 * MIB, MIB // 2, 0):
        reserve = Reserve(tmp_path, wanted_bytes=wanted_bytes)
        found = (tmp_path / "reserve").stat()
        assert reserve.whole
        assert found.st_size == wanted_bytes
        assert found.st_blocks * 512 >= wanted_bytes
        reserve.close()


def test_a_copied_reserve_without_blocks_is_made_again(tmp_path: Path) -> None:
    with (tmp_path / "reserve").open("wb") as file:
        file.truncate(MIB)

    reserve = Reserve(tmp_path, wanted_bytes=MIB)

    assert reserve.whole
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= MIB
    reserve.close()
