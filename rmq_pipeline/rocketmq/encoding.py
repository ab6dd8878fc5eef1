"""Rows of tables as the protocol's messages, which clients receive."""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from google.protobuf.timestamp_pb2 import Timestamp

from rmq_pipeline.broker.verbs.on_loop import Delivery
from rmq_pipeline.message import PRIORITY, TRANSACTION_ID
from rmq_pipeline.rocketmq.decoding import BORN_HOST, TRACE_CONTEXT
from rmq_pipeline.rocketmq.protocol import (
    DeadLetterQueue,
    Digest,
    DigestType,
    Encoding,
    Message,
    MessageType,
    SystemProperties,
)
from rmq_pipeline.topic import DLQ_PREFIX, TopicType

#: Bit of delivery numbers whose lease the broker renews; random delivery numbers are smaller.
PROLONGED: Final = 1 << 62
#: The layout of receipt.py.
_LAYOUT: Final = struct.Struct(">qqiii")


class Handle(NamedTuple):
    """Fields of a receipt handle, in the order of its bytes."""

    delivery: int
    queue_offset: int
    queue_id: int
    topic_id: int
    group_id: int

    @property
    def is_prolonged(self) -> bool:
        """True if the broker renews the lease for a push consumer."""
        return bool(self.delivery & PROLONGED)

    def text(self) -> str:
        """Return the handle as clients get it: upper-case hex."""
        return _LAYOUT.pack(*self).hex().upper()


def parse(text: str) -> Handle | None:
    """Return the fields of a handle; None if the text is not a handle."""
    try:
        return Handle._make(_LAYOUT.unpack(bytes.fromhex(text)))
    except (ValueError, struct.error):
        return None


#: Message types by topic type; in a mixed topic the row tells the type.
_TYPES: Final[Mapping[str, int]] = {
    "fifo": MessageType.FIFO,
    "delay": MessageType.DELAY,
    "transaction": MessageType.TRANSACTION,
    "priority": MessageType.PRIORITY,
    "lite": MessageType.LITE,
}
#: Numbers, because looking up an enum by name takes as long as a digest.
_NORMAL: Final[int] = MessageType.NORMAL
_FIFO: Final[int] = MessageType.FIFO
_DELAY: Final[int] = MessageType.DELAY
_MD5: Final[int] = DigestType.MD5
_IDENTITY: Final[int] = Encoding.IDENTITY
#: The highest priority is an int32.
_MOST, _DIGITS = 2**31 - 1, 10
#: Columns that only the messages of a delivery have.
_DELIVERY: Final = ("delivery_attempt", "receipt_handle")


def timestamp(at_ms: int) -> Timestamp:
    """Return a time as the protocol's Timestamp."""
    return Timestamp(seconds=at_ms // 1000, nanos=at_ms % 1000 * 1_000_000)


def messages_of(table: pa.Table, *, topic: Any, type: TopicType, name: str) -> list[Any]:
    """Return the protocol's messages of schema.READ, schema.RECEIVED or schema.CHECK, row for row.

    Args:
        topic: the Resource as the client names it.
        type: of the topic.
        name: of the topic, as the broker names it.
    """
    rows = table.to_pylist()
    dead = name.startswith(DLQ_PREFIX)
    return [_message(row, topic=topic, type=type, dead=dead) for row in rows]


def _message(row: Mapping[str, Any], *, topic: Any, type: TopicType, dead: bool) -> Any:
    body, group = row["body"], row.get("message_group")
    properties = dict(row["properties"] or ())
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system = SystemProperties(
        tag=row["tag"],
        keys=row["keys"],
        message_id=row["message_id"],
        body_digest=Digest(type=_MD5, checksum=digest),
        body_encoding=_IDENTITY,
        message_type=_type_of(row, type),
        born_timestamp=timestamp(row["born_at_ms"]),
        store_timestamp=timestamp(row["stored_at_ms"]),
        queue_id=row.get("queue_id"),
        queue_offset=row.get("queue_offset"),
        **{column: row[column] for column in _DELIVERY if column in row},
    )
    if (deliver_at_ms := row.get("deliver_at_ms")) is not None:
        system.delivery_timestamp.CopyFrom(timestamp(deliver_at_ms))
    if group is not None:
        _name_group(system, properties, type=type, group=group)
    if type == "priority" or (dead and PRIORITY in properties):
        _name_priority(system, properties, type=type)
    if properties:
        system.born_host = properties.pop(BORN_HOST, "")
        if (trace := properties.pop(TRACE_CONTEXT, None)) is not None:
            system.trace_context = trace
    if (transaction_id := row.get("transaction_id")) is not None:  # the half message of a check
        properties[TRANSACTION_ID] = transaction_id
    if dead:
        origin = DeadLetterQueue(
            topic=properties.get("DLQ_ORIGIN_TOPIC", ""),
            message_id=properties.get("DLQ_ORIGIN_MESSAGE_ID", ""),
        )
        system.dead_letter_queue.CopyFrom(origin)
    return Message(topic=topic, user_properties=properties, system_properties=system, body=body)


def _name_group(system: Any, properties: dict[str, str], *, type: TopicType, group: str) -> None:
    if type == "lite":
        system.lite_topic = group
    else:
        system.message_group = group
        properties["__SHARDINGKEY"] = group


def _name_priority(system: Any, properties: dict[str, str], *, type: TopicType) -> None:
    kept = properties.get(PRIORITY, "")
    if kept.isascii() and kept.isdecimal() and len(kept) <= _DIGITS and int(kept) <= _MOST:
        system.priority = int(properties.pop(PRIORITY))
    elif type == "priority":  # an old message: its queue stands for the priority
        system.priority = system.queue_id


def _type_of(row: Mapping[str, Any], type: TopicType) -> int:
    if type in _TYPES:
        return _TYPES[type]
    if row.get("deliver_at_ms") is not None:
        return _DELAY
    return _FIFO if row.get("message_group") else _NORMAL


#: Size limits of the cache and of one message in it.
_KEPT_BYTES: Final = 8 << 20
_LARGE_BYTES: Final = 1 << 20
#: Estimated size of a message besides its body.
_OVERHEAD_BYTES: Final = 1024


class Place(NamedTuple):
    """A delivered message's place in its queue, which no other message ever gets.

    The place in the commit log would not do: a delivery of an older message does not know it yet.
    """

    topic_id: int
    queue_id: int
    queue_offset: int


class Recent:
    """LRU cache of encoded messages by place. Used on the event loop only."""

    def __init__(self) -> None:
        self._messages: OrderedDict[Place, tuple[Any, int]] = OrderedDict()
        self._used = 0

    def get(self, place: Place) -> Any | None:
        """Return a cached message; copy it, because a delivery adds fields of its own."""
        found = self._messages.get(place)
        if found is None:
            return None
        self._messages.move_to_end(place)
        return found[0]

    def put(self, place: Place, message: Any) -> None:
        """Store a copy of a message, unless it is large."""
        size = len(message.body) + _OVERHEAD_BYTES
        if size > _LARGE_BYTES or place in self._messages:
            return
        copy = Message()
        copy.CopyFrom(message)
        self._messages[place] = copy, size
        self._used += size
        while self._used > _KEPT_BYTES:
            self._used -= self._messages.popitem(last=False)[1][1]


def places_of(delivery: Delivery) -> list[Place]:
    """Return the places of a delivery's messages, in their order."""
    return [
        Place(delivery.topic_id, queue_id, offset)
        for queue_id, taken in delivery.taken
        for offset in taken.offset.tolist()
    ]


def copies(known: Sequence[Any], delivery: Delivery, *, topic: Any) -> list[Any]:
    """Return cached messages as messages of a delivery.

    Args:
        known: of each message, as ``get`` returned it.
        delivery: the delivery whose handles and attempts the copies get.
        topic: the Resource as this client names it.
    """
    given = (
        (Handle(delivery.delivery, offset, queue_id, delivery.topic_id, delivery.group_id), attempt)
        for queue_id, taken in delivery.taken
        for offset, attempt in zip(taken.offset.tolist(), taken.attempt.tolist(), strict=True)
    )
    return [
        _copy(one, handle.text(), attempt=attempt, topic=topic)
        for one, (handle, attempt) in zip(known, given, strict=True)
    ]


def _copy(known: Any, handle: str, *, attempt: int, topic: Any) -> Any:
    message = Message()
    message.CopyFrom(known)
    message.topic.CopyFrom(topic)
    message.system_properties.receipt_handle = handle
    message.system_properties.delivery_attempt = attempt
    return message
