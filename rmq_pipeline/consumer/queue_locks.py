"""Queues that this client has locked at the broker, and for how long it may trust in that."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.consumer.verbs import MembershipVerbs
from rmq_pipeline.errors import BusyError, RocketMQError

#: For how long a lock holds at the broker.
LOCK_MS: Final = 60_000
RENEW_S: Final = 20.0
#: The first renewal is early: a lock taken at the end of a slow call gets its full time soon.
FIRST_RENEW_S: Final = 1.0


@dataclass(slots=True)
class Renewed:
    """What became of locks that were to be renewed."""

    #: Queues that others have.
    lost: list[MessageQueue] = field(default_factory=list)
    #: Locked again, but others may have had them meanwhile.
    doubtful: list[MessageQueue] = field(default_factory=list)
    #: Why some were not: their locks are as they were.
    refusal: RocketMQError | None = None


class QueueLocks:
    """Takes, renews and gives back locks; one thread calls it, any asks ``is_live``."""

    def __init__(
        self,
        verbs: MembershipVerbs,
        *,
        group: str,
        client_id: str,
        lock_ms: int = LOCK_MS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock nothing yet.

        Args:
            lock_ms: for how long a lock holds; it is trusted for half of that, as clocks and calls
                may be slow.
        """
        self._verbs = verbs
        self._group, self._client_id = group, client_id
        self._lock_ms, self._now_s = lock_ms, now_s
        #: When each was last asked for with success; before the call, so never too late.
        self._since: dict[MessageQueue, float] = {}
        #: Renewed too late, and when that was asked for.
        self._doubted: dict[MessageQueue, float] = {}

    def is_live(self, queue: MessageQueue) -> bool:
        """Whether it may be worked on: locked, and so not long ago that others may have it."""
        since = self._since.get(queue)
        return since is not None and (self._now_s() - since) * 2000 < self._lock_ms

    def is_locked(self, queue: MessageQueue) -> bool:
        """Whether it was locked, and not lost since then as far as is known."""
        return queue in self._since

    def acquire(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues of one topic; those that nobody else has."""
        asked_at = self._now_s()
        got = self._ask(list(queues))
        self._since.update(dict.fromkeys(got, asked_at))
        return got

    def renew(self, queues: Iterable[MessageQueue]) -> Renewed:
        """Lock queues again; doubtful ones are not live before they are trusted."""
        renewed = Renewed()
        for of_topic in by_topic(queues).values():
            asked_at = self._now_s()
            try:
                got = set(self._ask(of_topic))
            except RocketMQError as error:
                renewed.refusal = error
                if isinstance(error, BusyError):
                    break  # one call after the other would wait for a broker that is away
                continue
            # The broker may have come to it as late as now, and others may have been faster.
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
        """Nothing is held any more of the time when others may have had it."""
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
        """Unlock a queue for others."""
        self._doubted.pop(queue, None)
        if self._since.pop(queue, None) is None:
            return
        self._verbs.unlock_queues(
            self._group, queue.topic, queue_ids=[queue.queue_id], client_id=self._client_id
        )

    def forget(self, queue: MessageQueue) -> None:
        """Others have it."""
        self._since.pop(queue, None)
        self._doubted.pop(queue, None)
