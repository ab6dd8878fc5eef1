"""Queue locks: the client of a consumer group that alone gets the messages of a queue."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.errors import QueueLockedError
from rmq_pipeline.store.events import Kind

#: group_id, topic_id, queue_id.
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class QueueLock:
    """Lock of a queue, valid until ``expires_at_ms``."""

    client_id: str
    expires_at_ms: int
    #: Since when the client holds the lock without a break, and when it last renewed it.
    locked_at_ms: int
    renewed_at_ms: int

    def holds(self, now_ms: int) -> bool:
        """Return True if it has not expired."""
        return self.expires_at_ms > now_ms

    def refusal(self, queue_id: int, *, topic: str, group: str) -> QueueLockedError:
        """Return the error for other clients."""
        error = QueueLockedError(
            f"Queue {queue_id} of topic {topic} is locked for consumer group {group} by client"
            f" {self.client_id} until {self.expires_at_ms} ms since 1970."
        )
        error.queue_id, error.holder = queue_id, self.client_id
        error.expires_at_ms = self.expires_at_ms
        return error


class QueueLocks:
    """Locks of all consumer groups, including expired ones."""

    def __init__(self) -> None:
        self._topics: dict[tuple[int, int], dict[int, QueueLock]] = {}

    def get(self, key: Key) -> QueueLock | None:
        """Return the last lock of a queue, expired or not."""
        return self._topics.get(key[:2], {}).get(key[2])

    def of_others(
        self, group_id: int, topic_id: int, *, client_id: str, now_ms: int
    ) -> Mapping[int, QueueLock]:
        """Return the valid locks of other clients on a topic, by queue_id."""
        found = self._topics.get((group_id, topic_id))
        if not found:
            return {}
        return {
            queue_id: lock
            for queue_id, lock in found.items()
            if lock.client_id != client_id and lock.holds(now_ms)
        }

    def of_group(self, group_id: int) -> Iterator[tuple[Key, QueueLock]]:
        """Yield all locks of a consumer group."""
        for (group, topic), locks in self._topics.items():
            if group == group_id:
                for queue_id, lock in locks.items():
                    yield (group, topic, queue_id), lock

    def put(self, key: Key, lock: QueueLock) -> None:
        """Set the lock of a queue."""
        self._topics.setdefault(key[:2], {})[key[2]] = lock

    def apply(self, events: EventRows) -> None:
        """Apply lock, renewal and unlock events; the last row decides."""
        key = (events.group_id, events.topic_id, events.queue_id)
        if events.kind == Kind.QUEUE_UNLOCKED:
            self._topics.get(key[:2], {}).pop(key[2], None)
            return
        lock = QueueLock(
            events.client_id or "",
            int(events.column("visible_at_ms", np.int64)[-1]),
            int(events.column("locked_at_ms", np.int64)[-1]),
            events.at_ms,
        )
        self.put(key, lock)

    def forget(self, *, topic_id: int = 0, group_id: int = 0) -> None:
        """Drop the locks of a deleted topic or consumer group."""
        for key in [key for key in self._topics if key[0] == group_id or key[1] == topic_id]:
            del self._topics[key]
