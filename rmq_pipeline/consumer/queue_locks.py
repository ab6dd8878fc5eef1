"""Queue locks of this client at the broker, with the time that each lock is trusted."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.errors import BusyError, RocketMQError
from rmq_pipeline.verbs import Verbs

#: Duration of a lock at the broker.
LOCK_MS: Final = 60_000
RENEW_S: Final = 20.0
#: The first renewal is early: a lock taken at the start of a slow call soon gets its full time.
FIRST_RENEW_S: Final = 1.0


@dataclass(slots=True)
class Renewed:
    """Result of a renewal of locks."""

    #: Queues that other clients have locked.
    lost: list[MessageQueue] = field(default_factory=list)
    #: Queues locked again after a gap, in which another client may have had them.
    doubtful: list[MessageQueue] = field(default_factory=list)
    #: Error of a failed call; its locks are unchanged.
    refusal: RocketMQError | None = None


class QueueLocks:
    """Queue locks of this client; one thread calls it, ``is_live`` is thread-safe."""

    def __init__(
        self,
        verbs: Verbs,
        *,
        group: str,
        client_id: str,
        lock_ms: int = LOCK_MS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to lock queues.

        Args:
            lock_ms: the duration of a lock at the broker; this client trusts a lock for half of
                it, because clocks and calls may be slow.
        """
        self._verbs = verbs
        self._group, self._client_id = group, client_id
        self._lock_ms, self._now_s = lock_ms, now_s
        #: Time before the last successful lock call of each queue, a lower bound of the lock time.
        self._since: dict[MessageQueue, float] = {}
        #: Queues renewed too late, with the time before that call.
        self._doubted: dict[MessageQueue, float] = {}

    def is_live(self, queue: MessageQueue) -> bool:
        """Return True if the queue is locked, and recently enough that no other client has it."""
        since = self._since.get(queue)
        return since is not None and (self._now_s() - since) * 2000 < self._lock_ms

    def is_locked(self, queue: MessageQueue) -> bool:
        """Return True if the queue was locked and no call has reported a loss."""
        return queue in self._since

    def acquire(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues of one topic; return those that no other client has locked."""
        asked_at = self._now_s()
        got = self._ask(list(queues))
        self._since.update(dict.fromkeys(got, asked_at))
        return got

    def renew(self, queues: Iterable[MessageQueue]) -> Renewed:
        """Renew locks; a doubtful queue becomes live with ``trust``."""
        renewed = Renewed()
        for of_topic in by_topic(queues).values():
            asked_at = self._now_s()
            try:
                got = set(self._ask(of_topic))
            except RocketMQError as error:
                renewed.refusal = error
                if isinstance(error, BusyError):
                    break  # further calls would also wait for the unreachable broker
                continue
            # The broker may have renewed the lock as late as now, after another client's lock.
            heard_at = self._now_s()
            for queue in of_topic:
                if queue not in got:
                    self.forget(queue)
                    renewed.lost.append(queue)
                elif (heard_at - self._since.get(queue, heard_at)) * 1000 >= self._lock_ms:
                    self._doubted[queue] = asked_at
                    renewed.doubtful.append(queue)
                else:
                    self._since[queue] = asked_at
        return renewed

    def trust(self, queue: MessageQueue) -> None:
        """Make a doubtful queue live, after its messages from before the gap were dropped."""
        asked_at = self._doubted.pop(queue, None)
        if asked_at is not None:
            self._since[queue] = asked_at

    def _ask(self, wanted: list[MessageQueue]) -> list[MessageQueue]:
        if not wanted:
            return []
        ids = set(
            self._verbs.lock_queues(
                self._group,
                wanted[0].topic,
                queue_ids=[queue.queue_id for queue in wanted],
                client_id=self._client_id,
                duration_ms=self._lock_ms,
            )
        )
        return [queue for queue in wanted if queue.queue_id in ids]

    def release(self, queue: MessageQueue) -> None:
        """Unlock a queue."""
        self._doubted.pop(queue, None)
        if self._since.pop(queue, None) is None:
            return
        self._verbs.unlock_queues(
            self._group, queue.topic, queue_ids=[queue.queue_id], client_id=self._client_id
        )

    def forget(self, queue: MessageQueue) -> None:
        """Drop a lock that another client has taken."""
        self._since.pop(queue, None)
        self._doubted.pop(queue, None)
