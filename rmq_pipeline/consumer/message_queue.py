"""Message queues, as consumers name them, and subscriptions to topics."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rmq_pipeline.filter.expression import compile_filter

#: Default broker name of every queue.
BROKER_NAME: Final = "rmq"


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """Queue of a topic; sorts by topic, broker name and queue id."""

    topic: str
    #: ``room@name`` for strategies that use machine rooms.
    broker_name: str
    queue_id: int

    @property
    def key(self) -> str:
        """Text that RocketMQ hashes, so that members in other languages compute the same owner."""
        return (
            f"MessageQueue [topic={self.topic}, brokerName={self.broker_name},"
            f" queueId={self.queue_id}]"
        )


def queues_of(topic: str, count: int, *, broker_name: str = BROKER_NAME) -> list[MessageQueue]:
    """Return the queues [0, count) of a topic."""
    return [MessageQueue(topic, broker_name, queue_id) for queue_id in range(count)]


def by_topic(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    """Group queues by topic, each list sorted."""
    found: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        found.setdefault(queue.topic, []).append(queue)
    return found


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topic with a filter; an invalid filter raises here, before any call to the broker."""

    topic: str
    #: ``*``, tags joined by ||, or a SQL92 condition.
    filter: str = "*"
    #: "tag" or "sql92".
    filter_type: str = "tag"

    def __post_init__(self) -> None:
        compile_filter(self.filter, self.filter_type)
