"""Binary format of the commit log: file header, frame, section. This module touches no file.

A file is one header page, then frames without gaps, then zeros. Numbers are little-endian. Frames,
section headers and payloads start at multiples of 64 bytes, so a mapped payload is read in place.

    file    RMQCLOG1, version, CRC seed, base position, schema fingerprint, CRC; zeros up to 4096
    frame   64 bytes: RMQFRAME, position, length, synced, sections, CRC; then the sections
    section 64 bytes: RMQSECTN, position, length, kind, payload CRC, CRC; then payload, zero padding

Every header contains its own log position, and every header CRC starts from the file's random seed.
A message whose body is a copy of a log file is therefore never read as a frame. ``synced`` is the
position up to which the log was known to be on disk when the frame was written. It distinguishes a
torn tail, after which nothing was synced, from damage.

A payload is an encapsulated Arrow IPC record batch. Kinds with a fixed schema omit the schema,
whose fingerprint is in the file header. The payload of any other kind is a whole IPC stream with
its schema.

Columns are only ever appended to a fixed schema. An older file has the fingerprint of the first
columns, and is read with nulls in the others; new frames go to a new file. VERSION is raised when a
change is not of this kind, such as another meaning of a column; lower versions stay readable.
"""

import hashlib
import itertools
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from isal import isal_zlib

VERSION: Final = 1
FILE_HEADER_BYTES: Final = 4096
HEADER_BYTES: Final = 64
#: A commit is one system call, and one system call writes less than 2 GiB.
FRAME_BYTES_MAX: Final = 1 << 30

_FILE_MAGIC: Final = b"RMQCLOG1"
_FRAME_MAGIC: Final = b"RMQFRAME"
_SECTION_MAGIC: Final = b"RMQSECTN"
_FILE: Final = struct.Struct("<8sIIQ32s4x")
_FRAME: Final = struct.Struct("<8sQQQI24x")
_SECTION: Final = struct.Struct("<8sQQII28x")
_CRC: Final = struct.Struct("<I")


class FileHeader(NamedTuple):
    """Contents of the first page of a log file."""

    version: int
    seed: int
    base: int
    fingerprint: bytes


class FrameHeader(NamedTuple):
    """Header of a frame: ``length`` bytes from ``position``, header and padding included."""

    position: int
    length: int
    synced: int
    sections: int


class SmallFrames(NamedTuple):
    """Complete frames that are adjacent in memory."""

    number: int
    #: Log position after the last frame.
    end: int
    #: Position and payload of each section, by kind and in log order.
    sections: dict[int, list[tuple[int, memoryview]]]


class SectionHeader(NamedTuple):
    """Header of a section: at ``position``, followed by ``length`` bytes of payload."""

    position: int
    length: int
    kind: int
    payload_crc: int

    @property
    def end(self) -> int:
        """Position of the next section, or of the end of the frame."""
        return self.position + HEADER_BYTES + aligned(self.length)


def aligned(length: int) -> int:
    """Return ``length`` rounded up to the next multiple of 64."""
    return (length + 63) & ~63


def crc32(data: bytes | memoryview | pa.Buffer, seed: int = 0) -> int:
    """Return the CRC-32 of ``data``."""
    return int(isal_zlib.crc32(data, seed))


def fingerprint(schemas: Mapping[int, pa.Schema]) -> bytes:
    """Return 32 bytes that change when a column of a fixed schema changes."""
    lines = [
        f"{kind} {field.name} {field.type} {field.nullable}"
        for kind, schema in sorted(schemas.items())
        for field in schema
    ]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def written_schemas(
    file_fingerprint: bytes, schemas: Mapping[int, pa.Schema]
) -> Mapping[int, pa.Schema] | None:
    """Return the schemas of a file: ``schemas``, or their first columns in an older file.

    None: the file has columns that this version does not know.
    """
    counts = (range(len(schema), 0, -1) for schema in schemas.values())
    for lengths in itertools.product(*counts):
        found = {
            kind: pa.schema(list(schema)[:length])
            for (kind, schema), length in zip(schemas.items(), lengths, strict=True)
        }
        if fingerprint(found) == file_fingerprint:
            return found
    return None


def completed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Append, as nulls, the columns that an older file does not have."""
    missing = list(schema)[batch.num_columns :]
    if not missing:
        return batch
    nulls = (pa.nulls(batch.num_rows, field.type) for field in missing)
    return pa.RecordBatch.from_arrays([*batch.columns, *nulls], schema=schema)


def pack_file_header(header: FileHeader) -> bytes:
    """Encode the first page of a log file."""
    body = _FILE.pack(_FILE_MAGIC, header.version, header.seed, header.base, header.fingerprint)
    return (body + _CRC.pack(crc32(body))).ljust(FILE_HEADER_BYTES, b"\0")


def unpack_file_header(page: memoryview) -> FileHeader | None:
    """Decode the first page; return None if it is not the header of a commit log file."""
    if len(page) < FILE_HEADER_BYTES:
        return None
    magic, version, seed, base, print_ = _FILE.unpack_from(page)
    (crc,) = _CRC.unpack_from(page, _FILE.size)
    if magic != _FILE_MAGIC or crc != crc32(page[: _FILE.size]):
        return None
    return FileHeader(version, seed, base, print_)


def pack_frame_header(header: FrameHeader, seed: int) -> bytes:
    """Encode the 64 bytes before the sections of a frame."""
    body = _FRAME.pack(_FRAME_MAGIC, *header)
    return body + _CRC.pack(crc32(body, seed))


def unpack_frame_header(
    data: memoryview, offset: int, *, position: int, seed: int
) -> FrameHeader | None:
    """Return the frame header at ``offset`` if it names ``position``, else None."""
    if offset + HEADER_BYTES > len(data):
        return None
    magic, *fields = _FRAME.unpack_from(data, offset)
    if magic != _FRAME_MAGIC or fields[0] != position:
        return None
    (crc,) = _CRC.unpack_from(data, offset + _FRAME.size)
    return FrameHeader(*fields) if crc == crc32(data[offset : offset + _FRAME.size], seed) else None


def pack_section_header(header: SectionHeader, seed: int) -> bytes:
    """Encode the 64 bytes before the payload of a section."""
    body = _SECTION.pack(_SECTION_MAGIC, *header)
    return body + _CRC.pack(crc32(body, seed))


def unpack_section_header(
    data: memoryview, offset: int, *, position: int, seed: int
) -> SectionHeader | None:
    """Return the section header at ``offset`` if it names ``position``, else None."""
    if offset + HEADER_BYTES > len(data):
        return None
    magic, *fields = _SECTION.unpack_from(data, offset)
    if magic != _SECTION_MAGIC or fields[0] != position:
        return None
    (crc,) = _CRC.unpack_from(data, offset + _SECTION.size)
    if crc != crc32(data[offset : offset + _SECTION.size], seed):
        return None
    return SectionHeader(*fields)


def small_frames(data: bytes, *, position: int, longest: int, seed: int) -> SmallFrames:
    """Return the sound frames at the start of ``data``; ``position`` is that of the first.

    Parsing stops at a frame that is longer than ``longest``, incomplete or damaged. The caller
    reads that frame by itself and gets the reason.
    """
    view, base = memoryview(data), position
    number, sections = 0, dict[int, list[tuple[int, memoryview]]]()
    while header := unpack_frame_header(view, position - base, position=position, seed=seed):
        end, at = position + header.length, position + HEADER_BYTES
        if header.length > longest or end - base > len(view):
            break
        found = []
        while at < end:
            section = unpack_section_header(view, at - base, position=at, seed=seed)
            if section is None or section.end > end:
                break
            payload = view[at - base + HEADER_BYTES :][: section.length]
            if crc32(payload) != section.payload_crc:
                break
            found.append((section.kind, at, payload))
            at = section.end
        if at != end or len(found) != header.sections:
            break
        for kind, at, payload in found:
            sections.setdefault(kind, []).append((at, payload))
        number, position = number + 1, end
    return SmallFrames(number, position, sections)


def frame_candidates(data: memoryview, *, start: int, stop: int) -> list[int]:
    """Return multiples of 64 in [start, stop) at which ``data`` has the magic of a frame."""
    start = aligned(start)
    count = (min(stop, len(data)) - start) // HEADER_BYTES
    if count <= 0:
        return []
    words = np.frombuffer(data, np.uint64, count * 8, start)[::8]
    magic = np.frombuffer(_FRAME_MAGIC, np.uint64)[0]
    return [start + HEADER_BYTES * int(i) for i in np.flatnonzero(words == magic)]


def encode(batch: pa.RecordBatch, schema: pa.Schema | None) -> pa.Buffer:
    """Serialize a batch to a payload, without the schema if its kind has a fixed one."""
    if schema is not None:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def encoded_bytes(batch: pa.RecordBatch) -> int:
    """Return the payload length of a batch that includes its schema; copies nothing."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return int(sink.size())


def decode(payload: pa.Buffer, schema: pa.Schema | None) -> pa.RecordBatch:
    """Decode the batch of a payload without copying."""
    if schema is not None:
        return pa.ipc.read_record_batch(payload, schema)
    with pa.ipc.open_stream(payload) as stream:
        return stream.read_next_batch()
