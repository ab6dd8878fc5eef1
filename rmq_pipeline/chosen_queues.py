"""Checks of the queues that a producer chose for its messages (RocketMQ's MessageQueueSelector)."""

from collections.abc import Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import IllegalQueueError, MessageTypeError
from rmq_pipeline.topic import Topic

_LATER: Final = "the broker chooses the queue when it is delivered"
_COMMITTED: Final = "the broker chooses the queue when it is committed"
_BY_GROUP: Final = "its message_group chooses the queue"
#: By topic type: the reason why a producer cannot choose a message's queue.
_REFUSED: Final[Mapping[str, str]] = {
    "fifo": _BY_GROUP,
    "lite": "its lite_topic chooses the queue",
    "priority": "its priority chooses the queue",
    "delay": _LATER,
    "transaction": _COMMITTED,
}


def check_chosen_queues(topic: Topic, columns: Mapping[str, pa.Array], *, half: bool) -> None:
    """Check the column queue_id of schema.SEND; ``half``: the messages begin transactions.

    Raises:
        MessageTypeError: the queue of a message is chosen in another way.
        IllegalQueueError: the topic has no such queue.
    """
    chosen = columns["queue_id"]
    if chosen.null_count == len(chosen):
        return
    given = pc.is_valid(chosen)
    if why := _COMMITTED if half else _REFUSED.get(topic.type):
        _refuse(given, why)
    _refuse(pc.and_(given, pc.is_valid(columns["message_group"])), _BY_GROUP)
    for name in ("delay_level", "deliver_at_ms"):
        _refuse(pc.and_(given, pc.is_valid(columns[name])), _LATER)
    beyond = pc.fill_null(pc.or_(pc.less(chosen, 0), pc.greater_equal(chosen, topic.queues)), False)
    if pc.any(beyond).as_py():
        row = pc.index(beyond, True).as_py()
        raise IllegalQueueError(f"Row {row}: topic {topic.name} has no queue {chosen[row]}.")


def _refuse(bad: pa.Array, why: str) -> None:
    """Raise an error that names the first bad row, if there is one."""
    if pc.any(bad).as_py():
        row = pc.index(bad, True).as_py()
        raise MessageTypeError(
            f"Row {row}: it has a queue_id, but {why}.",
            remedy="Send it without a queue_id, or to a topic of type normal.",
        )
