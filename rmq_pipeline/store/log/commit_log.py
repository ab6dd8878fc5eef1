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

import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import pyarrow as pa

from rmq_pipeline import durable_files
from rmq_pipeline.errors import (
    HomeFormatError,
    StorageError,
    StoreFullError,
)
from rmq_pipeline.store.log import log_file, recovery
from rmq_pipeline.store.log.frame import FRAME_BYTES_MAX, VERSION, written_schemas
from rmq_pipeline.store.log.frame_builder import FrameBuilder, Payload
from rmq_pipeline.store.log.log_file import FULL, Bytes, LogFile
from rmq_pipeline.store.log.log_store import Layout
from rmq_pipeline.store.log.recovery import SyncedMark
from rmq_pipeline.store.log.reserve import Reserve
from rmq_pipeline.store.log.sections import Section, SectionReader

__all__ = ["CommitLog", "FaultPoint", "Section"]

#: Called with the name of each step of a commit; crash tests end the process in it.
FaultPoint: TypeAlias = Callable[[str], None]

#: The cache of decoded sections is limited to this size.
_KEPT_BYTES: Final = 64 << 20


class CommitLog:
    """An open commit log; the module docstring describes its layout and its threads."""

    #: How long a frame waits for further requests.
    gather_s = 0.0

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
        **own: Any,
    ) -> Self:
        """Open the log of a folder, or create it.

        Check every frame from the dispatched position to the end, and cut a torn write at the end.
        Everything that remains is on disk when this returns. A new log is marked as validated: all
        batches that are staged must have been validated.

        Args:
            schemas: the kinds with a fixed schema; sections of other kinds contain theirs.
            dispatched_position: the start of the first frame that was not dispatched.
            own: arguments of a subclass.

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
                **own,
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
    def frame_bytes_max(self) -> int:
        """Length of the longest frame that the log takes."""
        return FRAME_BYTES_MAX

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
            self._put(taken)
        except OSError as error:
            broken, full = self._break("Writing to the commit log", error), error.errno in FULL
            raise (StoreFullError("The disk is full.") if full else broken) from error
        self._step("written")
        self.end += taken.length
        if self._sync_commits:
            self.synced = self.end

    def _put(self, taken: FrameBuilder) -> None:
        buffers = taken.buffers(synced=self.synced)
        self._put_locally(buffers, position=taken.start, length=taken.length)

    def _put_locally(self, buffers: Sequence[Bytes], *, position: int, length: int) -> None:
        self._files[-1].write_whole(
            buffers,
            position=position,
            length=length,
            dsync=self._sync_commits,
            halfway=(lambda: self._step("half_written")) if self._fault else None,
        )

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

    def can_drop_before(self, position: int) -> bool:
        """Return True if ``drop_before`` would delete a file."""
        files = self._files
        return len(files) > 1 and files[1].base <= position

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
        recovery.drop_pulled(self._folder, schemas=self.schemas)
        files = recovery.open_files(self._folder, schemas=self.schemas)
        if not files:
            recovery.check_new(self._folder, dispatched_position=dispatched_position)
            files = [self._create_first(self._new_seed())]
        self._files = tuple(files)
        self._reader.validates = not recovery.is_validated(self._folder, seed=files[0].seed)
        end = recovery.sound_end(files, dispatched_position=dispatched_position, mark=self._mark)
        self.end = self.synced = end
        self.building = FrameBuilder(self.schemas, seed=files[0].seed, start=end)

    def _new_seed(self) -> int:
        return secrets.randbits(32)

    def _create_first(self, seed: int) -> LogFile:
        recovery.mark_validated(self._folder, seed=seed)
        self._step("marked_validated")
        try:
            return self._create(self._file_bytes, seed=seed)
        except BaseException:
            recovery.unmark_validated(self._folder)
            raise

    def _create(self, size: int, *, seed: int, layout: Layout | None = None) -> LogFile:
        version, schemas = VERSION, self.schemas
        if layout is not None:
            version, schemas = layout.version, self._schemas_of(layout)
        return LogFile.create(
            self._folder,
            base=self.end,
            size=size,
            seed=seed,
            schemas=schemas,
            version=version,
            is_current=version == VERSION and schemas == self.schemas,
        )

    def _schemas_of(self, layout: Layout) -> dict[int, pa.Schema]:
        found = None
        if layout.version <= VERSION:
            found = written_schemas(layout.fingerprint, self.schemas)
        if found is None:
            raise HomeFormatError(
                f"The log's store has frames from position {layout.start} on that were written"
                " with other columns, which this version of rmq_pipeline does not know.",
                remedy="Use the version of rmq_pipeline that wrote them, or a newer one.",
            )
        return dict(found)

    def _roll(self, frame_bytes: int, *, use_reserve: bool, layout: Layout | None = None) -> None:
        """Continue in a new file; sync the old one, as only the last file may have a torn end."""
        if self.building.start != self.end:
            raise ValueError("A frame before the first one of a file is not written yet.")
        self._step("before_roll")
        self.sync()
        try:
            made = self._next_file(frame_bytes, use_reserve=use_reserve, layout=layout)
        except OSError as error:
            raise self._break("Making a log file", error) from error
        with self._files_lock:
            old = self._files[-1]
            old.finish()
            # A file without a frame has the same base and name: the new file replaces it.
            kept = self._files if old.base < self.end else self._files[:-1]
            self._files = (*kept, made)
        self._step("rolled")

    def _next_file(self, frame_bytes: int, *, use_reserve: bool, layout: Layout | None) -> LogFile:
        needed, seed = log_file.size_for(frame_bytes), self._files[-1].seed
        try:
            return self._create(max(self._file_bytes, needed), seed=seed, layout=layout)
        except StoreFullError:
            if not use_reserve:
                raise
        # Rounded down, so that the files drawn from the reserve never exceed its size.
        size = max(needed, self._reserve.draw_bytes // log_file.PAGE_BYTES * log_file.PAGE_BYTES)
        self._reserve.draw(size)
        return self._create(size, seed=seed, layout=layout)

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
