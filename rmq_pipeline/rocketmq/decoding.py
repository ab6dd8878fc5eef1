"""Messages of the protocol as columns of schema.SEND."""

import zlib
from collections.abc import Iterable, Sequence
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
from rmq_pipeline.rocketmq.small_columns import column_of
from rmq_pipeline.tables import absent

#: Looking up a name of the protocol's takes longer than all else that is asked of a message.
_PACKED: Final = int(Encoding.GZIP)
_ENCODINGS: Final = frozenset(Encoding.values())
#: zlib's number for: with the header and the trailer of gzip.
_GZIP: Final = 16 + zlib.MAX_WBITS
#: What each type of topic takes, of the types a message may say it is; "mixed" takes all but lite
#: and priority, as no queue of it is theirs.
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
#: Properties that a message keeps in fields of their own here.
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
BORN_HOST: Final = "__BORNHOST"


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one topic, held with their parts: reading a part anew makes an object again."""

    messages: list[Any]
    #: The system properties of each.
    properties: list[Any]
    #: As they are stored.
    bodies: list[bytes]
    #: Whether the hosts that they were born on are stored, too.
    keeps_hosts: bool = False

    @classmethod
    def of(cls, messages: Iterable[Any], *, keeps_hosts: bool = False) -> Self:
        """The messages of a request, with the bodies as they came."""
        held = list(messages)
        properties = [message.system_properties for message in held]
        return cls(held, properties, [message.body for message in held], keeps_hosts)

    @classmethod
    def joined(cls, batches: Sequence["Batch"]) -> "Batch":
        """Batches of one topic as one."""
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
        """Bytes of the bodies."""
        return sum(map(len, self.bodies))

    def kinds(self) -> set[int]:
        """The types that the messages say they are of."""
        return {properties.message_type for properties in self.properties}

    def is_packed(self) -> bool:
        """Whether a body has to be unpacked, which takes its time.

        Raises:
            MessageCorruptedError: nobody knows how one is encoded.
        """
        found = {properties.body_encoding for properties in self.properties}
        if not found <= _ENCODINGS:
            raise MessageCorruptedError(f"Nobody knows a body's encoding {max(found)}.")
        return _PACKED in found

    def unpacked(self) -> "Batch":
        """The batch with its bodies as they are stored.

        Raises:
            MessageCorruptedError: one does not unpack.
            MessageBodyTooLargeError: one is too large once it is unpacked, or all are together.
        """
        bodies, size = [], 0
        for body, properties in zip(self.bodies, self.properties, strict=True):
            plain = _unpacked(body) if properties.body_encoding == _PACKED else body
            bodies.append(plain)
            # A request of packed zeros is a thousandth of what it holds: it is not unpacked whole.
            size += len(plain)
            if size > limits.BATCH_BYTES:
                raise MessageBodyTooLargeError("The bodies of a request hold over 256 MiB.")
        return replace(self, bodies=bodies)

    def table(self) -> pa.Table:
        """As schema.SEND, without the columns that none of the messages has.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        return pa.table(self._given())

    def columns(self) -> dict[str, pa.Array]:
        """As the columns of schema.SEND, all of them.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        return absent(schema.SEND, len(self)) | self._given()

    def _given(self) -> dict[str, pa.Array]:
        """The columns that the messages have. A field at a time: no object is made for a message.

        Raises:
            IllegalMessageIdError: a message has no id.
        """
        own = self.properties
        ids = [p.message_id for p in own]
        if "" in ids:
            raise IllegalMessageIdError("A message has no id.")
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
        """Those that users have given, and what the protocol has fields for, but no column has."""
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
    """Refuse messages that say they are of a type the topic does not take.

    One that does not say is what its properties make it: the broker sees to that.

    Raises:
        MessageTypeError: the message and its type.
    """
    taken = _TYPES[topic_type]
    for kind in kinds:
        if kind and kind not in taken:
            name = MessageType.Name(kind) if kind in MessageType.values() else str(kind)
            raise MessageTypeError(f"A message is {name}, and topic {topic} is {topic_type}.")


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP)
    try:
        plain = unpacking.decompress(body, limits.BODY_BYTES + 1)
    except zlib.error as error:
        raise MessageCorruptedError(f"A body in GZIP does not unpack: {error}.") from error
    if len(plain) > limits.BODY_BYTES:
        raise MessageBodyTooLargeError("A body in GZIP holds over 4 MiB.")
    if not unpacking.eof:
        raise MessageCorruptedError("A body in GZIP ends before its end.")
    return plain


def _items(properties: Any) -> list[tuple[str, str]] | None:
    # items() of a map of protobuf's goes through collections.abc, which takes twice as long.
    found = [(name, properties[name]) for name in properties]
    if not found:
        return None
    if TRACE_CONTEXT in properties or BORN_HOST in properties:
        raise IllegalMessagePropertyError("A property name is reserved: the message has a field.")
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
    # What a client gives may be any number: it stays one that a column holds, and is refused later.
    ms = int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000
    return max(-_FAR_MS, min(ms, _FAR_MS))
