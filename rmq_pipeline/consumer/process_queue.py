"""What this client holds of one message queue: pulled, not yet settled (semantics §6.7)."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage


class ProcessQueue:
    """Messages that wait for the listener or are with it, by offset; for any number of threads.

    One that was given up, by a rebalance or a reset, is *dropped*: nothing more of it is begun, and
    another takes its place when the queue comes back.
    """

    def __init__(
        self,
        queue: MessageQueue,
        *,
        now_ms: int,
        changed: Callable[[], None] = lambda: None,
        before: "ProcessQueue | None" = None,
    ) -> None:
        """Hold nothing yet.

        Args:
            changed: called when there is room again, after ``room`` was set; and when it is
                quiet.
            before: held the same queue, and must be quiet before this one begins.
        """
        self.queue = queue
        self.dropped = False
        #: Set by who pulls, when there is no room: how much there is; it wants to hear of some.
        self.room: Callable[[], int] | None = None
        self.pulled_at_ms = now_ms
        #: Where it is read on, when it is read by offset; all before is, or was, held.
        self.next_offset = -1
        #: As of the last pull, whose messages may not be held yet.
        self.read_to = -1
        #: Whether the broker may have leased messages to this client that never arrived.
        self.unsure = False
        #: Bytes of all that is held.
        self.bytes = 0
        self._changed = changed
        self._before = before
        self._lock = threading.Lock()
        self._waiting: dict[int, ReceivedMessage] = {}
        #: Offsets of those that wait, and some that do not any more.
        self._offsets: list[int] = []
        self._running: dict[int, ReceivedMessage] = {}
        #: The largest offset ever held.
        self._last = -1
        self._consuming = False
        #: Whether what is with the listener only waits for it to commit: it is not called now.
        self._is_kept = False
        #: Whether somebody gives its lock back and takes it anew: it is not to be let go then.
        self._is_relocked = False
        #: Messages that are done with here, and whose outcome the broker does not know yet.
        self._unsettled = 0

    @property
    def count(self) -> int:
        """Messages that are held."""
        return len(self._waiting) + len(self._running)

    @property
    def span(self) -> int:
        """How far the first and the last offset held are apart."""
        with self._lock:
            first = self._first()
            return self._last - first if first is not None else 0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of it runs, the broker knows of all that ran, and nobody locks it."""
        with self._lock:  # what ends moves from the one to the other
            runs = bool(self._running) and not self._is_kept
            is_busy = runs or self._is_relocked or self._unsettled > 0
        return not is_busy and self.may_begin

    @property
    def may_begin(self) -> bool:
        """Whether nothing is left of what held the queue before."""
        before = self._before  # another thread may see at the same time that it is quiet
        if before is not None and before.is_quiet:
            self._before = before = None
        return before is None

    @contextmanager
    def relocking(self) -> Iterator[bool]:
        """While its lock is given back and taken anew it is not quiet; whether that may be done.

        Of one that was dropped, the lock is on its way to others.
        """
        with self._lock:
            self._is_relocked = may = not self.dropped
        try:
            yield may
        finally:
            self._is_relocked = False

    def put(self, messages: Sequence[ReceivedMessage]) -> bool:
        """Hold more; whether somebody must begin to ``take``, as nobody does.

        An offset that waits already has been delivered anew: the newer delivery counts.
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
        """The first that wait, now with the listener; when there is none, nobody takes any more."""
        taken: list[ReceivedMessage] = []
        with self._lock:
            while len(taken) < limit and not self.dropped and (first := self._waits()) is not None:
                heappop(self._offsets)
                taken.append(self._begin(self._waiting[first]))
            self._consuming = bool(taken)
            self._is_kept &= not taken
        return taken

    def keep(self) -> None:
        """A call has ended without a commit: what it was given comes again, if none follows."""
        with self._lock:
            self._is_kept = True

    def begin(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Those of these that still wait, now with the listener."""
        with self._lock:
            if self.dropped:
                return []
            # A newer delivery of one may have come meanwhile: then that is begun.
            return [
                self._begin(message)
                for message in messages
                if self._waiting.get(message.queue_offset) is message
            ]

    def remove(self, messages: Iterable[ReceivedMessage], *, unsettled: bool = False) -> int:
        """Be done with messages; the offset before which nothing is left, -1: nothing was held.

        Args:
            unsettled: the broker is still to be told; ``settled`` says when it was.
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
        """The broker knows of n more."""
        with self._lock:
            self._unsettled -= n
        self._tell()

    def lose(self, message: ReceivedMessage) -> None:
        """Somebody else has it, or it comes again: it is not begun; it goes on if it was."""
        with self._lock:
            if self._waiting.get(message.queue_offset) is message:
                self._forget(message)

    def commit(self) -> list[ReceivedMessage]:
        """All that is with the listener, in order: it is done, for ``remove``."""
        with self._lock:
            return [self._running[offset] for offset in sorted(self._running)]

    def rollback(self) -> None:
        """All that is with the listener waits again."""
        self.consume_again(self.commit())

    def consume_again(self, messages: Iterable[ReceivedMessage]) -> None:
        """Messages that are with the listener wait again, in their places."""
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
        """The offset before which all is done, of what is read by offset."""
        # First this: what is pulled between the two lines is held by then.
        read_to = self.next_offset
        with self._lock:
            first = self._first()
        return read_to if first is None else min(first, read_to)

    def held(self) -> list[ReceivedMessage]:
        """Everything that is held, in order; and what still runs of what held the queue before."""
        before = self._before
        earlier = before.held() if before is not None else []
        with self._lock:
            held = [*earlier, *self._waiting.values(), *self._running.values()]
        return sorted(held, key=lambda message: message.queue_offset)

    def drop(self) -> list[ReceivedMessage]:
        """Begin nothing more; what waited, for the broker to have back."""
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
        """What came when it was dropped already, for the broker to have back."""
        return self.drop() if self.dropped else []

    def _begin(self, message: ReceivedMessage) -> ReceivedMessage:
        offset = message.queue_offset
        del self._waiting[offset]
        earlier = self._running.get(offset)
        if earlier is not None:
            # Its lease has ended, or there would be no other: what becomes of it is refused.
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
        """The first offset that waits."""
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
            # Once: each word wakes a thread, which takes the interpreter from the listener's.
            self.room = None
            self._changed()
