"""Arrow streams in the parts of calls and in answers: written, checked, read.

Arrow decompresses a stream into as much memory as the stream claims. Compression is therefore
refused, and the headers of the stream show it without decompressing.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.flight.framing import Part

_WRITE: Final = pa.ipc.IpcWriteOptions(use_threads=False)
# gRPC returns unaligned buffers: number columns are copied to aligned memory, bodies are not.
_READ: Final = pa.ipc.IpcReadOptions(
    use_threads=False, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific
)
#: Field numbers of Arrow's tables Message, DictionaryBatch and RecordBatch, and message types.
_HEADER_TYPE, _HEADER, _DATA, _COMPRESSION = 1, 2, 1, 3
_DICTIONARY, _BATCH = 2, 3
#: The size of larger tables is computed first: a growing buffer takes twice its memory.
_SIZED_BYTES: Final = limits.MIB // 4
#: Maximum characters of a value in an error text.
_SHOWN: Final = 200


def pack(table: pa.Table) -> pa.Buffer:
    """Serialize a table to an Arrow stream, in a buffer of exactly its length."""
    if any(column.num_chunks > 1 for column in table.columns):
        # Many small batches cost the broker more than this copy costs the client.
        table = table.combine_chunks()
    if table.nbytes < _SIZED_BYTES:
        sink = pa.BufferOutputStream()
        _write(table, sink)
        return sink.getvalue()
    counted = pa.MockOutputStream()
    _write(table, counted)
    buffer = pa.allocate_buffer(counted.size())
    with pa.FixedSizeBufferWriter(buffer) as exact:
        _write(table, exact)
    return buffer


def _write(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema, options=_WRITE) as writer:
        writer.write_table(table)


def read(name: str, data: pa.Buffer) -> pa.Table:
    """Decode the table of a stream without copying its buffers.

    Raises:
        TableSchemaError: the stream is compressed or damaged.
    """
    check_stream(data)
    try:
        return pa.ipc.open_stream(data, options=_READ).read_all()
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        said = str(error)[:_SHOWN]
        raise TableSchemaError(f"{name} is not an Arrow table: {said}.") from error


def unpack(parts: Iterable[Part]) -> dict[str, pa.Table]:
    """Return the tables of these parts by name, without copying the buffers from gRPC."""
    found: dict[str, list[pa.Table]] = defaultdict(list)
    for name, data in parts:
        found[name].append(read(name, data))
    return {name: together(tables) for name, tables in found.items()}


def together(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate the pieces of a table.

    Raises:
        TableSchemaError: the pieces have different columns.
    """
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        said = str(error)[:_SHOWN]
        raise TableSchemaError(f"The batches of a table have different schemas: {said}.") from error


def check_stream(data: pa.Buffer) -> None:
    """Refuse an Arrow stream that is compressed or damaged.

    Raises:
        TableSchemaError: the stream is compressed or damaged.
    """
    try:
        for message in pa.ipc.MessageReader.open_stream(data):
            if _is_compressed(message.metadata):
                raise TableSchemaError(
                    "A table is compressed: send it without compression in its IPC options."
                )
    except (pa.ArrowException, struct.error, OSError) as error:
        raise TableSchemaError(f"A part is not an Arrow stream: {str(error)[:200]}.") from error


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return True if a message declares compressed buffers; reads its flatbuffer by hand."""
    found = memoryview(metadata)
    message = _target(found, 0)
    kind = _field(found, message, number=_HEADER_TYPE)
    header = _field(found, message, number=_HEADER)
    if kind is None or header is None or found[kind] not in {_DICTIONARY, _BATCH}:
        return False
    batch: int | None = _target(found, header)
    if found[kind] == _DICTIONARY:
        data = _field(found, _target(found, header), number=_DATA)
        batch = None if data is None else _target(found, data)
    return batch is not None and _field(found, batch, number=_COMPRESSION) is not None


def _target(found: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", found, at)[0])


def _field(found: memoryview, table: int, *, number: int) -> int | None:
    vtable = table - struct.unpack_from("<i", found, table)[0]
    if vtable < 0:
        raise struct.error("a table before the message")
    (length,) = struct.unpack_from("<H", found, vtable)
    if 4 + 2 * number >= length:
        return None
    (distance,) = struct.unpack_from("<H", found, vtable + 4 + 2 * number)
    at = table + distance
    if at >= len(found):
        raise struct.error("a field beyond the message")
    return at if distance else None
