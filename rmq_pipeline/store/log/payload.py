"""The payload of a section of messages in pieces, so that large bodies are not copied.

Concatenated, the pieces equal the result of ``RecordBatch.serialize``. All columns but the bodies
are serialized. The buffer of the bodies is then inserted, and the buffer list of the metadata
updated:

    0xFFFFFFFF, length of the metadata, Message { bodyLength, RecordBatch { buffers [] } }, buffers

A flatbuffer table begins with the distance back to its vtable, which lists the places of its
fields.
"""

import functools
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.message import Int64s, offsets_of
from rmq_pipeline.store.log.log_file import Bytes

Payload: TypeAlias = Sequence[Bytes]

#: Smaller bodies are copied: that takes no longer than writing a second piece.
_LARGE_BYTES: Final = 128 * 1024
_PLACE: Final = schema.MESSAGE.get_field_index("body")
_PREFIX_BYTES: Final = 8
_ALIGNMENT: Final = 8
#: Field numbers in the tables Message and RecordBatch of Arrow's format.
_HEADER, _BODY_LENGTH, _BUFFERS = 2, 3, 2
_NO_BYTES: Final = pa.py_buffer(b"")


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
    return _entered(rest, offsets=offsets, data=data.slice(0, last))


def bytes_of(payload: Payload) -> int:
    """Return the total length of the pieces."""
    return sum(map(len, payload))


def _entered(rest: pa.Buffer, *, offsets: pa.Buffer, data: pa.Buffer) -> Payload:
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
