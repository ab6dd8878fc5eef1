"""One file of the commit log: preallocated, appended to, and read through a memory map.

``<folder>/<20-digit base>.log`` holds the log positions from its base to the base of the next file.
A file is never truncated while a reader may have it mapped; discarded bytes are overwritten by
zeros.
"""

import errno
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeAlias

import pyarrow as pa

from rmq_pipeline import durable_files
from rmq_pipeline.errors import CorruptLogError, HomeFormatError, StoreFullError
from rmq_pipeline.store import descriptors
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES, HEADER_BYTES, FrameHeader, SectionHeader

Bytes: TypeAlias = bytes | memoryview | pa.Buffer

SUFFIX: Final = ".log"
#: Suffix of a file under construction; one found at start was left by a crash.
UNFINISHED_SUFFIX: Final = ".new"
#: ENOSPC and EDQUOT: the disk or the user's quota is full.
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: File sizes are multiples of this.
PAGE_BYTES: Final = 4096
#: After reading this much, release the mapped pages, so that resident memory stays bounded.
_RESIDENT_BYTES: Final = 64 << 20
#: Number of bytes per step of a checksum.
_PIECE_BYTES: Final = 16 << 20
#: Bytes that the kernel maps around a touched page.
_FAULT_AROUND_BYTES: Final = 64 << 10
_ZEROS: Final = bytes(1 << 16)
#: Frames up to this length are written over blocks that already contain zeros: see ``write``.
_SMALL_BYTES: Final = 32 << 10
_PREPARED_BYTES: Final = 1 << 20
_REWRITE_BYTES: Final = 1 << 20
#: Zeros are written ahead only after this many small frames in a row, because a large frame would
#: overwrite most of them.
_SMALL_RUN: Final = 8


def path_of(folder: Path, base: int) -> Path:
    """Return the path of the file with this base position."""
    return folder / f"{base:020d}{SUFFIX}"


def size_for(frame_bytes: int) -> int:
    """Return the size of a file for a frame of this length: header page plus whole pages."""
    return whole_pages(FILE_HEADER_BYTES + frame_bytes)


def whole_pages(size: int) -> int:
    """Round a size up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def allocate(descriptor: int, *, start: int, stop: int) -> None:
    """Allocate disk blocks for the bytes [start, stop) of a file.

    Raises:
        StoreFullError: the disk is full; the file keeps its old size.
    """
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.ftruncate(descriptor, start)
        raise StoreFullError(
            f"The disk has no {stop - start} free bytes for the commit log."
        ) from error


class LogFile:
    """A mapped log file; open for writing until ``finish``."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int,
        base: int,
        descriptor: int,
        schemas: Mapping[int, pa.Schema],
        version: int = frame.VERSION,
        is_current: bool = True,
    ) -> None:
        self.path = path
        #: Version of the format, and fingerprint of the columns, in the file's header.
        self.version = version
        self.fingerprint = frame.fingerprint(schemas)
        #: Schemas of the payloads that omit theirs. Those of an older file have fewer columns.
        self.schemas = schemas
        #: False: an older version wrote it; new frames go to another file.
        self.is_current = is_current
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
    def create(
        cls,
        folder: Path,
        *,
        base: int,
        size: int,
        seed: int,
        schemas: Mapping[int, pa.Schema],
        version: int = frame.VERSION,
        is_current: bool = True,
    ) -> Self:
        """Create a file of ``size`` bytes and sync it with its name; replaces one of the same name.

        Raises:
            StoreFullError: the disk is full; no file is left behind.
            OSError: creation failed for another reason.
        """
        return descriptors.with_reserve(
            lambda: cls._create(
                folder,
                base=base,
                size=size,
                seed=seed,
                schemas=schemas,
                version=version,
                is_current=is_current,
            )
        )

    @classmethod
    def _create(
        cls,
        folder: Path,
        *,
        base: int,
        size: int,
        seed: int,
        schemas: Mapping[int, pa.Schema],
        version: int,
        is_current: bool,
    ) -> Self:
        path = path_of(folder, base)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        header = frame.FileHeader(version, seed, base, frame.fingerprint(schemas))
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            allocate(descriptor, start=0, stop=size)
            os.pwrite(descriptor, frame.pack_file_header(header), 0)
            durable_files.publish(unfinished, path)
            return cls(
                path,
                seed=seed,
                base=base,
                descriptor=descriptor,
                schemas=schemas,
                version=version,
                is_current=is_current,
            )
        except BaseException:
            os.close(descriptor)
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path, *, schemas: Mapping[int, pa.Schema]) -> Self:
        """Open an existing file, of this version or an older one.

        Raises:
            CorruptLogError: its header is damaged, or does not match the file name.
            HomeFormatError: it has a newer format, or columns that are not in ``schemas``.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = frame.unpack_file_header(memoryview(os.pread(descriptor, PAGE_BYTES, 0)))
            if header is None or path.name != path_of(path.parent, header.base).name:
                raise CorruptLogError(f"{path}: the file header (byte 0) is damaged.")
            if header.version > frame.VERSION:
                raise HomeFormatError(
                    f"{path} has format version {header.version}; this version of rmq_pipeline"
                    f" reads versions up to {frame.VERSION}."
                )
            written = frame.written_schemas(header.fingerprint, schemas)
            if written is None:
                raise HomeFormatError(
                    f"{path} was written with other columns, which this version of rmq_pipeline"
                    " does not know."
                )
            return cls(
                path,
                seed=header.seed,
                base=header.base,
                descriptor=descriptor,
                schemas=written,
                version=header.version,
                is_current=header.version == frame.VERSION and written == dict(schemas),
            )
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def capacity_end(self) -> int:
        """Log position at which the file ends; no frame of the file reaches beyond it."""
        return self.base + self.size - FILE_HEADER_BYTES

    def write(self, buffers: Sequence[Bytes], *, position: int, length: int, dsync: bool) -> int:
        """Write at a position with one system call, and return the number of bytes written.

        The first write to a preallocated block costs a commit of the file system's journal. The
        commit takes half the time of a small synced write. During a run of small synced writes,
        1 MiB of zeros is therefore written ahead.
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
        """Write a frame completely, or overwrite it by zeros and raise.

        The next start must not accept a frame whose write failed.

        Args:
            halfway: called between the two halves of the write; for crash tests.

        Raises:
            OSError: the disk failed, or wrote only a part.
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
        with suppress(OSError):  # report the error that led here
            self.zero(start, stop)

    def zero(self, start: int, stop: int) -> None:
        """Overwrite the positions [start, stop) by zeros, and sync."""
        offset, end = self.offset_of(start), self.offset_of(stop)
        while offset < end:
            offset += os.pwrite(self._descriptor, _ZEROS[: end - offset], offset)
        self.sync()

    def rewrite(self, start: int, stop: int) -> None:
        """Write the positions [start, stop) again with their current bytes, for the next sync.

        After a failed sync the kernel marks pages as clean although they are not on disk. A later
        sync would then succeed without writing them.
        """
        for at in range(start, stop, _REWRITE_BYTES):
            data = self.copy(at, min(at + _REWRITE_BYTES, stop))
            if os.pwrite(self._descriptor, data, self.offset_of(at)) != len(data):
                raise OSError(f"{self.path}: less than {len(data)} bytes taken")

    def sync(self) -> None:
        """Sync all written bytes to disk."""
        os.fdatasync(self._descriptor)

    def finish(self) -> None:
        """Close the file for writing; reads continue."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def release(self) -> None:
        """Remove the mapped pages from resident memory; the next access maps them again."""
        self._resident_bytes = 0
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _note_read(self, length: int) -> None:
        self._resident_bytes += length + _FAULT_AROUND_BYTES
        if self._resident_bytes > _RESIDENT_BYTES:
            self.release()

    def offset_of(self, position: int) -> int:
        """Return the byte of the file at which a position is."""
        return FILE_HEADER_BYTES + position - self.base

    def damage(self, position: int, what: str) -> CorruptLogError:
        """Return an error that names a place in this file."""
        return CorruptLogError(
            f"{self.path}: {what} at position {position} (byte {self.offset_of(position)})."
        )

    def frame_at(self, position: int) -> FrameHeader | None:
        """Return the header of the frame at a position; None if no sound header is there."""
        return frame.unpack_frame_header(
            self._view, self.offset_of(position), position=position, seed=self.seed
        )

    def section_at(self, position: int) -> SectionHeader:
        """Return the header of the section at a position.

        Raises:
            CorruptLogError: no sound header is there.
        """
        header = frame.unpack_section_header(
            self._view, self.offset_of(position), position=position, seed=self.seed
        )
        if header is None or header.end > self.capacity_end:
            raise self.damage(position, "no sound section header")
        return header

    def copy(self, start: int, stop: int) -> bytes:
        """Copy the bytes of the positions [start, stop), at most to the end of the file."""
        self._note_read(stop - start)
        return bytes(self._view[self.offset_of(start) : self.offset_of(stop)])

    def payload(self, section: SectionHeader) -> pa.Buffer:
        """Return the payload of a section without copying, after checking it.

        Raises:
            CorruptLogError: the payload does not match its checksum.
        """
        start = section.position + HEADER_BYTES
        payload = self._buffer.slice(self.offset_of(start), section.length)
        crc = 0
        # In pieces, so that the pages of a large section are not all resident at once.
        for at in range(0, section.length, _PIECE_BYTES):
            piece = payload.slice(at, min(_PIECE_BYTES, section.length - at))
            self._note_read(len(piece))
            crc = frame.crc32(piece, crc)
        if crc != section.payload_crc:
            raise self.damage(section.position, "a section does not match its checksum")
        return payload

    def frame_sections(self, position: int) -> tuple[int, list[SectionHeader]]:
        """Return the end of the frame at a position, and the headers of its sections.

        Raises:
            CorruptLogError: a header is damaged, or the headers contradict each other.
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
        """Return the first position from ``position`` on after which all bytes are zero."""
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
        """Return all sound frame headers in (position, stop), at any multiple of 64."""
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
        """Return the offset after the last nonzero byte of [start, stop); None if all are zero."""
        for end in range(stop, start, -len(_ZEROS)):
            begin = max(start, end - len(_ZEROS))
            # Read, not mapped: most of the file is empty, and mapping it would make it resident.
            data = os.pread(self._descriptor, end - begin, begin)
            if data != _ZEROS[: len(data)]:
                return begin + len(data.rstrip(b"\0"))
        return None
