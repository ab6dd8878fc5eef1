"""Messages of the protocol as columns of schema.SEND."""

import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.errors import (
    IllegalMessageIdError,
    IllegalMessagePropertyError,
    MessageBodyTooLargeError,
    MessageCorruptedError,
    MessageTypeError,
)
from rmq_pipeline.rocketmq.protocol import Encoding, MessageType
from rmq_pipeline.tables import absent

#: Numbers, because looking up an enum by name takes longer than the rest of decoding a message.
_PACKED: Final = int(Encoding.GZIP)
_ENCODINGS: Final = frozenset(Encoding.values())
#: zlib's window size for data with a gzip header and trailer.
_GZIP: Final = 16 + zlib.MAX_WBITS
#: The message types that each type of topic takes. A mixed topic takes neither lite nor priority
#: messages: it has no queues for them.
_TYPES: Final[dict[str, frozenset[int]]] = {
    "normal": frozenset((MessageType.NORMAL,)),
    "fifo": frozenset((MessageType.FIFO,)),
    "delay": frozenset((MessageType.DELAY,)),
    "transaction": frozenset((MessageType.TRANSACTION,)),
    "lite": frozenset((MessageType.LITE,)),
    "priority": frozenset((MessageType.PRIORITY,)),
    "mixed": frozenset(
        (MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION)
    ),
}
_FAR_MS: Final = 2**52
#: Properties that are protocol fields of their own on the wire.
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
BORN_HOST: Final = "__BORNHOST"


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one topic with their parts; protobuf makes a new object at each access."""

    messages: list[Any]
    #: The system properties of each message.
    properties: list[Any]
    #: The bodies as they are stored.
    bodies: list[bytes]
    #: True: the born hosts are stored, too.
    keeps_hosts: bool = False

    @classmethod
    def of(cls, messages: Iterable[Any], *, keeps_hosts: bool = False) -> Self:
        """Return the messages of a request, with the bodies as they came."""
        held = list(messages)
        properties = [message.system_properties for message in held]
        return cls(held, properties, [message.body for message in held], keeps_hosts)

    @classmethod
    def joined(cls, batches: Sequence["Batch"]) -> "Batch":
        """Return several batches of one topic as one."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            [message for batch in batches for message in batch.messages],
            [properties for batch in batches for properties in batch.properties],
            [body for batch in batches for body in batch.bodies],
            batches[0].keeps_hosts,
        )

    def __len__(self) -> int:
        return len(self.messages)

    def size(self) -> int:
        """Return the bytes of all bodies."""
        return sum(map(len, self.bodies))

    def kinds(self) -> set[int]:
        """Return the types that the messages declare."""
        return {properties.message_type for properties in self.properties}

    def is_packed(self) -> bool:
        """Return whether any body is compressed; decompressing is too slow for the loop's thread.

        Raises:
            MessageCorruptedError: a body has an unknown encoding.
        """
        found = {properties.body_encoding for properties in self.properties}
        if not found <= _ENCODINGS:
            raise MessageCorruptedError(f"Body encoding {max(found)} is unknown.")
        return _PACKED in found

    def unpacked(self) -> "Batch":
        """Return the batch with decompressed bodies.

        Raises:
            MessageCorruptedError: a body is not valid gzip.
            MessageBodyTooLargeError: a body, or all together, are too large decompressed.
        """
        bodies, size = [], 0
        for body, properties in zip(self.bodies, self.properties, strict=True):
            plain = _unpacked(body) if properties.body_encoding == _PACKED else body
            bodies.append(plain)
            # Zeros compress by a factor of 1,000: stop before a small request fills the memory.
            size += len(plain)
            if size > limits.BATCH_BYTES:
                raise MessageBodyTooLargeError(
                    "The decompressed bodies of the request exceed 256 MiB."
                )
        return replace(self, bodies=bodies)

    def table(self) -> pa.Table:
        """Return a table of schema.SEND without the columns that no message has.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        return pa.table(self._given())

    def columns(self) -> dict[str, pa.Array]:
        """Return all columns of schema.SEND, by name.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        return absent(schema.SEND, len(self)) | self._given()

    def _given(self) -> dict[str, pa.Array]:
        """Return the columns that the messages have, built field by field: no object per message.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        own = self.properties
        ids = [p.message_id for p in own]
        if "" in ids:
            raise IllegalMessageIdError(
                "A message has no id.", remedy="Set message_id in its system properties."
            )
        columns: dict[str, list[Any]] = {"body": self.bodies, "message_id": ids}
        given: dict[str, list[Any]] = {
            "tag": [p.tag or None for p in own],
            "message_group": [p.message_group or None for p in own],
            "lite_topic": [p.lite_topic or None for p in own],
            "keys": [p.keys[:] or None for p in own],
            "properties": self._properties(),
            "deliver_at_ms": _times(own, "delivery_timestamp"),
            "born_at_ms": _times(own, "born_timestamp"),
            "priority": [p.priority if p.HasField("priority") else None for p in own],
        }
        columns |= {name: values for name, values in given.items() if not _all_none(values)}
        return {name: column_of(name, values) for name, values in columns.items()}

    def _properties(self) -> list[list[tuple[str, str]] | None]:
        """Return the user properties, with the protocol fields that have no column."""
        found = [_items(message.user_properties) for message in self.messages]
        own = self.properties
        if any(traces := [p.trace_context for p in own]):
            found = _with(found, TRACE_CONTEXT, values=traces)
        return (
            _with(found, BORN_HOST, values=[p.born_host for p in own])
            if self.keeps_hosts
            else found
        )


def check_types(kinds: Iterable[int], topic_type: str, *, topic: str) -> None:
    """Refuse messages that declare a type the topic does not take.

    The broker derives the type of a message without one from its properties.

    Raises:
        MessageTypeError: the topic does not take the declared type.
    """
    taken = _TYPES[topic_type]
    for kind in kinds:
        if kind and kind not in taken:
            name = MessageType.Name(kind) if kind in MessageType.values() else str(kind)
            raise MessageTypeError(
                f"A message is of type {name}, but topic {topic} is of type {topic_type}."
            )


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP)
    try:
        plain = unpacking.decompress(body, limits.BODY_BYTES + 1)
    except zlib.error as error:
        raise MessageCorruptedError(f"A gzip body is damaged: {error}.") from error
    if len(plain) > limits.BODY_BYTES:
        raise MessageBodyTooLargeError("A decompressed body exceeds 4 MiB.")
    if not unpacking.eof:
        raise MessageCorruptedError("A gzip body is truncated.")
    return plain


def _items(properties: Any) -> list[tuple[str, str]] | None:
    # protobuf's items() goes through collections.abc, which takes twice as long.
    found = [(name, properties[name]) for name in properties]
    if not found:
        return None
    if TRACE_CONTEXT in properties or BORN_HOST in properties:
        raise IllegalMessagePropertyError(
            f"The property names {TRACE_CONTEXT} and {BORN_HOST} are reserved.",
            remedy="Set trace_context or born_host in the system properties instead.",
        )
    return found


def _with(
    found: list[list[tuple[str, str]] | None], name: str, *, values: list[str]
) -> list[list[tuple[str, str]] | None]:
    return [
        [*(of_row or ()), (name, value)] if value else of_row
        for of_row, value in zip(found, values, strict=True)
    ]


def _all_none(values: list[Any]) -> bool:
    return values.count(None) == len(values)


def _times(own: list[Any], field: str) -> list[int | None]:
    return [_ms(getattr(p, field)) if p.HasField(field) else None for p in own]


def _ms(timestamp: Any) -> int:
    # Clients may send any number. Clamped, it fits into the column and is refused later.
    ms = int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000
    return max(-_FAR_MS, min(ms, _FAR_MS))


#: Above this many values pa.array is as fast.
FEW_ROWS: Final = 8
_TWO: Final = struct.Struct("=2i")
_TYPE_OF: Final = {field.name: field.type for field in schema.SEND}
_STRING: Final = pa.string()
_ENTRIES: Final = schema.PROPERTIES.field(0).type


def column_of(name: str, values: list[Any]) -> pa.Array:
    """Return a column of schema.SEND."""
    of_type = _TYPE_OF[name]
    if len(values) > FEW_ROWS:
        return pa.array(values, of_type)
    return _MAKERS[name](values, of_type)


def _bodies(values: list[bytes], of_type: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(
        of_type, len(values), [None, _bounds(values), pa.py_buffer(b"".join(values))]
    )


def _texts(values: list[str | None], of_type: pa.DataType) -> pa.Array:
    if len(values) == 1 and values[0] is not None:
        only = values[0].encode()
        buffers = [None, pa.py_buffer(_TWO.pack(0, len(only))), pa.py_buffer(only)]
        return pa.Array.from_buffers(of_type, 1, buffers)
    parts = [b"" if value is None else value.encode() for value in values]
    buffers = [_present(values), _bounds(parts), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(of_type, len(values), buffers)


def _lists(values: list[list[str] | None], of_type: pa.DataType) -> pa.Array:
    lists = [value or [] for value in values]
    texts = _texts(list(itertools.chain.from_iterable(lists)), _STRING)
    buffers = [_present(values), _bounds(lists)]
    return pa.Array.from_buffers(of_type, len(values), buffers, children=[texts])


def _maps(values: list[list[tuple[str, str]] | None], of_type: pa.DataType) -> pa.Array:
    lists = [value or [] for value in values]
    pairs = list(itertools.chain.from_iterable(lists))
    texts = [_texts([pair[at] for pair in pairs], _STRING) for at in (0, 1)]
    entries = pa.Array.from_buffers(_ENTRIES, len(pairs), [None], children=texts)
    buffers = [_present(values), _bounds(lists)]
    return pa.Array.from_buffers(of_type, len(values), buffers, children=[entries])


def _numbers(values: list[int | None], of_type: pa.DataType) -> pa.Array:
    form = f"={len(values)}{'q' if of_type == pa.int64() else 'i'}"
    packed = struct.pack(form, *(value or 0 for value in values))
    return pa.Array.from_buffers(of_type, len(values), [_present(values), pa.py_buffer(packed)])


def _present(values: list[Any]) -> pa.Buffer | None:
    """Return the validity bitmap; None if no value is null."""
    if None not in values:
        return None
    bits = sum(1 << at for at, value in enumerate(values) if value is not None)
    return pa.py_buffer(bits.to_bytes(8 * (len(values) // 64 + 1), "little"))


def _bounds(parts: Sequence[Any]) -> pa.Buffer:
    """Return the offsets buffer of variable-length values."""
    if len(parts) == 1:
        return pa.py_buffer(_TWO.pack(0, len(parts[0])))
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    return pa.py_buffer(struct.pack(f"={len(ends)}i", *ends))


_MAKERS: Final[dict[str, Callable[[list[Any], pa.DataType], pa.Array]]] = {
    "body": _bodies,
    "message_id": _texts,
    "tag": _texts,
    "message_group": _texts,
    "lite_topic": _texts,
    "keys": _lists,
    "properties": _maps,
    "deliver_at_ms": _numbers,
    "born_at_ms": _numbers,
    "priority": _numbers,
}
