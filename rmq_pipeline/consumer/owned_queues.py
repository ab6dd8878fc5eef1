"""The queues that this member owns, and what it holds of each; the other side of a rebalance."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Settling

log = logging.getLogger(__name__)

#: A queue that nobody has pulled for so long is taken up anew (semantics §6.3).
PULL_EXPIRY_MS: Final = 120_000


class Places(Protocol):
    """Where reading by offset begins in a queue, and is kept; None for what is leased."""

    def begin(self, queue: ProcessQueue) -> None:
        """Put a new ProcessQueue where the member is."""
        ...

    def end(self, queue: ProcessQueue) -> None:
        """Keep how far it was."""
        ...

    def moved(self, queue: MessageQueue) -> None:
        """The group was put elsewhere."""
        ...


class OwnedQueues:
    """Takes queues, drops them, and begins them anew; for any number of threads."""

    def __init__(
        self,
        settling: Settling,
        *,
        clock: Clock,
        wake: Callable[[str], None],
        report: Callable[[Mapping[str, list[ProcessQueue]]], dict[str, Any]],
        places: Places | None,
        ordered: bool,
    ) -> None:
        """Own nothing yet.

        Args:
            wake: tells who pulls a topic that something is to be looked at.
            ordered: a queue that is taken up anew waits for what still runs of it. Without locks,
                which take leases with them when they end, what is dropped is given back.
        """
        self._settling, self._clock, self._wake = settling, clock, wake
        self._report, self._places, self._ordered = report, places, ordered
        self._lock = threading.Lock()
        self._owned: dict[MessageQueue, ProcessQueue] = {}
        #: Dropped, and not quiet yet.
        self._dropped: dict[MessageQueue, ProcessQueue] = {}
        #: Whose place others took while something of them was with a listener: its leases go on.
        self._left: list[ProcessQueue] = []

    def of_topic(self, topic: str) -> list[ProcessQueue]:
        """What is owned of a topic now, by queue_id."""
        with self._lock:
            found = [held for queue, held in self._owned.items() if queue.topic == topic]
        return sorted(found, key=lambda held: held.queue)

    def all(self) -> dict[str, list[ProcessQueue]]:
        """Everything that is owned, by topic."""
        with self._lock:
            topics = {queue.topic for queue in self._owned}
        return {topic: self.of_topic(topic) for topic in sorted(topics)}

    def messages(self) -> list[ReceivedMessage]:
        """Everything that is held, whose leases are to go on: also what still runs of a queue."""
        with self._lock:
            self._left = [held for held in self._left if held.count]
            queues = [*self._owned.values(), *self._dropped.values(), *self._left]
        return [message for queue in queues for message in queue.held()]

    def take(self, queue: MessageQueue) -> None:
        """Begin with a queue."""
        with self._lock:
            before = self._owned.get(queue) or self._dropped.get(queue)
        held = self._new(queue, before)
        # A pull of before may still wait at the broker, and one of this name may have leased
        # messages in another process: who has the lock keeps the leases of its name.
        held.unsure = self._ordered
        if self._places is not None:
            self._places.begin(held)
        with self._lock:
            self._owned[queue] = held
        self._wake(queue.topic)

    def drop(self, queue: MessageQueue) -> bool:
        """Begin no more of a queue; whether nothing of it runs any more."""
        with self._lock:
            held = self._owned.pop(queue, None)
            if held is not None:
                self._leave(self._dropped.get(queue))
                self._dropped[queue] = held
            dropped = self._dropped.get(queue)
        if held is not None:
            self._let_go(held, gives_back=not self._ordered)
        if dropped is None:
            return True
        if dropped.is_quiet:
            if self._places is not None:
                self._places.end(dropped)
            with self._lock:
                self._dropped.pop(queue, None)
            return True
        return False

    def reset(self, queue: MessageQueue) -> None:
        """The group was put elsewhere: what is held is for nobody, and its leases have ended.

        Those of a pull that was faster than the news have not: they are given back.
        """
        if self._places is not None:
            self._places.moved(queue)
        self._begin_anew(queue, gives_back=not self._ordered, is_reset=True)

    def begin_anew(self, held: ProcessQueue, *, gives_back: bool = False) -> None:
        """Take a queue up again, as if it had just been taken: unsure of what the broker leased.

        Also when another has taken the place of ``held``: what a pull for that one has leased since
        is in nobody's hands.
        """
        self._begin_anew(held.queue, gives_back=gives_back)

    def expired(self) -> set[str]:
        """Take up anew what nobody has pulled for long; the topics of such queues."""
        before_ms = self._clock.now_ms() - PULL_EXPIRY_MS
        with self._lock:
            stale = [held for held in self._owned.values() if held.pulled_at_ms <= before_ms]
        for held in stale:
            log.warning("%s was not pulled for long and begins anew", held.queue.key)
            self.begin_anew(held, gives_back=not self._ordered)
        return {held.queue.topic for held in stale}

    def report(self) -> dict[str, Any]:
        """What the heartbeat tells of this member."""
        return self._report(self.all())

    def _begin_anew(self, queue: MessageQueue, *, gives_back: bool, is_reset: bool = False) -> None:
        with self._lock:
            held = self._owned.get(queue)
        if held is None:
            return
        self._let_go(held, gives_back=gives_back)
        if self._places is not None and not is_reset:
            self._places.end(held)
        fresh = self._new(queue, held)
        # Of a reset, too: an ordered queue gets again what a faster pull has leased.
        fresh.unsure = self._ordered
        if self._places is not None:
            self._places.begin(fresh)
        with self._lock:
            if self._owned.get(queue) is held:
                self._owned[queue] = fresh
                self._leave(held)
        self._wake(queue.topic)

    def _leave(self, held: ProcessQueue | None) -> None:
        """Another has its place; an ordered one begins when this is quiet, and knows of it."""
        if held is not None and not self._ordered:
            self._left.append(held)

    def _let_go(self, held: ProcessQueue, *, gives_back: bool) -> None:
        left = held.drop()
        if gives_back:
            self._settling.give_back(left)

    def _new(self, queue: MessageQueue, before: ProcessQueue | None) -> ProcessQueue:
        return ProcessQueue(
            queue,
            now_ms=self._clock.now_ms(),
            changed=lambda: self._wake(queue.topic),
            before=before if self._ordered else None,
        )
