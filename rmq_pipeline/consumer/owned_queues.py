"""Queues that this push consumer owns, with the messages held of each."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Settling

log = logging.getLogger(__name__)


class Places(Protocol):
    """Offsets of queues that are read by offset; leased queues need none."""

    def begin(self, queue: ProcessQueue) -> None:
        """Set the next offset of a new ProcessQueue."""
        ...

    def end(self, queue: ProcessQueue) -> None:
        """Store the offset of a queue that ends."""
        ...

    def moved(self, queue: MessageQueue) -> None:
        """Apply a reset of the group."""
        ...


class OwnedQueues:
    """Owner of a push consumer's queues for the Rebalancer; thread-safe."""

    def __init__(
        self,
        settling: Settling,
        *,
        clock: Clock,
        wake: Callable[[str], None],
        report: Callable[[Mapping[str, list[ProcessQueue]]], dict[str, Any]],
        places: Places | None,
        ordered: bool,
        pull_expiry_ms: int = Pace().pull_expiry_ms,
    ) -> None:
        """Prepare to own queues.

        Args:
            wake: wakes the puller of a topic.
            report: builds the details of the heartbeat from the queues of each topic.
            places: offsets of queues that are read by offset; None for leased queues.
            ordered: queues have locks, and a restarted queue waits for its running calls. The end
                of a lock ends its leases; without locks, messages of a dropped queue are released.
            pull_expiry_ms: ``expired`` restarts a queue that was not pulled for this long.
        """
        self._pull_expiry_ms = pull_expiry_ms
        self._settling, self._clock, self._wake = settling, clock, wake
        self._report, self._places, self._ordered = report, places, ordered
        self._lock = threading.Lock()
        self._owned: dict[MessageQueue, ProcessQueue] = {}
        #: Dropped queues with unfinished work.
        self._dropped: dict[MessageQueue, ProcessQueue] = {}
        #: Replaced queues whose messages a listener still has; their leases are renewed.
        self._left: list[ProcessQueue] = []

    def of_topic(self, topic: str) -> list[ProcessQueue]:
        """Return the owned queues of a topic, sorted by queue_id."""
        with self._lock:
            found = [held for queue, held in self._owned.items() if queue.topic == topic]
        return sorted(found, key=lambda held: held.queue)

    def all(self) -> dict[str, list[ProcessQueue]]:
        """Return all owned queues by topic."""
        with self._lock:
            topics = {queue.topic for queue in self._owned}
        return {topic: self.of_topic(topic) for topic in sorted(topics)}

    def messages(self) -> list[ReceivedMessage]:
        """Return all messages whose leases must be renewed, including those of dropped queues."""
        with self._lock:
            self._left = [held for held in self._left if held.count]
            queues = [*self._owned.values(), *self._dropped.values(), *self._left]
        return [message for queue in queues for message in queue.held()]

    def take(self, queue: MessageQueue) -> None:
        """Start a queue."""
        with self._lock:
            before = self._owned.get(queue) or self._dropped.get(queue)
        held = self._new(queue, before)
        # The broker may still have leases for this client id: of an earlier pull that still
        # waits, or of an earlier process. Locking again under the same id does not end them.
        held.unsure = self._ordered
        if self._places is not None:
            self._places.begin(held)
        with self._lock:
            self._owned[queue] = held
        self._wake(queue.topic)

    def drop(self, queue: MessageQueue) -> bool:
        """Drop a queue; return True once all its work has ended."""
        with self._lock:
            held = self._owned.pop(queue, None)
            if held is not None:
                self._leave(self._dropped.get(queue))
                self._dropped[queue] = held
            dropped = self._dropped.get(queue)
        if held is not None:
            self._let_go(held, releases=not self._ordered)
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
        """Restart a queue after a reset of the group, which has ended the leases.

        A pull may have leased messages after the reset; they are released.
        """
        if self._places is not None:
            self._places.moved(queue)
        self._restart(queue, releases=not self._ordered, is_reset=True)

    def restart(self, held: ProcessQueue, *, releases: bool = False) -> None:
        """Restart a queue as if it had just been taken, in doubt about the broker's leases.

        Also restarts it if ``held`` has been replaced meanwhile: messages leased by a later pull
        of the replaced queue may have no holder.
        """
        self._restart(held.queue, releases=releases)

    def expired(self) -> set[str]:
        """Restart queues that were not pulled for too long; return their topics."""
        before_ms = self._clock.now_ms() - self._pull_expiry_ms
        with self._lock:
            stale = [held for held in self._owned.values() if held.pulled_at_ms <= before_ms]
        for held in stale:
            seconds = self._pull_expiry_ms // 1000
            log.warning("%s was not pulled for %d s; restarting it", held.queue.key, seconds)
            self.restart(held, releases=not self._ordered)
        return {held.queue.topic for held in stale}

    def report(self) -> dict[str, Any]:
        """Return the details of this member for the heartbeat."""
        return self._report(self.all())

    def _restart(self, queue: MessageQueue, *, releases: bool, is_reset: bool = False) -> None:
        with self._lock:
            held = self._owned.get(queue)
        if held is None:
            return
        self._let_go(held, releases=releases)
        if self._places is not None and not is_reset:
            self._places.end(held)
        fresh = self._new(queue, held)
        # After a reset too: ordered queues must get messages leased after the reset again.
        fresh.unsure = self._ordered
        if self._places is not None:
            self._places.begin(fresh)
        with self._lock:
            if self._owned.get(queue) is held:
                self._owned[queue] = fresh
                self._leave(held)
        self._wake(queue.topic)

    def _leave(self, held: ProcessQueue | None) -> None:
        """Remember a replaced queue; an ordered successor knows its predecessor itself."""
        if held is not None and not self._ordered:
            self._left.append(held)

    def _let_go(self, held: ProcessQueue, *, releases: bool) -> None:
        left = held.drop()
        if releases:
            self._settling.release(left)

    def _new(self, queue: MessageQueue, before: ProcessQueue | None) -> ProcessQueue:
        return ProcessQueue(
            queue,
            now_ms=self._clock.now_ms(),
            changed=lambda: self._wake(queue.topic),
            before=before if self._ordered else None,
        )
