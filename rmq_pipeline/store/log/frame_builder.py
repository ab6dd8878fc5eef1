"""A frame under construction: staged sections as buffers that one system call can write.

The payload of a section of messages is in pieces, so that large bodies are not copied.
Concatenated, the pieces equal the result of ``RecordBatch.serialize``. All columns but the bodies
are serialized. The buffer of the bodies is then inserted, and the buffer list of the metadata
updated:

    0xFFFFFFFF, length of the metadata, Message { bodyLength, RecordBatch { buffers [] } }, buffers

A flatbuffer table begins with the distance back to its vtable, which lists the places of its
fields.
"""

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.message import Int64s, offsets_of
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame import HEADER_BYTES, FrameHeader, SectionHeader
from rmq_pipeline.store.log.log_file import Bytes

Payload: TypeAlias = Sequence[Bytes]

#: IOV_MAX: the maximum number of buffers in one system call.
_BUFFERS_MAX: Final = 1024
_PADDING: Final = bytes(HEADER_BYTES)
#: Smaller bodies are copied: that takes no longer than writing a second piece.
_LARGE_BYTES: Final = 128 * 1024
_PLACE: Final = schema.MESSAGE.get_field_index("body")
_PREFIX_BYTES: Final = 8
_ALIGNMENT: Final = 8
#: Field numbers in the tables Message and RecordBatch of Arrow's format.
_HEADER, _BODY_LENGTH, _BUFFERS = 2, 3, 2
_NO_BYTES: Final = pa.py_buffer(b"")
_Numbers = npt.NDArray[np.signedinteger]


class FrameBuilder:
    """Collects the sections of the frame that starts at a position."""

    def __init__(self, schemas: Mapping[int, pa.Schema], *, seed: int, start: int) -> None:
        self.start: Final = start
        self._schemas = schemas
        self._seed = seed
        self.clear()

    def following(self) -> "FrameBuilder":
        """Return an empty builder for the next frame."""
        return FrameBuilder(self._schemas, seed=self._seed, start=self.start + self.length)

    def clear(self) -> None:
        """Discard the sections."""
        #: The length of the frame so far; 0 when nothing is staged.
        self.length: int = 0
        self._sections: int = 0
        # The first element is reserved for the frame header. Payloads are not copied.
        self._buffers: list[Bytes] = [b""]

    def stage(self, kind: int, batch: pa.RecordBatch) -> int:
        """Add a section, and return its position.

        Raises:
            ValueError: the batch does not have its kind's schema, or the frame would exceed 1 GiB.
        """
        schema = self._schemas.get(kind)
        if schema is not None and not batch.schema.equals(schema):
            raise ValueError(f"A batch of kind {kind} has another schema: {batch.schema}.")
        return self.stage_payload(kind, (frame.encode(batch, schema),))

    def stage_payload(self, kind: int, payload: Payload) -> int:
        """Add a section that ``frame.encode`` or an equivalent has serialized; return its position.

        Raises:
            ValueError: the frame would exceed 1 GiB.
        """
        position = self.start + (self.length or HEADER_BYTES)
        length, crc = bytes_of(payload), 0
        for piece in payload:
            crc = frame.crc32(piece, crc)
        section = SectionHeader(position, length, kind, crc)
        if section.end - self.start > frame.FRAME_BYTES_MAX:
            raise ValueError("The frame would exceed 1 GiB; commit what is staged first.")
        header = frame.pack_section_header(section, self._seed)
        padding = frame.aligned(length) - length
        self._buffers += (header, *payload, _PADDING[:padding])
        self._sections += 1
        self.length = section.end - self.start
        return position

    def buffers(self, *, synced: int) -> list[Bytes]:
        """Return the frame's bytes; ``synced``: the position up to which the log is on disk."""
        header = FrameHeader(self.start, self.length, synced, self._sections)
        self._buffers[0] = frame.pack_frame_header(header, self._seed)
        # With more buffers than the limit, sections are small on average and cheap to copy.
        many = len(self._buffers) > _BUFFERS_MAX
        return [b"".join(self._buffers)] if many else self._buffers


def payload_of(batch: pa.RecordBatch) -> Payload:
    """Serialize a batch by its kind's fixed schema; the caller must not change its bodies."""
    body = batch.column(_PLACE)
    if body.get_total_buffer_size() < _LARGE_BYTES or body.offset:
        return (batch.serialize(),)
    valid, offsets, data = body.buffers()
    first, last = offsets_of(body)[[0, len(body)]].tolist()
    if first or not last:
        return (batch.serialize(),)
    columns = batch.columns
    columns[_PLACE] = _empty_bodies(len(body), valid=valid, null_count=body.null_count)
    rest = pa.RecordBatch.from_arrays(columns, schema=schema.MESSAGE).serialize()
    return _with_bodies(rest, offsets=offsets, data=data.slice(0, last))


def bytes_of(payload: Payload) -> int:
    """Return the total length of the pieces."""
    return sum(map(len, payload))


def _with_bodies(rest: pa.Buffer, *, offsets: pa.Buffer, data: pa.Buffer) -> Payload:
    """Insert the body buffers into a batch that was serialized with empty bodies."""
    length = len(data) + -len(data) % _ALIGNMENT
    (metadata_bytes,) = struct.unpack_from("<i", rest, 4)
    start = _PREFIX_BYTES + metadata_bytes
    metadata = bytearray(memoryview(rest)[:start])
    buffers = _buffers(metadata, added=length)
    number = _data_buffer()
    at, size = buffers[number - 1].tolist()
    split = start + int(buffers[number, 0])
    buffers[number, 1] = len(data)
    buffers[number + 1 :, 0] += length
    view, end = memoryview(rest), start + at + size
    before = (metadata, view[start : start + at], offsets[:size], view[end:split])
    return (*before, data, bytes(length - len(data)), view[split:])


def _buffers(metadata: bytearray, *, added: int) -> Int64s:
    """Return offset and length of each buffer as a writable view, and enlarge the message body."""
    message = _target(metadata, _PREFIX_BYTES)
    body_length = _field(metadata, message, number=_BODY_LENGTH)
    (before,) = struct.unpack_from("<q", metadata, body_length)
    struct.pack_into("<q", metadata, body_length, before + added)
    header = _target(metadata, _field(metadata, message, number=_HEADER))
    vector = _target(metadata, _field(metadata, header, number=_BUFFERS))
    (count,) = struct.unpack_from("<I", metadata, vector)
    return np.frombuffer(metadata, np.int64, 2 * count, vector + 4).reshape(count, 2)


def _target(metadata: bytearray, at: int) -> int:
    """Follow an offset of the flatbuffer."""
    return at + int(struct.unpack_from("<I", metadata, at)[0])


def _field(metadata: bytearray, table: int, *, number: int) -> int:
    """Return the place of a field of a table; the field must be present."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (distance,) = struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)
    assert distance, "a field that Arrow always writes"
    return int(table + distance)


def _empty_bodies(n: int, *, valid: pa.Buffer | None, null_count: int) -> pa.Array:
    """Return n empty bodies: offsets of full length, and an empty data buffer."""
    buffers = [valid, pa.py_buffer(np.zeros(n + 1, np.int32)), _NO_BYTES]
    return pa.Array.from_buffers(pa.binary(), n, buffers, null_count=null_count)


@functools.cache
def _data_buffer() -> int:
    """Return the index of the buffer with the bytes of the bodies."""
    before = schema.MESSAGE.types[:_PLACE]
    return sum(len(pa.array([], of_type).buffers()) for of_type in before) + 2


class FilledForm:
    """Serialized template for batches of ``rows`` rows; texts are null. Thread-safe.

    For few rows, serializing costs more than copying. If the numbers of two batches of one schema
    and length have no nulls and all texts are null, their payloads differ only in the numbers.
    """

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        arrays = [
            pa.nulls(rows, field.type)
            if field.type == pa.string()
            else pa.array(np.zeros(rows, field.type.to_pandas_dtype()))
            for field in schema
        ]
        payload = pa.RecordBatch.from_arrays(arrays, schema=schema).serialize()
        batch = pa.ipc.read_record_batch(payload, schema)
        self._rows: Final = rows
        self._bytes: Final = payload.to_pybytes()
        self._places: Final = [
            (field.type.to_pandas_dtype(), column.buffers()[1].address - payload.address)
            for field, column in zip(schema, batch.columns, strict=True)
            if field.type != pa.string()
        ]

    def copy(self) -> tuple[pa.Buffer, list[_Numbers]]:
        """Return a new payload and its number columns as writable arrays."""
        payload = bytearray(self._bytes)
        columns = [np.frombuffer(payload, dtype, self._rows, at) for dtype, at in self._places]
        return pa.py_buffer(payload), columns
