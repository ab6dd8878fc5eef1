"""The bytes of a call: Flight's protobuf messages, and the tables in them.

This module parses the messages itself, so that Arrow decodes nothing before the broker has checked
it. A call is an exchange or an action. The first message of an exchange contains its command as a
descriptor. The metadata of the other messages, concatenated, is its body: the Arrow streams of its
tables. An action is a single message with command and body.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import errors, limits

#: Field numbers of protobuf's messages FlightData, FlightDescriptor, Action and Result.
_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000
_COMMAND, _ACTION_BODY, _RESULT_BODY = 2, 2, 1
#: Fields are parsed in Python: many of them would hold the interpreter lock for seconds.
_MOST_FIELDS: Final = 64
#: Wire types of protobuf: a number, and bytes with their length.
_NUMBER, _BYTES = 0, 2
_METADATA_TAG: Final = bytes([_METADATA << 3 | _BYTES])
_RESULT_TAG: Final = bytes([_RESULT_BODY << 3 | _BYTES])
#: The only action type, and the size of the command's length prefix.
CALL: Final = "call"
_LENGTH_BYTES: Final = 4

#: Name of a table, and the Arrow stream of its rows.
Part = tuple[str, pa.Buffer]


class Message(NamedTuple):
    """A Flight message; a missing field is None."""

    command: bytes | None
    data: memoryview | None


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
    """
    whole = _read(message).get(_ACTION_BODY, memoryview(b""))
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


def body(parts: Iterable[Part]) -> Iterator[pa.Buffer]:
    """Yield the body of a call in slices, one per message."""
    joined: list[memoryview] = []
    size = 0
    for _, data in parts:
        rest = memoryview(data)
        while rest:
            taken = rest[: limits.FLIGHT_SLICE_BYTES - size]
            rest = rest[len(taken) :]
            joined.append(taken)
            size += len(taken)
            if size == limits.FLIGHT_SLICE_BYTES:
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
