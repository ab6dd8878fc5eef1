"""Checks of a commit log at start, and of a closed one: sound, torn at the end, or damaged.

Only frames from the dispatched position on are checked, never the whole history. Damage in an older
frame is found when it is read. A bad frame is cut only at the end of the last file: its write was
never acknowledged (or, with flush = async, not yet synced). DuckDB's position, the synced mark and
the frames themselves tell which frames were acknowledged. If such frames are missing, the broker
refuses to start and says how much is lost.
"""

import logging
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline import durable_files
from rmq_pipeline.errors import CorruptLogError, HomeFormatError, StoreFullError
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.frame import HEADER_BYTES, FrameHeader, crc32
from rmq_pipeline.store.log.log_file import LogFile

#: File in the log's folder: the next start proceeds once although acknowledged frames are lost.
ACCEPTED: Final = "accept_loss"
#: The search for the last frame before a position begins this far back, and then grows by the
#: factor.
_LOOK_BACK_BYTES: Final = 64 << 10
_LOOK_FURTHER: Final = 16
_LOGGER = logging.getLogger(__name__)
#: File in the log's folder: the synced mark, and then the position before which a loss of frames
#: was accepted, if any.
MARK_FILE: Final = "synced"
#: File in the log's folder: every section of the log was validated before it was written.
VALIDATED_FILE: Final = "validated"
#: File in the log's folder: frames from a position on are being taken over from the log's store.
PULLING_FILE: Final = "pulling.json"
_MAGIC: Final = b"RMQSYNC1"
_ACCEPTED: Final = b"RMQLOST1"
_MARK: Final = struct.Struct("<8sQQ")
_CRC: Final = struct.Struct("<I")
_SIZE: Final = _MARK.size + _CRC.size


class SyncedMark:
    """The small file of an open log that records up to which position the log was synced.

    The log alone cannot tell damage at its end from a torn write. The mark is written at intervals
    and at close, after the log was synced up to it. The mark itself is not synced: after a power
    cut it may be older, but never too new. For one thread at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / MARK_FILE
        self._descriptor = -1
        self._seed = 0
        self._written = 0
        #: The operator has accepted that frames before this position are lost; 0 for none.
        self.accepted = 0

    def read(self, *, seed: int) -> int:
        """Return the position, 0 without a mark of this log. Call once, before ``write``.

        Args:
            seed: seed of the log's files.
        """
        self._seed = seed
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = os.pread(self._descriptor, 2 * _SIZE, 0)
        self._written = _marked(data[:_SIZE], magic=_MAGIC, seed=seed)
        self.accepted = _marked(data[_SIZE:], magic=_ACCEPTED, seed=seed)
        return self._written

    def write(self, position: int) -> None:
        """Record that the log before a position is on disk; a failed write keeps the older mark."""
        if position != self._written:
            with suppress(OSError):
                os.pwrite(
                    self._descriptor, _packed_mark(_MAGIC, seed=self._seed, position=position), 0
                )
                self._written = position

    def sync(self) -> None:
        """Sync the file.

        Raises:
            OSError: the sync failed.
        """
        os.fsync(self._descriptor)

    def accept(self, position: int) -> None:
        """Record that frames before a position are lost; synced when this returns.

        Raises:
            OSError: the write failed.
        """
        os.pwrite(
            self._descriptor, _packed_mark(_ACCEPTED, seed=self._seed, position=position), _SIZE
        )
        os.fsync(self._descriptor)
        self.accepted = position

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _packed_mark(magic: bytes, *, seed: int, position: int) -> bytes:
    data = _MARK.pack(magic, seed, position)
    return data + _CRC.pack(crc32(data))


def _marked(data: bytes, *, magic: bytes, seed: int) -> int:
    """Decode the position of a record; 0 if it is missing, damaged, or from another log."""
    if len(data) < _SIZE or _CRC.unpack_from(data, _MARK.size) != (crc32(data[: _MARK.size]),):
        return 0
    found, of_seed, position = _MARK.unpack_from(data)
    return int(position) if (found, of_seed) == (magic, seed) else 0


def mark_validated(folder: Path, *, seed: int) -> None:
    """Record that all sections of the log with this seed were validated before they were written.

    Call before the log's first file is created. A crash in between leaves a mark of no log: the
    next log has another seed.

    Raises:
        StoreFullError: the disk is full.
        OSError: the write failed for another reason.
    """
    try:
        durable_files.replace(folder / VALIDATED_FILE, durable_files.dump_json({"seed": seed}))
    except OSError as error:
        if error.errno not in log_file.FULL:
            raise
        raise StoreFullError("The disk has no space for a new commit log.") from error


def unmark_validated(folder: Path) -> None:
    """Remove the mark of a log that was not created; the mark would be of no log, and harmless."""
    with suppress(OSError):
        (folder / VALIDATED_FILE).unlink()


def is_validated(folder: Path, *, seed: int) -> bool:
    """Return True if the log with this seed has its mark; a damaged mark counts as none."""
    try:
        found = durable_files.load_json((folder / VALIDATED_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return found.get("seed") == seed


@contextmanager
def pulling(folder: Path, *, start: int) -> Iterator[None]:
    """Mark frames from a position on as taken over from the store, until all are on disk.

    Their headers say what another home had synced. After a power cut such a frame would be taken
    for damage, so ``drop_pulled`` drops them all, and the store delivers them again.
    """
    path = folder / PULLING_FILE
    durable_files.replace(path, durable_files.dump_json({"start": start}))
    yield
    path.unlink()
    durable_files.sync(folder)


def drop_pulled(folder: Path, *, schemas: Mapping[int, pa.Schema]) -> None:
    """Drop the frames of a ``pulling`` that has not ended.

    Raises:
        CorruptLogError: the mark or a file header is damaged.
    """
    path = folder / PULLING_FILE
    try:
        start = int(durable_files.load_json(path.read_bytes())["start"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError) as error:
        raise CorruptLogError(
            f"{path} is damaged: {error}.", remedy="Start with an empty home."
        ) from error
    files = sorted(folder.glob(f"*{log_file.SUFFIX}"))
    kept = [file for file in files if int(file.stem) <= start]
    for file in files[len(kept) :]:
        file.unlink()
    if kept:
        last = LogFile.open(kept[-1], schemas=schemas)
        try:
            last.zero(start, max(start, last.written_end(start)))
        finally:
            last.finish()
    durable_files.sync(folder)
    path.unlink()
    durable_files.sync(folder)
    _LOGGER.warning("dropped frames that were not taken over completely: position=%d", start)


class LostLogError(CorruptLogError):
    """Acknowledged frames of the commit log are missing."""

    remedy = (
        "Restore the log's files from a copy, or a backup (`rmq restore`). To start once without "
        "the lost frames, create an empty file accept_loss next to these files and start again."
    )


def open_files(folder: Path, *, schemas: Mapping[int, pa.Schema]) -> list[LogFile]:
    """Open the files of a folder in log order, and delete unfinished files of a crash.

    Raises:
        CorruptLogError: a file header is damaged, or a file is missing between two others.
        HomeFormatError: a newer version wrote a file.
    """
    for unfinished in folder.glob(f"*{log_file.UNFINISHED_SUFFIX}"):
        unfinished.unlink()
    paths = sorted(folder.glob(f"*{log_file.SUFFIX}"))
    with ExitStack() as on_failure:
        files: list[LogFile] = []
        for path in paths:
            files.append(LogFile.open(path, schemas=schemas))
            on_failure.callback(files[-1].finish)
        _check_continuous(files)
        on_failure.pop_all()
    for file in files[:-1]:
        file.finish()
    return files


def _check_continuous(files: list[LogFile]) -> None:
    for file, following in pairwise(files):
        if following.seed != file.seed:
            raise following.damage(following.base, "a file of another log")
        if following.base > file.capacity_end:
            raise file.damage(
                file.capacity_end, f"the log goes on only in {following.path.name}: a file is gone"
            )


def check_new(folder: Path, *, dispatched_position: int) -> None:
    """Check that a log without files is a new one.

    Raises:
        CorruptLogError: the log had files.
    """
    if dispatched_position:
        raise CorruptLogError(
            f"{folder}: dispatch has reached {dispatched_position}, but there is no log file."
        )
    mark = folder / MARK_FILE
    if mark.exists() and mark.stat().st_size:
        loss_of(folder, f"{folder} had a log, and all its files are gone")


def sound_end(files: list[LogFile], *, dispatched_position: int, mark: SyncedMark) -> int:
    """Check all frames from the dispatched position on, and cut a torn tail; return the log's end.

    Args:
        mark: the position up to which the log was known to be on disk; set to the end of the log.

    Raises:
        CorruptLogError: a frame is bad, and not at the very end.
        LostLogError: acknowledged frames are missing.
    """
    _check_reaches(files, dispatched_position)
    for file, following in pairwise(files):
        if following.base > dispatched_position:
            start = max(file.base, dispatched_position)
            end, damage = _walk(file, start=start, stop=following.base)
            if end != following.base:
                raise damage or file.damage(end, "a frame reaches into the next file")
    last = files[-1]
    start = max(last.base, dispatched_position)
    marked_position = mark.read(seed=last.seed)
    _check_dispatched(last, start, mark=mark)
    # Determine the end before reading frames. A mapped read makes the kernel cache the empty part
    # of the file. SEEK_DATA then reports that part as data, and it must be searched byte by byte.
    written_end = last.written_end(start)
    end, damage = _walk(last, start=start, stop=written_end)
    if damage is not None:
        _check_torn(last, end, written_end=written_end, damage=damage)
    _check_known(last, end, marked_position=marked_position)
    if damage is not None:
        _cut(last, end, written_end=written_end)
    last.rewrite(_synced(last, start=start, end=end), end)
    last.sync()
    last.release()
    mark.write(end)
    accepted = last.path.parent / ACCEPTED
    if accepted.exists():
        mark.sync()  # after a crash here, the operator would have to accept the loss again
        accepted.unlink()
    return end


def _check_dispatched(file: LogFile, end: int, *, mark: SyncedMark) -> None:
    """Check that the last dispatched frame exists: one that ends at position ``end``.

    An accepted loss stays accepted: until new frames are written, each start finds the same gap.
    """
    if end in (file.base, mark.accepted) or ending_at(file, end) is not None:
        return
    sound = file.base
    while (header := file.frame_at(sound)) is not None and sound + header.length <= end:
        sound += header.length
    loss_of(
        file.path.parent,
        f"{file.path} is damaged or cut off from position {sound} "
        f"(byte {file.offset_of(sound)}) on, and dispatch has read {end - sound} bytes beyond it",
    )
    mark.accept(end)


def ending_at(file: LogFile, end: int) -> FrameHeader | None:
    """Return the frame that ends at a position; None if there is none."""
    reach = _LOOK_BACK_BYTES
    while True:
        start = max(file.base, end - reach)
        first = file.frame_at(start)
        for header in [*([first] if first else []), *file.frames_after(start, end)]:
            if header.position + header.length == end:
                return header
        if start == file.base:
            return None
        reach *= _LOOK_FURTHER


def _check_known(file: LogFile, end: int, *, marked_position: int) -> None:
    """Check that no acknowledged frame is missing after ``end``, where the sound frames end."""
    place = f"{file.path} ends at position {end} (byte {file.offset_of(end)})"
    header = file.frame_at(end)
    if end < marked_position:
        lost = marked_position - end
        loss_of(file.path.parent, f"{place}, {lost} bytes before what was on disk and answered")
    elif header is not None and end + header.length > file.capacity_end:
        lost = end + header.length - file.capacity_end
        loss_of(file.path.parent, f"{place}, in a frame of which {lost} bytes were cut off")
    elif end + HEADER_BYTES > file.capacity_end and file.written_end(end) > end:
        # No frame begins where its header does not fit. The file size proves nothing: any is
        # allowed.
        loss_of(file.path.parent, f"{place}; it was cut off, and what was behind is not known")


def loss_of(folder: Path, what: str) -> None:
    """Refuse to start without acknowledged frames, unless the operator has accepted the loss.

    Raises:
        LostLogError: the loss was not accepted.
    """
    accepted = folder / ACCEPTED
    if accepted.exists():
        _LOGGER.error("answered frames are lost, as %s accepts: %s", accepted, what)
        return
    raise LostLogError(f"Answered frames are gone: {what}.")


def _synced(file: LogFile, *, start: int, end: int) -> int:
    """Return the position up to which the last frame of [start, end) says the log was synced."""
    position = synced = start
    while position < end:
        header = file.frame_at(position)
        assert header is not None, "a frame that was sound a moment ago"
        synced = max(start, min(header.synced, position))
        position += header.length
    return synced


def _check_reaches(files: list[LogFile], dispatched_position: int) -> None:
    first, last = files[0], files[-1]
    if dispatched_position < first.base:
        raise first.damage(
            first.base, f"dispatch has reached only {dispatched_position}, but the log begins"
        )
    if dispatched_position > last.capacity_end:
        raise last.damage(
            last.capacity_end, f"dispatch has reached {dispatched_position}, but the log ends"
        )


def _walk(file: LogFile, *, start: int, stop: int) -> tuple[int, CorruptLogError | None]:
    """Check frame after frame; return the end of the sound ones, and the damage there if any."""
    position = start
    while position < stop:
        try:
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
        except CorruptLogError as damage:
            # The traceback would keep the file open until the next garbage collection.
            return position, damage.with_traceback(None)
        position = end
    return position, None


def _check_torn(file: LogFile, end: int, *, written_end: int, damage: CorruptLogError) -> None:
    """Check that no later frame proves that the log was synced beyond ``end``."""
    found = file.frames_after(end, written_end)
    if any(frame.synced > end for frame in found):
        raise CorruptLogError(
            f"{damage.message} Sound frames follow it, so it is not a torn write."
        )


def _cut(file: LogFile, end: int, *, written_end: int) -> None:
    """Overwrite everything after the last sound frame by zeros."""
    if written_end > end:
        _LOGGER.warning(
            "cut a torn write: file=%s position=%d bytes=%d", file.path, end, written_end - end
        )
        file.zero(end, written_end)


def damaged_log_files(
    folder: Path, schemas: Mapping[int, pa.Schema], *, dispatched: int
) -> Iterator[tuple[Path, str | None]]:
    """Compare every section of every log file with its checksum.

    Args:
        folder: folder of the log.
        schemas: schemas of the kinds whose payloads omit the schema.
        dispatched: a log position that the log had reached.

    Yields:
        Each file, and why it is damaged, or None if it is sound. A torn write at the very end
        counts as sound: it was never acknowledged, and the next start cuts it.
    """
    paths = sorted(folder.glob("*.log"))
    for path, following in zip(paths, [*paths[1:], None], strict=True):
        try:
            file = LogFile.open(path, schemas=schemas)
        except (CorruptLogError, HomeFormatError, OSError, ValueError) as error:
            yield path, str(getattr(error, "message", error))
            continue
        try:
            stop = int(following.stem) if following else None
            yield path, _damage(file, stop=stop, dispatched=dispatched)
        finally:
            file.finish()


def _damage(file: LogFile, *, stop: int | None, dispatched: int) -> str | None:
    """Return why a file is damaged; ``stop`` is the base of the next file, None for the last."""
    position = file.base
    try:
        while position < (file.capacity_end if stop is None else stop):
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
            position = end
    except CorruptLogError as error:
        written_end = file.written_end(position)
        is_torn = stop is None and position >= dispatched
        if is_torn and not any(
            each.synced > position for each in file.frames_after(position, written_end)
        ):
            return None
        return error.message
    if stop is not None and position != stop:
        return f"a frame reaches beyond position {stop}, where the next file goes on"
    return None
