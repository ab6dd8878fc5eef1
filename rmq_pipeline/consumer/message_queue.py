"""A message queue, as consumers name it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: The broker of every queue, unless a consumer is told that it has another name.
BROKER_NAME: Final = "rmq"


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """A queue of a topic; they are in the order of topic, broker and number."""

    topic: str
    #: ``room@name`` where allocation goes by rooms.
    broker_name: str
    queue_id: int

    @property
    def key(self) -> str:
        """The text that RocketMQ hashes: members in other languages come to the same owner."""
        return (
            f"MessageQueue [topic={self.topic}, brokerName={self.broker_name},"
            f" queueId={self.queue_id}]"
        )


def queues_of(topic: str, count: int, *, broker_name: str = BROKER_NAME) -> list[MessageQueue]:
    """The queues 0 to ``count`` of a topic."""
    return [MessageQueue(topic, broker_name, queue_id) for queue_id in range(count)]


def by_topic(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    """The queues of each topic, in order."""
    found: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        found.setdefault(queue.topic, []).append(queue)
    return found
