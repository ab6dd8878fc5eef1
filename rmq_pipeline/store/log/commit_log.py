"""The commit log: frames of Arrow record batches, each on disk before it is acknowledged.

A log position counts the bytes of all frames ever written. A file is named after its base, the
position of its first frame. Position p is at byte 4096 + p - base of the file. The base of the next
file is the end of the last frame, so positions are dense. The position of a frame does not depend
on its file, and is known before it is written. A frame never spans files; a frame larger than a
file gets a file of its own. See frame.py for the bytes, recovery.py for the start.

One thread stages and one thread writes: a frame may be staged while the previous frame is written.
Any thread may read positions before ``end``. Files are preallocated, so a full disk shows when a
new file is needed. Operations that may not use the reserve are then refused until
the disk has space for a whole file and ``refill_reserve`` succeeds. Dispatch and seal may use free
space smaller than a file; their work allows old files to be deleted.
"""

import logging
import secrets
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self, TypeAlias

import pyarrow as pa

from rmq_pipeline import durable_files
from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.store.log import frame, log_file, recovery
from rmq_pipeline.store.log.frame import SectionHeader
from rmq_pipeline.store.log.frame_builder import FrameBuilder, Payload
from rmq_pipeline.store.log.log_file import FULL, LogFile
from rmq_pipeline.store.log.recovery import SyncedMark
from rmq_pipeline.store.log.reserve import Reserve
from rmq_pipeline.tables import mended

__all__ = ["CommitLog", "FaultPoint", "Section"]

#: Called with the name of each step of a commit; crash tests end the process in it.
FaultPoint: TypeAlias = Callable[[str], None]

#: The cache of decoded sections is limited to this size.
_KEPT_BYTES: Final = 64 << 20
_LOGGER = logging.getLogger(__name__)

#: Memory of the Python and Arrow objects of a decoded batch, independent of its size.
_OVERHEAD_BYTES: Final = 8192
#: After reading this much, release the mapped pages of all files; per file they would add up.
_MAPPED_BYTES: Final = 32 << 20
#: Bytes that the kernel maps around a touched page.
_FAULT_AROUND_BYTES: Final = 64 << 10


class Section(NamedTuple):
    """One Arrow record batch inside a frame."""

    #: Log position; together with a row number it identifies a message permanently.
    position: int
    #: 1 messages, 2 events, 3 keyed state.
    kind: int
    #: Zero copy over the mapped file.
    batch: pa.RecordBatch


class SectionReader:
    """Decodes sections and caches them. Thread-safe.

    Args:
        schemas: schemas of the kinds whose payloads omit the schema.
        kept_bytes: size of the cache of ``read``; the least recently used section is evicted first.
    """

    def __init__(self, schemas: Mapping[int, pa.Schema], *, kept_bytes: int) -> None:
        self._schemas = schemas
        #: False: all sections were validated before they were written.
        self.validates = True
        self._budget_bytes = kept_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Section, int]] = OrderedDict()
        #: Files read from, and the bytes read since their pages were released. Decoded batches are
        #: mapped, so a file may be read again at any time.
        self._mapped: set[LogFile] = set()
        self._mapped_bytes = 0

    def kept(self, position: int) -> Section | None:
        """Return the section at a position if it is cached, else None."""
        with self._lock:
            found = self._kept.get(position)
            if found is None:
                return None
            self._kept.move_to_end(position)
            return found[0]

    def read(self, file: LogFile, position: int) -> Section:
        """Return the section at a position of a file, and cache it.

        Raises:
            CorruptLogError: no sound section is there.
        """
        header = file.section_at(position)
        section = self._decode(file, header)
        cost = header.length + _OVERHEAD_BYTES
        with self._lock:
            _, before = self._kept.pop(position, (section, 0))
            self._kept[position] = (section, cost)
            self._used_bytes += cost - before
            while self._used_bytes > self._budget_bytes:
                self._used_bytes -= self._kept.popitem(last=False)[1][1]
        return section

    def frame(self, file: LogFile, position: int) -> tuple[int, list[Section]]:
        """Return the end of the frame at a position, and its sections; they are not cached.

        Raises:
            CorruptLogError: the frame is damaged.
        """
        end, headers = file.frame_sections(position)
        return end, [self._decode(file, header) for header in headers]

    def forget_before(self, position: int) -> None:
        """Evict the sections before a position, and unmap their files."""
        with self._lock:
            for old in [kept for kept in self._kept if kept < position]:
                self._used_bytes -= self._kept.pop(old)[1]
        self._mapped = {file for file in tuple(self._mapped) if file.base >= position}

    def _decode(self, file: LogFile, header: SectionHeader) -> Section:
        payload = file.payload(header)
        self._mapped.add(file)
        self._mapped_bytes += header.length + _FAULT_AROUND_BYTES
        if self._mapped_bytes > _MAPPED_BYTES:
            self._let_pages_go()
        try:
            batch = frame.decode(payload, file.schemas.get(header.kind))
        except pa.ArrowInvalid as error:
            raise file.damage(header.position, f"a section that is no Arrow ({error})") from error
        if self.validates:
            batch = _mended(batch, header)
        if (schema := self._schemas.get(header.kind)) is not None:
            batch = frame.completed(batch, schema)
        return Section(header.position, header.kind, batch)

    def _let_pages_go(self) -> None:
        self._mapped_bytes = 0
        for file in tuple(self._mapped):
            file.release()


def _mended(batch: pa.RecordBatch, header: SectionHeader) -> pa.RecordBatch:
    """Replace damaged values: older versions stored tables without validating them on send."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        whole = mended(batch)
        if whole is not batch:
            _LOGGER.warning("the section at %d has damaged values: %s", header.position, error)
        return whole
    return batch


class CommitLog:
    """An open commit log; the module docstring describes its layout and its threads."""

    def __init__(
        self,
        folder: Path,
        *,
        schemas: Mapping[int, pa.Schema],
        file_bytes: int,
        reserve_bytes: int,
        sync_commits: bool,
        fault: FaultPoint | None,
    ) -> None:
        self._folder = folder
        #: Schemas of the kinds whose payloads omit the schema.
        self.schemas = dict(schemas)
        self._file_bytes = log_file.whole_pages(file_bytes)
        self._sync_commits = sync_commits
        self._fault = fault
        self._files: tuple[LogFile, ...] = ()
        #: Held to change the list of files, and while a file is synced.
        self._files_lock = threading.Lock()
        self._reader = SectionReader(self.schemas, kept_bytes=_KEPT_BYTES)
        self._broken: str | None = None
        self._closed = False
        self._reserve = Reserve(folder, wanted_bytes=reserve_bytes)
        self._mark = SyncedMark(folder)
        #: All frames before ``end`` are complete, those before ``synced`` are on disk.
        self.end = self.synced = 0
        self.building = FrameBuilder(self.schemas, seed=0, start=0)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        schemas: Mapping[int, pa.Schema],
        file_bytes: int,
        reserve_bytes: int,
        flush: Literal["sync", "async"] = "sync",
        dispatched_position: int = 0,
        fault: FaultPoint | None = None,
    ) -> Self:
        """Open the log of a folder, or create it.

        Check every frame from the dispatched position to the end, and cut a torn write at the end.
        Everything that remains is on disk when this returns. A new log is marked as validated: all
        batches that are staged must have been validated.

        Args:
            schemas: the kinds with a fixed schema; sections of other kinds contain theirs.
            dispatched_position: the start of the first frame that was not dispatched.

        Raises:
            CorruptLogError: a frame is damaged or missing; the error names the place.
            HomeFormatError: a newer version wrote the log.
            StoreFullError: the log is new, and its first file does not fit on the disk.
            StorageError: the disk failed.
        """
        try:
            durable_files.make_folder(folder)
            log = cls(
                folder,
                schemas=schemas,
                file_bytes=file_bytes,
                reserve_bytes=reserve_bytes,
                sync_commits=flush == "sync",
                fault=fault,
            )
            try:
                log._recover(dispatched_position)
            except BaseException:
                log._let_go()
                raise
        except OSError as error:
            raise StorageError(f"Opening the commit log in {folder} failed: {error}.") from error
        return log

    @property
    def first(self) -> int:
        """Position of the first retained frame."""
        return self._files[0].base

    @property
    def validates(self) -> bool:
        """Return True if sections are validated on reading: an older version created the log."""
        return self._reader.validates

    def stage(self, kind: int, batch: pa.RecordBatch) -> int:
        """Add a batch to the frame being built, and return the position of its section.

        Raises:
            ValueError: the batch does not have its kind's schema, or the frame would exceed 1 GiB;
                nothing was staged.
        """
        self._check()
        return self.building.stage(kind, batch)

    def stage_payload(self, kind: int, payload: Payload) -> int:
        """Stage a batch that is already serialized with the schema of its kind."""
        self._check()
        return self.building.stage_payload(kind, payload)

    def staged_bytes(self) -> int:
        """Return the length of the frame being built; 0 if nothing is staged."""
        return self.building.length

    def discard(self) -> None:
        """Discard the staged sections."""
        self.building.clear()

    def commit(self, *, use_reserve: bool = False) -> int:
        """Write the staged sections, if any, as one frame; return the end of the log.

        Raises:
            StoreFullError: the disk is full; the sections stay staged, unless the log is broken.
            StorageError: the write failed.
        """
        self._check()
        if self.building.length:
            self.make_room(frame_bytes=self.building.length, use_reserve=use_reserve)
            self.write(self.take())
        return self.end

    def take(self) -> FrameBuilder:
        """Return the staged frame and begin the next one; frames must be written in this order."""
        taken = self.building
        if taken.length:
            self._step("staged")
        self.building = taken.following()
        return taken

    def write(self, taken: FrameBuilder) -> None:
        """Write a frame with one system call; with flush = sync it is on disk when this returns.

        Raises:
            StorageError: the write failed. It is not retried, and the log refuses later frames:
                close this log and open it again.
            StoreFullError: the write failed because the disk is full; the same holds.
        """
        self._check()
        if not taken.length:
            return
        if taken.start != self.end or taken.start + taken.length > self._files[-1].capacity_end:
            raise self._break("Writing to the commit log", ValueError("a frame without its place"))
        self._step("before_write")
        try:
            self._files[-1].write_whole(
                taken.buffers(synced=self.synced),
                position=taken.start,
                length=taken.length,
                dsync=self._sync_commits,
                halfway=(lambda: self._step("half_written")) if self._fault else None,
            )
        except OSError as error:
            broken, full = self._break("Writing to the commit log", error), error.errno in FULL
            raise (StoreFullError("The disk is full.") if full else broken) from error
        self._step("written")
        self.end += taken.length
        if self._sync_commits:
            self.synced = self.end

    def needs_file(self, frame_bytes: int) -> bool:
        """Return True if a frame of this length would go to a new file."""
        last = self._files[-1]
        return not last.is_current or self.building.start + frame_bytes > last.capacity_end

    def make_room(self, *, frame_bytes: int, use_reserve: bool) -> None:
        """Ensure that the staged sections can be written as a frame of this length.

        Positions do not change. Called by the thread that stages. If ``needs_file`` is true, all
        frames taken so far must have been written.

        Raises:
            StoreFullError: the disk or the reserve has too little space.
        """
        self._check()
        if not use_reserve and not self._reserve.whole:
            raise StoreFullError(
                "The disk is full; the rest of the reserve is kept for receive, settle and upkeep."
            )
        if self.needs_file(frame_bytes):
            self._roll(frame_bytes, use_reserve=use_reserve)

    def draw_reserve(self, wanted_bytes: int) -> None:
        """Release a part of the reserve to the disk, for dispatch and seal. Any thread may call it.

        Raises:
            StoreFullError: the reserve has less than ``wanted_bytes``.
        """
        self._check()
        try:
            self._reserve.draw(wanted_bytes)
        except OSError as error:
            raise self._break("Drawing on the reserve", error) from error

    def refill_reserve(self) -> bool:
        """Refill the reserve if the disk also has space for a log file; True if it is whole.

        Also record how far the log is on disk. The writer thread calls it at intervals.
        """
        self._check()
        self._mark.write(self.synced)
        try:
            return self._reserve.refill(spare_bytes=self._file_bytes)
        except OSError as error:
            raise self._break("Refilling the reserve", error) from error

    def sync(self) -> None:
        """Sync all frames committed before this call. Any thread may call it.

        Raises:
            StorageError: the sync failed; it is not retried.
        """
        self._check()
        with self._files_lock:
            end = self.end
            if self.synced < end:
                try:
                    self._files[-1].sync()
                except OSError as error:
                    raise self._break("Syncing the commit log", error) from error
                # With synced commits, the writer may have moved ``synced`` further meanwhile.
                self.synced = max(self.synced, end)

    def read(self, position: int) -> Section:
        """Return the section at a position, checked against its CRC.

        Raises:
            LookupError: the position was dropped, or is not written yet.
            CorruptLogError: no sound section is there; the error names the place.
        """
        self._check()
        found = self._reader.kept(position)
        if found is None:
            found = self._reader.read(self.file_of(position), position)
            if position < self.first:  # the file was dropped meanwhile: do not keep it mapped
                self._reader.forget_before(self.first)
        return found

    def frames(self, start: int, stop: int) -> Iterator[tuple[int, list[Section]]]:
        """Yield the frames that start in [start, stop), each with its end position.

        Args:
            start: the start of a frame, or the end of the log.
            stop: limited to ``end``.

        Raises:
            LookupError: ``start`` was dropped.
            CorruptLogError: a frame is damaged; the error names the place.
        """
        position, stop = start, min(stop, self.end)
        while position < stop:
            position, sections = self._reader.frame(self.file_of(position), position)
            yield position, sections

    def drop_before(self, position: int) -> list[Path]:
        """Delete all files but the last that end at or before a position; return their paths.

        A reader that still uses such a file keeps its data until it releases the batches.
        """
        self._check()
        with self._files_lock:
            count = bisect_right([file.base for file in self._files[1:]], position)
            dropped, self._files = self._files[:count], self._files[count:]
        self._reader.forget_before(self.first)
        try:
            for file in dropped:
                file.path.unlink()
            if dropped:
                durable_files.sync(self._folder)
        except OSError as error:
            raise self._break("Deleting an old log file", error) from error
        return [file.path for file in dropped]

    def close(self) -> None:
        """Sync and release the files; batches that were read stay readable. Idempotent."""
        try:
            if self._broken is None:
                self.sync()
                self._mark.write(self.synced)
        finally:
            self._let_go()

    def _recover(self, dispatched_position: int) -> None:
        files = recovery.open_files(self._folder, schemas=self.schemas)
        if not files:
            recovery.check_new(self._folder, dispatched_position=dispatched_position)
            files = [self._create_first(secrets.randbits(32))]
        self._files = tuple(files)
        self._reader.validates = not recovery.is_validated(self._folder, seed=files[0].seed)
        end = recovery.sound_end(files, dispatched_position=dispatched_position, mark=self._mark)
        self.end = self.synced = end
        self.building = FrameBuilder(self.schemas, seed=files[0].seed, start=end)

    def _create_first(self, seed: int) -> LogFile:
        recovery.mark_validated(self._folder, seed=seed)
        self._step("marked_validated")
        try:
            return self._create(self._file_bytes, seed=seed)
        except BaseException:
            recovery.unmark_validated(self._folder)
            raise

    def _create(self, size: int, *, seed: int) -> LogFile:
        return LogFile.create(
            self._folder, base=self.end, size=size, seed=seed, schemas=self.schemas
        )

    def _roll(self, frame_bytes: int, *, use_reserve: bool) -> None:
        """Continue in a new file; sync the old one, as only the last file may have a torn end."""
        if self.building.start != self.end:
            raise ValueError("A frame before the first one of a file is not written yet.")
        self._step("before_roll")
        self.sync()
        try:
            made = self._next_file(frame_bytes, use_reserve=use_reserve)
        except OSError as error:
            raise self._break("Making a log file", error) from error
        with self._files_lock:
            old = self._files[-1]
            old.finish()
            # A file without a frame has the same base and name: the new file replaces it.
            kept = self._files if old.base < self.end else self._files[:-1]
            self._files = (*kept, made)
        self._step("rolled")

    def _next_file(self, frame_bytes: int, *, use_reserve: bool) -> LogFile:
        needed, seed = log_file.size_for(frame_bytes), self._files[-1].seed
        try:
            return self._create(max(self._file_bytes, needed), seed=seed)
        except StoreFullError:
            if not use_reserve:
                raise
        # Rounded down, so that the files drawn from the reserve never exceed its size.
        size = max(needed, self._reserve.draw_bytes // log_file.PAGE_BYTES * log_file.PAGE_BYTES)
        self._reserve.draw(size)
        return self._create(size, seed=seed)

    def file_of(self, position: int) -> LogFile:
        """Return the file that contains a position; it stays readable after it is dropped."""
        self._check()
        files = self._files
        index = bisect_right(files, position, key=lambda file: file.base) - 1
        if index < 0 or position >= self.end:
            raise LookupError(f"Position {position} is not in the log [{self.first}, {self.end}).")
        return files[index]

    def _step(self, name: str) -> None:
        if self._fault:
            self._fault(name)

    def _check(self) -> None:
        if self._broken is not None:
            raise StorageError(self._broken)

    def _break(self, what: str, error: object) -> StorageError:
        """Refuse all later calls, and return the error to raise."""
        self._broken = f"{what} in {self._folder} failed: {error}."
        return StorageError(self._broken)

    def _let_go(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or f"The commit log in {self._folder} is closed."
        for file in self._files:
            file.finish()
        # The traceback of an error may keep this object alive; unmap the files now.
        self._files = self._files[-1:]
        self._reader.forget_before(self.end)
        self._reserve.close()
        self._mark.close()
