"""Cache of encoded messages: a message for many groups is read and encoded once."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rmq_pipeline.broker.decide.deliver import Delivery
from rmq_pipeline.rocketmq.handle import Handle
from rmq_pipeline.rocketmq.protocol import Message

#: Size limits of the cache and of one message in it.
_KEPT_BYTES: Final = 8 << 20
_LARGE_BYTES: Final = 1 << 20
#: Estimated size of a message besides its body.
_OVERHEAD_BYTES: Final = 1024


class Place(NamedTuple):
    """A message's place in the commit log, which never changes."""

    topic_id: int
    position: int
    row: int


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
        Place(delivery.topic_id, position, row)
        for _, taken in delivery.taken
        for position, row in zip(taken.position.tolist(), taken.row.tolist(), strict=True)
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
