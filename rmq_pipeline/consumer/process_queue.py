"""Messages of one queue that this client holds, with flow control (semantics §6.6, §6.7)."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.errors import RequestError


class ProcessQueue:
    """Messages that wait for the listener or are with it, by offset; thread-safe.

    After a rebalance or a reset the queue is *dropped*: none of its messages starts any more. If
    the queue comes back, a new ProcessQueue replaces it.
    """

    def __init__(
        self,
        queue: MessageQueue,
        *,
        now_ms: int,
        changed: Callable[[], None] = lambda: None,
        before: "ProcessQueue | None" = None,
    ) -> None:
        """Create an empty queue.

        Args:
            queue: the message queue.
            now_ms: the time of the last pull, at first.
            changed: called when there is free space again, if ``room`` is set, and when the
                dropped queue is quiet.
            before: the predecessor for the same queue; it must be quiet before this one starts.
        """
        self.queue = queue
        self.dropped = False
        #: Set by a puller that found no space: returns the free space, to detect some.
        self.room: Callable[[], int] | None = None
        self.pulled_at_ms = now_ms
        #: Next offset to read, if the queue is read by offset; earlier messages are or were held.
        self.next_offset = -1
        #: Next offset after the last pull, whose messages may not be held yet.
        self.read_to = -1
        #: True if the broker may have leased messages to this client that never arrived.
        self.unsure = False
        #: Bytes of all held messages.
        self.bytes = 0
        self._changed = changed
        self._before = before
        self._lock = threading.Lock()
        self._waiting: dict[int, ReceivedMessage] = {}
        #: Heap of waiting offsets; may contain stale ones.
        self._offsets: list[int] = []
        self._running: dict[int, ReceivedMessage] = {}
        #: Largest offset ever held.
        self._last = -1
        self._consuming = False
        #: True if the running messages only wait for a commit, and no call runs.
        self._is_kept = False
        #: True while a thread unlocks and relocks the queue; it must not be handed over then.
        self._is_relocked = False
        #: Number of processed messages whose outcome the broker does not know yet.
        self._unsettled = 0

    @property
    def count(self) -> int:
        """Number of held messages."""
        return len(self._waiting) + len(self._running)

    @property
    def span(self) -> int:
        """Distance from the first held offset to the largest one."""
        with self._lock:
            first = self._first()
            return self._last - first if first is not None else 0

    @property
    def is_quiet(self) -> bool:
        """True if no call runs, all outcomes are settled, and no thread relocks the queue."""
        with self._lock:  # a message that ends moves from running to unsettled
            runs = bool(self._running) and not self._is_kept
            is_busy = runs or self._is_relocked or self._unsettled > 0
        return not is_busy and self.may_begin

    @property
    def may_begin(self) -> bool:
        """True if the predecessor is quiet, or there is no predecessor."""
        before = self._before  # another thread may clear it at the same time
        if before is not None and before.is_quiet:
            self._before = before = None
        return before is None

    @contextmanager
    def relocking(self) -> Iterator[bool]:
        """Keep the queue from being quiet while its lock is released and taken again.

        Yields False if the queue was dropped: its lock then belongs to the next owner.
        """
        with self._lock:
            self._is_relocked = may = not self.dropped
        try:
            yield may
        finally:
            self._is_relocked = False

    def put(self, messages: Sequence[ReceivedMessage]) -> bool:
        """Add messages; return True if a worker must start to ``take``, because none does.

        A second message with a waiting offset is a redelivery and replaces the first.
        """
        with self._lock:
            for message in messages:
                offset = message.queue_offset
                known = self._waiting.get(offset)
                if known is None:
                    heappush(self._offsets, offset)
                else:
                    self.bytes -= known.size
                self._waiting[offset] = message
                self.bytes += message.size
                self._last = max(self._last, offset)
            begins = bool(self._waiting) and not self._consuming and not self.dropped
            self._consuming |= begins
            return begins

    def take(self, limit: int) -> list[ReceivedMessage]:
        """Move the first waiting messages to the listener; an empty result ends the taking."""
        taken: list[ReceivedMessage] = []
        with self._lock:
            while len(taken) < limit and not self.dropped and (first := self._waits()) is not None:
                heappop(self._offsets)
                taken.append(self._begin(self._waiting[first]))
            self._consuming = bool(taken)
            self._is_kept &= not taken
        return taken

    def keep(self) -> None:
        """Note that the call has ended; its messages still wait for a commit."""
        with self._lock:
            self._is_kept = True

    def waits(self, message: ReceivedMessage) -> bool:
        """Return True if this delivery of a message may start."""
        return not self.dropped and self._waiting.get(message.queue_offset) is message

    def begin(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Move messages to the listener; return those that still waited."""
        with self._lock:
            if self.dropped:
                return []
            # A newer delivery may have replaced a message; it starts on its own.
            return [
                self._begin(message)
                for message in messages
                if self._waiting.get(message.queue_offset) is message
            ]

    def remove(self, messages: Iterable[ReceivedMessage], *, unsettled: bool = False) -> int:
        """Remove messages; return the first offset still held, or the end of all held before.

        Returns -1 if the queue was empty.

        Args:
            messages: the messages to remove.
            unsettled: True if their outcomes are not settled yet; call ``settled`` afterwards.
        """
        with self._lock:
            empty = not self._waiting and not self._running
            for message in messages:
                self._forget(message)
                self._unsettled += unsettled
            first = self._first()
        self._tell()
        if empty:
            return -1
        return self._last + 1 if first is None else first

    def settled(self, n: int) -> None:
        """Note that the broker has n more outcomes."""
        with self._lock:
            self._unsettled -= n
        self._tell()

    def lose(self, message: ReceivedMessage) -> None:
        """Drop a waiting message whose lease was lost; a running message continues."""
        with self._lock:
            if self._waiting.get(message.queue_offset) is message:
                self._forget(message)

    def commit(self) -> list[ReceivedMessage]:
        """Return all messages that are with the listener, in order, to be removed."""
        with self._lock:
            return [self._running[offset] for offset in sorted(self._running)]

    def rollback(self) -> None:
        """Make all messages that are with the listener wait again."""
        self.consume_again(self.commit())

    def consume_again(self, messages: Iterable[ReceivedMessage]) -> None:
        """Make messages that are with the listener wait again, in the order of offsets."""
        with self._lock:
            for message in messages:
                offset = message.queue_offset
                if self._running.get(offset) is not message:
                    continue
                del self._running[offset]
                if offset in self._waiting:
                    self.bytes -= message.size
                    continue
                self._waiting[offset] = message
                heappush(self._offsets, offset)
        self._tell()

    def done_before(self) -> int:
        """Return the offset before which all messages are done; for queues read by offset."""
        # Read next_offset first: messages pulled afterwards do not count as done then.
        read_to = self.next_offset
        with self._lock:
            first = self._first()
        return read_to if first is None else min(first, read_to)

    def held(self) -> list[ReceivedMessage]:
        """Return all held messages in order, including those of the predecessor."""
        before = self._before
        earlier = before.held() if before is not None else []
        with self._lock:
            held = [*earlier, *self._waiting.values(), *self._running.values()]
        return sorted(held, key=lambda message: message.queue_offset)

    def drop(self) -> list[ReceivedMessage]:
        """Drop the queue; return the waiting messages, to be released."""
        with self._lock:
            self.dropped = True
            left = [self._waiting[offset] for offset in sorted(self._waiting)]
            if left:
                self.next_offset = left[0].queue_offset
            self._waiting.clear()
            self._offsets.clear()
            self.bytes = sum(message.size for message in self._running.values())
        return left

    def late(self) -> list[ReceivedMessage]:
        """Return the messages that arrived after the drop, to be released."""
        return self.drop() if self.dropped else []

    def _begin(self, message: ReceivedMessage) -> ReceivedMessage:
        offset = message.queue_offset
        del self._waiting[offset]
        earlier = self._running.get(offset)
        if earlier is not None:
            # A redelivery means that the earlier lease has ended; the broker refuses its outcome.
            self.bytes -= earlier.size
        self._running[offset] = message
        return message

    def _forget(self, message: ReceivedMessage) -> None:
        offset = message.queue_offset
        for held in (self._running, self._waiting):
            if held.get(offset) is message:
                del held[offset]
                self.bytes -= message.size
                return

    def _waits(self) -> int | None:
        """Return the first waiting offset."""
        while self._offsets and self._offsets[0] not in self._waiting:
            heappop(self._offsets)
        return self._offsets[0] if self._offsets else None

    def _first(self) -> int | None:
        waits = self._waits()
        runs = min(self._running, default=None)
        if waits is None or runs is None:
            return runs if waits is None else waits
        return min(waits, runs)

    def _tell(self) -> None:
        if self.dropped and not self._running:
            self._changed()
        elif (room := self.room) is not None and room():
            # Notify once: each wakeup takes the GIL from the listener's threads.
            self.room = None
            self._changed()


#: RocketMQ's value of an unset threshold.
UNSET: Final = -1
#: Factor on the message threshold while workers starve, so that pulls reach other keys.
STUCK_FACTOR: Final = 10
#: Factor on the size of a pull while workers starve: fewer, larger pulls for keys without messages.
STARVING_PULLS: Final = 4
#: Size of the first pull of a topic, before message sizes are known.
FIRST_PULL: Final = 128


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on held messages, per queue and optionally per topic.

    -1 means the default, as in RocketMQ.
    """

    messages: int = 1000
    bytes: int = 100 * limits.MIB
    #: Distance from the first to the last held offset; used by order "concurrently" only.
    span: int = 2000
    #: For all owned queues of a topic together; each queue gets an equal share.
    topic_messages: int | None = None
    topic_bytes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value == UNSET:
                object.__setattr__(self, each.name, each.default)
            elif value is not None and value < 1:
                raise RequestError(
                    f"Threshold {each.name} is at least 1, not {value!r}.",
                    remedy=f"Give 1 or more, or {UNSET} for the default.",
                )

    def of_queue(self, owned: int) -> "Thresholds":
        """Return the limits of one queue if ``owned`` queues of its topic are owned."""
        share = max(1, owned)
        return Thresholds(
            self.messages if self.topic_messages is None else max(1, self.topic_messages // share),
            self.bytes if self.topic_bytes is None else max(1, self.topic_bytes // share),
            self.span,
        )


def room(
    held: ProcessQueue, thresholds: Thresholds, *, spans: bool, starving: bool, pull: int
) -> int:
    """Return how many messages may be pulled from a queue now; 0: none.

    To avoid tiny pulls, half of the message threshold or half a pull must be free.

    Args:
        held: the messages that are held.
        thresholds: the limits of this queue.
        spans: True if the span limit applies.
        starving: True if workers idle because the held messages are stuck.
        pull: the maximum size of a pull.
    """
    most = thresholds.messages * (STUCK_FACTOR if starving else 1)
    free = most - held.count
    if free < max(1, min(pull, thresholds.messages) // 2) or held.bytes >= thresholds.bytes:
        return 0
    if spans and held.span > thresholds.span:
        return 0
    return min(free, pull * STARVING_PULLS if starving else pull)


class Sizes:
    """Recent message sizes of a topic, to limit a pull to the messages that fit."""

    def __init__(self) -> None:
        self._bytes_each: float | None = None

    def saw(self, messages: int, total_bytes: int) -> None:
        """Record the result of a pull."""
        if messages:
            each = total_bytes / messages
            known = each if self._bytes_each is None else self._bytes_each
            # The estimate grows at once and shrinks gradually.
            self._bytes_each = max(each, (known + each) / 2)

    def fit(self, free_bytes: int) -> int:
        """Return how many messages fit into the free bytes; at least 1."""
        if self._bytes_each is None:
            return FIRST_PULL
        return max(1, int(free_bytes // max(1.0, self._bytes_each)))
