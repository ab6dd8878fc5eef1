"""The bytes of a call: Flight's protobuf messages, and the tables in them.

This module parses the messages itself, so that Arrow decodes nothing before the broker has checked
it. A call is an exchange or an action. The first message of an exchange contains its command as a
descriptor. The metadata of the other messages, concatenated, is its body: the Arrow streams of its
tables. An action is a single message with command and body.

Arrow decompresses a stream into as much memory as the stream claims. Compression is therefore
refused, and the headers of the stream show it without decompressing.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.errors import TableSchemaError

#: Field numbers of protobuf's messages FlightData, FlightDescriptor, Action and Result.
_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000
_COMMAND, _ACTION_TYPE, _ACTION_BODY, _RESULT_BODY = 2, 1, 2, 1
#: Fields are parsed in Python: many of them would hold the interpreter lock for seconds.
_MOST_FIELDS: Final = 64
#: Wire types of protobuf: a number, and bytes with their length.
_NUMBER, _BYTES = 0, 2
_METADATA_TAG: Final = bytes([_METADATA << 3 | _BYTES])
_RESULT_TAG: Final = bytes([_RESULT_BODY << 3 | _BYTES])
#: The action type of this library's client, and the size of the command's length prefix.
CALL: Final = "call"
_LENGTH_BYTES: Final = 4

#: Name of a table, and the Arrow stream of its rows.
Part = tuple[str, pa.Buffer]


class Message(NamedTuple):
    """A Flight message; a missing field is None."""

    command: bytes | None
    data: memoryview | None


class ForeignAction(Exception):  # noqa: N818 - nothing is wrong with it
    """An action that is not a call of this library's client, and is answered elsewhere."""

    def __init__(self, kind: str, body: bytes) -> None:
        super().__init__(kind)
        self.kind = kind
        self.body = body


def read_message(message: bytes) -> Message:
    """Decode a message of an exchange.

    Raises:
        RequestError: the message is invalid, or an Arrow table, as clients of older versions send.
    """
    fields = _read(message)
    if fields.get(_HEADER) or fields.get(_BODY):
        raise errors.RequestError(
            "The call sends a table as a Flight message of its own, as another version does.",
            remedy="Use the broker's version of rmq_pipeline.",
        )
    descriptor = _read(fields[_DESCRIPTOR]) if _DESCRIPTOR in fields else {}
    command = descriptor.get(_COMMAND)
    return Message(None if command is None else bytes(command), fields.get(_METADATA))


def read_action(message: bytes) -> Message:
    """Decode an action.

    Raises:
        RequestError: the action is invalid, or has no command.
        ForeignAction: it is not CALL.
    """
    fields = _read(message)
    whole = fields.get(_ACTION_BODY, memoryview(b""))
    kind = bytes(fields.get(_ACTION_TYPE, b""))
    if kind != CALL.encode():
        raise ForeignAction(kind.decode(errors="replace"), bytes(whole))
    start = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    if start > len(whole):
        raise errors.RequestError("A message of the call is not an action: it is too short.")
    return Message(bytes(whole[_LENGTH_BYTES:start]), whole[start:])


def action(command: bytes, parts: Iterable[Part]) -> bytes:
    """Encode the body of an action."""
    length = len(command).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((length, command, *(memoryview(data) for _, data in parts)))


def _read(message: bytes | memoryview) -> dict[int, memoryview]:
    try:
        return dict(_fields(memoryview(message)))
    except (IndexError, ValueError) as error:
        raise errors.RequestError("A message of the call is not a Flight message.") from error


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes fields of a protobuf message, by number."""
    at = count = 0
    while at < len(message):
        count += 1
        if count > _MOST_FIELDS:
            raise ValueError("more fields than any message of Flight's has")
        tag, at = _number(message, at)
        value, at = _number(message, at)
        if tag & 7 == _BYTES:
            if at + value > len(message):
                raise ValueError("a field beyond the message")
            yield tag >> 3, message[at : at + value]
            at += value
        elif tag & 7 != _NUMBER:
            raise ValueError("a kind of field that Flight does not have")


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """Decode a varint of protobuf; return it and its end."""
    found = shift = 0
    while True:
        byte = message[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def write_message(data: bytes | pa.Buffer) -> bytes:
    """Encode a message of an exchange with this metadata."""
    return _written(_METADATA_TAG, memoryview(data))


def write_result(data: bytes) -> bytes:
    """Encode a result of an action."""
    return _written(_RESULT_TAG, memoryview(data))


def _written(tag: bytes, data: memoryview) -> bytes:
    length, left = bytearray(), data.nbytes
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"".join((tag, length, data))


# ------------------------------------------------------------------------------------------- parts


def body(
    parts: Iterable[Part], *, slice_bytes: int = limits.FLIGHT_SLICE_BYTES
) -> Iterator[pa.Buffer]:
    """Yield the body of a call in slices, one per message."""
    joined: list[memoryview] = []
    size = 0
    for _, data in parts:
        rest = memoryview(data)
        while rest:
            taken = rest[: slice_bytes - size]
            rest = rest[len(taken) :]
            joined.append(taken)
            size += len(taken)
            if size == slice_bytes:
                yield _joined(joined)
                joined, size = [], 0
    if joined:
        yield _joined(joined)


def _joined(slices: list[memoryview]) -> pa.Buffer:
    return pa.py_buffer(slices[0] if len(slices) == 1 else b"".join(slices))


def cut(whole: pa.Buffer, lengths: Iterable[tuple[str, int]]) -> Iterator[Part]:
    """Yield the parts of a body without copying."""
    at = 0
    for name, size in lengths:
        yield name, whole.slice(at, size)
        at += size


_WRITE: Final = pa.ipc.IpcWriteOptions(use_threads=False)
# gRPC returns unaligned buffers: number columns are copied to aligned memory, bodies are not.
_READ: Final = pa.ipc.IpcReadOptions(
    use_threads=False, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific
)
#: Field numbers of Arrow's tables Message, DictionaryBatch and RecordBatch, and message types.
_HEADER_TYPE, _HEADER_FIELD, _DATA, _COMPRESSION = 1, 2, 1, 3
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
    header = _field(found, message, number=_HEADER_FIELD)
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


# ------------------------------------------------------------------------- Flight's own messages

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_ALIGNMENT: Final = 8
_HEADER_TAG: Final = bytes([_HEADER << 3 | _BYTES])
#: The tag of field 1000 takes two bytes.
_BODY_TAG: Final = bytes([(_BODY << 3 | _BYTES) & 0x7F | 0x80, (_BODY << 3 | _BYTES) >> 7])


class Data(NamedTuple):
    """A message FlightData of a foreign client, with a message of Arrow's IPC format."""

    command: bytes | None
    header: memoryview
    body: memoryview
    #: Bytes of the whole message.
    size: int


def read_data(message: bytes | memoryview) -> Data:
    """Decode a message with a piece of a table.

    Raises:
        RequestError: the message is invalid.
    """
    fields = _read(message)
    descriptor = _read(fields[_DESCRIPTOR]) if _DESCRIPTOR in fields else {}
    command = descriptor.get(_COMMAND)
    empty = memoryview(b"")
    return Data(
        None if command is None else bytes(command),
        fields.get(_HEADER, empty),
        fields.get(_BODY, empty),
        len(message),
    )


class Stream:
    """Joins the pieces of a table to an Arrow stream."""

    def __init__(self, most_bytes: int) -> None:
        """Create an empty stream for messages of ``most_bytes`` together."""
        self._most_bytes = most_bytes
        self._received = 0
        self._joined = bytearray()

    def add(self, data: Data) -> None:
        """Copy a piece; nothing of its message is kept.

        Raises:
            MessageBodyTooLargeError: the messages exceed the limit, or the stream does.
        """
        self._received += data.size
        pad = -data.header.nbytes % _ALIGNMENT
        # Alignment may make a stream of many small pieces longer than its messages.
        size = len(self._joined) + data.header.nbytes + pad + data.body.nbytes
        if max(self._received, size) > self._most_bytes:
            raise errors.MessageBodyTooLargeError(
                f"The parameters have more than {self._most_bytes} bytes.",
                remedy="Bind smaller values.",
            )
        if data.header:
            length = (data.header.nbytes + pad).to_bytes(4, "little")
            for piece in (_CONTINUATION, length, data.header, b"\0" * pad, data.body):
                self._joined += piece

    def whole(self) -> pa.Buffer:
        """Return the stream."""
        return pa.py_buffer(b"".join((self._joined, _CONTINUATION, b"\0\0\0\0")))


def write_data(table: pa.Table, *, with_schema: bool) -> Iterator[bytes]:
    """Yield a table as messages of foreign clients.

    Args:
        table: its rows.
        with_schema: begin with the message of the schema.
    """
    for message in pa.ipc.MessageReader.open_stream(pack(table)):
        if message.type == "schema" and not with_schema:
            continue
        header = _written(_HEADER_TAG, memoryview(message.metadata))
        body = memoryview(message.body) if message.body is not None else memoryview(b"")
        yield b"".join((header, _written(_BODY_TAG, body)))
