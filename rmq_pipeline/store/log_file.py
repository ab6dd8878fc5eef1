"""One file of the commit log: preallocated, written at its end, read through a mapping.

``<folder>/<20-digit base>.log`` holds the log positions from its base to the base of the next file.
A file is never truncated while a reader may have it mapped: what must go is overwritten by zeros.
"""

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeAlias

import pyarrow as pa

from rmq_pipeline.errors import CorruptLogError, HomeFormatError, StoreFullError
from rmq_pipeline.store import frame
from rmq_pipeline.store.frame import FILE_HEADER_BYTES, HEADER_BYTES, FrameHeader, SectionHeader

Bytes: TypeAlias = bytes | memoryview | pa.Buffer

SUFFIX: Final = ".log"
#: A file on its way to its name; one found at start is what a crash left.
UNFINISHED_SUFFIX: Final = ".new"
#: ENOSPC and EDQUOT: the disk, or this user's part of it, is full.
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PAGE_BYTES: Final = 4096
#: After this much reading the mapped pages are let go of, so that they do not add up.
_RESIDENT_BYTES: Final = 64 << 20
#: What the kernel maps around a page that is touched.
_FAULT_AROUND_BYTES: Final = 64 << 10
_ZEROS: Final = bytes(1 << 16)
#: Frames up to this length are written over blocks that were written before: see ``write``.
_SMALL_BYTES: Final = 32 << 10
_PREPARED_BYTES: Final = 1 << 20
#: So many of them in a row: after a large one the zeros would be ahead of nothing much.
_SMALL_RUN: Final = 8


def path_of(folder: Path, base: int) -> Path:
    """Where the file with this base position is."""
    return folder / f"{base:020d}{SUFFIX}"


def size_for(frame_bytes: int) -> int:
    """The size of a file that takes a frame of this length: header page, whole pages."""
    return -(-(FILE_HEADER_BYTES + frame_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def sync_folder(folder: Path) -> None:
    """Put the names of a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(descriptor: int, *, start: int, stop: int) -> None:
    """Give a file its disk blocks.

    Raises:
        StoreFullError: the disk is full; the file has its old size.
    """
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.ftruncate(descriptor, start)
        raise StoreFullError(f"No room for {stop - start} bytes of commit log.") from error


class LogFile:
    """A log file of this process; open for writing until ``finish``."""

    def __init__(self, path: Path, *, seed: int, base: int, descriptor: int) -> None:
        self.path = path
        self.base = base
        self.size = os.fstat(descriptor).st_size
        self.seed = seed
        self._descriptor = descriptor
        self._mapping = mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ)
        self._view = memoryview(self._mapping)
        self._buffer = pa.py_buffer(self._mapping)
        self._resident_bytes = 0
        self._prepared_end = base
        self._small_run = 0

    @classmethod
    def create(cls, folder: Path, *, base: int, size: int, seed: int, fingerprint: bytes) -> Self:
        """Make a file of ``size`` bytes, on disk with its name; replaces one of the same name.

        Raises:
            StoreFullError: no room; nothing is left behind.
            OSError: anything else went wrong.
        """
        path = path_of(folder, base)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        header = frame.FileHeader(frame.VERSION, seed, base, fingerprint)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            allocate(descriptor, start=0, stop=size)
            os.pwrite(descriptor, frame.pack_file_header(header), 0)
            os.fsync(descriptor)
            unfinished.rename(path)
            sync_folder(folder)
            return cls(path, seed=seed, base=base, descriptor=descriptor)
        except BaseException:
            os.close(descriptor)
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path, *, fingerprint: bytes) -> Self:
        """Open a file that is there.

        Raises:
            CorruptLogError: its header is damaged or belongs to another name.
            HomeFormatError: it was written in another format, or with other columns.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = frame.unpack_file_header(memoryview(os.pread(descriptor, _PAGE_BYTES, 0)))
            if header is None or path.name != path_of(path.parent, header.base).name:
                raise CorruptLogError(f"{path}: the file header (byte 0) is damaged.")
            if header.version != frame.VERSION:
                raise HomeFormatError(
                    f"{path} has format version {header.version}, this is {frame.VERSION}."
                )
            if header.fingerprint != fingerprint:
                raise HomeFormatError(f"{path} was written with other columns than these.")
            return cls(path, seed=header.seed, base=header.base, descriptor=descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def capacity_end(self) -> int:
        """The position a frame of this file cannot reach beyond."""
        return self.base + self.size - FILE_HEADER_BYTES

    def write(self, buffers: Sequence[Bytes], *, position: int, length: int, dsync: bool) -> int:
        """Write at a position with one system call; the number of bytes that were taken.

        The first write to a preallocated block costs a commit of the file system's journal, half
        of the time of a small synced write; so zeros go ahead of many small ones, 1 MiB at a time.
        """
        self._small_run = self._small_run + 1 if length <= _SMALL_BYTES else 0
        if dsync and self._small_run >= _SMALL_RUN and position + length > self._prepared_end:
            self._prepare(position)
        flags = os.RWF_DSYNC if dsync else 0
        return os.pwritev(self._descriptor, buffers, self.offset_of(position), flags)

    def write_whole(
        self,
        buffers: Sequence[Bytes],
        *,
        position: int,
        length: int,
        dsync: bool,
        halfway: Callable[[], None] | None,
    ) -> None:
        """The same for a frame, which is written whole or cleared again.

        The next start must not take a frame that failed for one that was answered.

        Args:
            halfway: called between two writes of a half each, for tests.

        Raises:
            OSError: the disk failed, or took only a part.
        """
        try:
            written = 0
            if halfway:
                data = memoryview(b"".join(buffers))
                written = length // 2
                self.write([data[:written]], position=position, length=written, dsync=dsync)
                halfway()
                buffers = [data[written:]]
            at, rest = position + written, length - written
            written += self.write(buffers, position=at, length=rest, dsync=dsync)
        except OSError:
            self._take_back(position, position + length)
            raise
        if written != length:
            self._take_back(position, position + written)
            raise OSError(f"{written} of {length} bytes taken")

    def _take_back(self, start: int, stop: int) -> None:
        with suppress(OSError):  # the error that led here is the one to tell
            self.zero(start, stop)

    def zero(self, start: int, stop: int) -> None:
        """Overwrite the positions [start, stop) by zeros, and sync."""
        offset, end = self.offset_of(start), self.offset_of(stop)
        while offset < end:
            offset += os.pwrite(self._descriptor, _ZEROS[: end - offset], offset)
        self.sync()

    def sync(self) -> None:
        """Put what was written on disk."""
        os.fdatasync(self._descriptor)

    def finish(self) -> None:
        """Write no more; reading goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self) -> None:
        """Take the mapped pages out of this process's memory; whoever needs one gets it back."""
        self._resident_bytes = 0
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _note_read(self, length: int) -> None:
        self._resident_bytes += length + _FAULT_AROUND_BYTES
        if self._resident_bytes > _RESIDENT_BYTES:
            self.release()

    def offset_of(self, position: int) -> int:
        """The byte of the file where a position is."""
        return FILE_HEADER_BYTES + position - self.base

    def damage(self, position: int, what: str) -> CorruptLogError:
        """The error that names a place in this file."""
        return CorruptLogError(
            f"{self.path}: {what} at position {position} (byte {self.offset_of(position)})."
        )

    def frame_at(self, position: int) -> FrameHeader | None:
        """The header of the frame at a position, None when there is no sound one."""
        return frame.unpack_frame_header(
            self._view, self.offset_of(position), position=position, seed=self.seed
        )

    def section_at(self, position: int) -> SectionHeader:
        """The header of the section at a position.

        Raises:
            CorruptLogError: there is no sound one.
        """
        header = frame.unpack_section_header(
            self._view, self.offset_of(position), position=position, seed=self.seed
        )
        if header is None or header.end > self.capacity_end:
            raise self.damage(position, "no sound section header")
        return header

    def copy(self, start: int, stop: int) -> bytes:
        """The bytes of the positions [start, stop), as far as the file goes."""
        self._note_read(stop - start)
        return bytes(self._view[self.offset_of(start) : self.offset_of(stop)])

    def payload(self, section: SectionHeader) -> pa.Buffer:
        """The payload of a section, in place.

        Raises:
            CorruptLogError: it does not match its checksum.
        """
        start = section.position + HEADER_BYTES
        payload = self._buffer.slice(self.offset_of(start), section.length)
        self._note_read(section.length)
        if frame.crc32(payload) != section.payload_crc:
            raise self.damage(section.position, "a section does not match its checksum")
        return payload

    def frame_sections(self, position: int) -> tuple[int, list[SectionHeader]]:
        """The end of the frame at a position, and the headers of its sections.

        Raises:
            CorruptLogError: a header is not sound, or they contradict each other.
        """
        header = self.frame_at(position)
        if header is None:
            raise self.damage(position, "no sound frame header")
        sections: list[SectionHeader] = []
        at = position + HEADER_BYTES
        for _ in range(header.sections):
            sections.append(self.section_at(at))
            at = sections[-1].end
        if at != position + header.length:
            raise self.damage(position, "a frame whose sections do not add up to its length")
        return at, sections

    def written_end(self, position: int) -> int:
        """The first position from ``position`` after which only zeros follow."""
        offset, last = self.offset_of(position), self.offset_of(position)
        while offset < self.size:
            try:
                start = os.lseek(self._descriptor, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            offset = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            last = self._last_nonzero(start, offset) or last
        return self.base + last - FILE_HEADER_BYTES

    def frames_after(self, position: int, stop: int) -> list[FrameHeader]:
        """Sound frame headers in (position, stop), wherever they start."""
        offsets = frame.frame_candidates(
            self._view,
            start=self.offset_of(position + HEADER_BYTES),
            stop=self.offset_of(stop),
        )
        found = (self.frame_at(self.base + offset - FILE_HEADER_BYTES) for offset in offsets)
        return [header for header in found if header is not None]

    def _prepare(self, position: int) -> None:
        self._prepared_end = min(position + _PREPARED_BYTES, self.capacity_end)
        zeros = bytes(self._prepared_end - position)
        os.pwritev(self._descriptor, [zeros], self.offset_of(position), os.RWF_DSYNC)

    def _last_nonzero(self, start: int, stop: int) -> int | None:
        """The byte after the last one in [start, stop) that is not zero; None when all are."""
        for end in range(stop, start, -len(_ZEROS)):
            begin = max(start, end - len(_ZEROS))
            # Read, not mapped: the empty part of a file is most of it, and would be resident.
            data = os.pread(self._descriptor, end - begin, begin)
            if data != _ZEROS[: len(data)]:
                return begin + len(data.rstrip(b"\0"))
        return None
