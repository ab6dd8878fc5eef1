"""The commit log: frames of Arrow record batches, each on disk before anybody hears of it.

A log position counts the bytes of all frames ever written. A file's name is its base, the position
of its first frame; position p is at byte 4096 + p - base of it. The next file's base is exactly
where the last frame of this one ended, so positions are dense: the place of a frame does not depend
on the file it lands in, and is known while it is still being built. A frame never spans files; one
larger than a file gets a file of its own. The bytes are described in frame.py, what start makes of
them in recovery.py.

One thread at a time stages, and one at a time writes: a frame may be staged while the one before it
is written. Any thread reads what is before ``end``. Files are preallocated, so a full disk shows
when a new file is needed: then what may not use the reserve is refused while a whole file cannot be
had from the disk, and until ``refill_reserve`` has made the reserve whole again. The room below a
whole file is left to dispatch and seal, which is how files come to be dropped.
"""

import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import pyarrow as pa

from rmq_pipeline.errors import CorruptLogError, StorageError, StoreFullError
from rmq_pipeline.store import frame, log_file, recovery
from rmq_pipeline.store.frame_builder import FrameBuilder
from rmq_pipeline.store.log_file import FULL, LogFile
from rmq_pipeline.store.payload import Payload
from rmq_pipeline.store.reserve import Reserve
from rmq_pipeline.store.section_reader import Section, SectionReader

__all__ = ["CommitLog", "FaultPoint", "Section"]

#: Called with the name of each step of a commit; crash tests end the process in it.
FaultPoint: TypeAlias = Callable[[str], None]

#: How much of what was read last stays decoded.
_KEPT_BYTES: Final = 64 << 20


class CommitLog:
    """An open commit log. See the module for its layout and its threads."""

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
        #: Of the kinds that leave theirs out.
        self.schemas = dict(schemas)
        self._fingerprint = frame.fingerprint(self.schemas)
        self._file_bytes = file_bytes
        self._sync_commits = sync_commits
        self._fault = fault
        self._files: tuple[LogFile, ...] = ()
        #: Held to change which files there are, and while one of them is synced.
        self._files_lock = threading.Lock()
        self._reader = SectionReader(self.schemas, kept_bytes=_KEPT_BYTES)
        self._broken: str | None = None
        self._closed = False
        self._reserve = Reserve(folder, wanted_bytes=reserve_bytes)
        #: The next position to be written; all frames before it are complete.
        self.end = 0
        #: Everything before it is on disk.
        self.synced = 0
        self._building = FrameBuilder(self.schemas, seed=0, start=0)

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
        """Open the log of a folder, or begin one there.

        Every frame from the dispatched position to the end is checked; a torn write at the very
        end is cut. All of what remains is on disk when this returns.

        Args:
            schemas: the kinds with a fixed schema; any other kind brings its own in each section.
            dispatched_position: where the first frame starts that dispatch has not seen.

        Raises:
            CorruptLogError: a frame is damaged, or frames are gone; names the place.
            HomeFormatError: the log has another format, or was written with other columns.
            StoreFullError: a new log, and no room for its first file.
            StorageError: the disk failed.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
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
        """The position of the first frame still kept."""
        return self._files[0].base

    def stage(self, kind: int, batch: pa.RecordBatch) -> int:
        """Put a batch into the frame being built; the position its section will have.

        Raises:
            ValueError: the batch has another schema than its kind, or the frame would exceed
                1 GiB; nothing was staged.
        """
        self._check()
        return self._building.stage(kind, batch)

    def stage_payload(self, kind: int, payload: Payload) -> int:
        """The same with a batch that is serialized already, by the schema of its kind."""
        self._check()
        return self._building.stage_payload(kind, payload)

    def staged_bytes(self) -> int:
        """The length of the frame being built; 0 when nothing is staged."""
        return self._building.length

    def discard(self) -> None:
        """Forget what is staged."""
        self._building.clear()

    def commit(self, *, use_reserve: bool = False) -> int:
        """Write what is staged as one frame; the new end of the log. Nothing: nothing happens.

        Raises:
            StoreFullError: no room; what is staged stays staged, unless the log is broken.
            StorageError: the write failed.
        """
        self._check()
        if self._building.length:
            self.make_room(frame_bytes=self._building.length, use_reserve=use_reserve)
            self.write(self.take())
        return self.end

    def take(self) -> FrameBuilder:
        """What is staged: a frame to be written after all that were taken before."""
        taken = self._building
        if taken.length:
            self._step("staged")
        self._building = taken.following()
        return taken

    def write(self, taken: FrameBuilder) -> None:
        """Write a frame with one system call; with flush = sync it is on disk when this returns.

        Raises:
            StorageError, or StoreFullError when that is why: the write failed. It is not tried
                again, and no later frame is written: close this log and open another.
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
        """Whether a frame of this length would go to a new file."""
        return self._building.start + frame_bytes > self._files[-1].capacity_end

    def make_room(self, *, frame_bytes: int, use_reserve: bool) -> None:
        """See to it that what is staged can be written as a frame of this length.

        Positions stay as they are. For the thread that stages; when it ``needs_file``, all frames
        that were taken must be written.

        Raises:
            StoreFullError: it cannot.
        """
        self._check()
        if not use_reserve and not self._reserve.whole:
            raise StoreFullError(
                "The disk is full; what is left of the reserve is for receive, settle and upkeep."
            )
        if self.needs_file(frame_bytes):
            self._roll(frame_bytes, use_reserve=use_reserve)

    def draw_reserve(self, wanted_bytes: int) -> None:
        """Give a part of the reserve to the disk, for dispatch and seal. For any thread.

        Raises:
            StoreFullError: less than that is left.
        """
        self._check()
        try:
            self._reserve.draw(wanted_bytes)
        except OSError as error:
            raise self._break("Drawing on the reserve", error) from error

    def refill_reserve(self) -> bool:
        """Make the reserve whole, if the disk then still has room for a log file; is it whole?

        For the writer thread, now and then.
        """
        self._check()
        try:
            return self._reserve.refill(spare_bytes=self._file_bytes)
        except OSError as error:
            raise self._break("Refilling the reserve", error) from error

    def sync(self) -> None:
        """Put on disk what was committed before this call. For any thread.

        Raises:
            StorageError: it failed, and is not tried again.
        """
        self._check()
        with self._files_lock:
            end = self.end
            if self.synced < end:
                try:
                    self._files[-1].sync()
                except OSError as error:
                    raise self._break("Syncing the commit log", error) from error
                # With commits that sync themselves, more was written meanwhile.
                self.synced = max(self.synced, end)

    def read(self, position: int) -> Section:
        """The section at a position, checked against its CRC.

        Raises:
            LookupError: the position was dropped, or not written yet.
            CorruptLogError: no sound section is there; names the place.
        """
        self._check()
        found = self._reader.kept(position)
        if found is None:
            found = self._reader.read(self.file_of(position), position)
            if position < self.first:  # dropped meanwhile: do not keep its file
                self._reader.forget_before(self.first)
        return found

    def frames(self, start: int, stop: int) -> Iterator[tuple[int, list[Section]]]:
        """The frames that start in [start, stop), each with its end position.

        Args:
            start: where a frame starts, or the end of the log.
            stop: taken as ``end`` when it is beyond that.

        Raises:
            LookupError: ``start`` was dropped.
            CorruptLogError: a frame is damaged; names the place.
        """
        position, stop = start, min(stop, self.end)
        while position < stop:
            position, sections = self._reader.frame(self.file_of(position), position)
            yield position, sections

    def drop_before(self, position: int) -> list[Path]:
        """Delete the files that end at or before a position, but never the last; what is gone.

        Whoever still reads one of them keeps it until he lets go of its batches.
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
                log_file.sync_folder(self._folder)
        except OSError as error:
            raise self._break("Deleting an old log file", error) from error
        return [file.path for file in dropped]

    def close(self) -> None:
        """Sync and let go of the files; what was read stays readable. Again: nothing happens."""
        try:
            if self._broken is None:
                self.sync()
        finally:
            self._let_go()

    def _recover(self, dispatched_position: int) -> None:
        files = recovery.open_files(self._folder, fingerprint=self._fingerprint)
        if not files:
            if dispatched_position:
                raise CorruptLogError(
                    f"{self._folder}: dispatch has reached {dispatched_position}, "
                    "but there is no log file."
                )
            files = [self._create(self._file_bytes, seed=secrets.randbits(32))]
        self._files = tuple(files)
        self.end = recovery.sound_end(files, dispatched_position=dispatched_position)
        self.synced = self.end
        self._building = FrameBuilder(self.schemas, seed=files[0].seed, start=self.end)

    def _create(self, size: int, *, seed: int) -> LogFile:
        return LogFile.create(
            self._folder, base=self.end, size=size, seed=seed, fingerprint=self._fingerprint
        )

    def _roll(self, frame_bytes: int, *, use_reserve: bool) -> None:
        """Go on in a new file. The old one is on disk first: only the last may have a torn end."""
        if self._building.start != self.end:
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
            # A file without a frame has the same base and name, and is replaced.
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
        size = max(needed, self._reserve.draw_bytes)
        self._reserve.draw(size)
        return self._create(size, seed=seed)

    def file_of(self, position: int) -> LogFile:
        """The file that has a position; it stays readable when it is dropped."""
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
        """Refuse everything from now on; the error to raise."""
        self._broken = f"{what} in {self._folder} failed: {error}."
        return StorageError(self._broken)

    def _let_go(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or f"The commit log in {self._folder} is closed."
        for file in self._files:
            file.finish()
        # An error's traceback may keep this log for a while: the mapped files shall not wait.
        self._files = self._files[-1:]
        self._reader.forget_before(self.end)
        self._reserve.close()
