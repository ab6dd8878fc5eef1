"""Messages of a key one after another, of different keys at once (semantics §6.14).

A key is not tied to a worker: keys that have something to do stand in line, and each free worker
takes the one whose next message is the oldest. So no worker idles while a key waits, a key that is
stuck holds up nobody, and one that has fallen behind comes first.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Final

from rmq_pipeline.consumer.calling import Answer, Calling
from rmq_pipeline.consumer.concurrently import parts_of
from rmq_pipeline.consumer.listener import Again, KeyContext, done_of, suspension_ms
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.timetable import Timetable
from rmq_pipeline.consumer.workers import Workers

log = logging.getLogger(__name__)

#: When a key is looked at again whose queue is not locked.
UNLOCKED_MS: Final = 100
#: Keys that can go on, for each worker, that are enough: one may run out before more is pulled.
KEYS_EACH: Final = 2
#: The key of messages of which nobody could say the key: they wait for each other.
UNKNOWN: Final = object()

#: What messages that must not overtake each other have in common; None: these may.
KeyOf = Callable[[ReceivedMessage], Hashable | None]


@dataclass(slots=True, eq=False)
class Line:
    """Messages of one key that wait, in order."""

    #: Topic and key.
    key: tuple[str, Hashable]
    messages: deque[ReceivedMessage] = field(default_factory=deque)
    #: Whether it stands in line, is with a worker, or pauses: it is not to be lined up again.
    busy: bool = False
    #: How many of the next messages are to be given one by one: one of them has failed.
    singly: int = 0


class ByKey:
    """Gives messages to the listener in the order of their keys."""

    spans = False

    def __init__(
        self,
        calling: Calling,
        *,
        settling: Settling,
        workers: Workers,
        key_of: KeyOf,
        statistics: Statistics,
        timetable: Timetable,
        holds: Callable[[MessageQueue], bool],
        batch: int,
        suspend_ms: int,
        max_attempts: int,
        gives_back_behind: bool,
    ) -> None:
        """Begin nothing yet.

        Args:
            holds: whether this client may work on a queue.
            max_attempts: of a message, then the group says what becomes of it.
            gives_back_behind: the broker takes back what is leased behind a message that was given
                up, as its group is in order too.
        """
        self._calling, self._settling, self._workers = calling, settling, workers
        self._key_of, self._statistics, self._timetable = key_of, statistics, timetable
        self._holds, self._batch, self._suspend_ms = holds, batch, suspend_ms
        self._max_attempts, self._gives_back_behind = max_attempts, gives_back_behind
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, Hashable], Line] = {}
        #: Keys that stand in line: how old their next message is, a number, the key.
        self._standing: list[tuple[int, int, int, Line]] = []
        self._numbers = itertools.count()
        #: Keys that stand in line or are with a worker.
        self._runnable = 0

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages were pulled."""
        queue.put(messages)
        topic = queue.queue.topic
        keys = [self._key(message) for message in messages]
        begun: list[Line] = []
        with self._lock:
            for key, message in zip(keys, messages, strict=True):
                # Without a key it is in line by itself.
                place = (topic, message if key is None else key)
                line = self._lines.get(place)
                if line is None:
                    line = self._lines[place] = Line(place)
                line.messages.append(message)
                if not line.busy:
                    line.busy = True
                    begun.append(line)
            self._runnable += len(begun)
        for line in begun:
            self._line_up(line)

    def is_starving(self) -> bool:
        """Whether too few keys can go on to keep the workers busy: others may be pulled then."""
        return self._runnable - self._workers.stuck < KEYS_EACH * self._workers.threads

    def expire(self) -> None:
        """Calls may take as long as they like: only their own key has to wait."""

    def _key(self, message: ReceivedMessage) -> Hashable | None:
        try:
            key = self._key_of(message)
            hash(key)
        except Exception:
            log.exception("no key of %r: it waits for others of which there is none", message)
            return UNKNOWN
        return key

    def _line_up(self, line: Line) -> None:
        """Let a worker take the key, or one with older messages: as many turns as stand in line."""
        with self._lock:
            first = line.messages[0]
            age = first.stored_at_ms, first.queue_offset
            heappush(self._standing, (*age, next(self._numbers), line))
        self._workers.submit(self._turn)

    def _turn(self) -> None:
        """One batch of the key with the oldest message; then the key stands in line again."""
        with self._lock:
            line = heappop(self._standing)[-1]
        while self._step(line):
            # Where nobody else stands in line it is next: to wake another worker would cost time.
            if not (self._workers.idle and self._workers.goes_on()):
                self._line_up(line)
                return

    def _step(self, line: Line) -> bool:
        """One batch of a key; whether there is more to do of it now."""
        pause_ms: int | None = None
        messages, queue = self._take(line)
        if queue is not None and not self._holds(queue.queue):
            pause_ms = UNLOCKED_MS
            self._put_back(line, messages)
        elif queue is not None and (begun := queue.begin(messages)):
            try:
                pause_ms = self._consume(line, begun, queue=queue)
            except BaseException:
                log.exception("the end of a call failed: a key of %s pauses", queue.queue.topic)
                # Or nobody would ever look at the key again. Those that are done are not begun.
                queue.consume_again(begun)
                self._put_back(line, begun)
                pause_ms = self._suspend_ms
        return self._end(line, pause_ms)

    def _take(self, line: Line) -> tuple[list[ReceivedMessage], ProcessQueue | None]:
        """The next messages of a key, all of one queue."""
        taken: list[ReceivedMessage] = []
        with self._lock:
            limit = 1 if line.singly else self._batch
            line.singly = max(0, line.singly - 1)
            waiting = line.messages
            while waiting and waiting[0].queue.dropped:
                waiting.popleft()
            queue = waiting[0].queue if waiting else None
            while waiting and len(taken) < limit and waiting[0].queue is queue:
                taken.append(waiting.popleft())
        return taken, queue

    def _put_back(self, line: Line, messages: Sequence[ReceivedMessage]) -> None:
        with self._lock:
            line.messages.extendleft(reversed(messages))

    def _end(self, line: Line, pause_ms: int | None) -> bool:
        """Let the key pause, or forget it when nothing is left; whether it goes on now."""
        with self._lock:
            left = bool(line.messages)
            line.busy = left
            if not left:
                del self._lines[line.key]
            goes_on = left and pause_ms is None
            if not goes_on:
                self._runnable -= 1
        if not left and self.is_starving():
            self._settling.hurry()
        if left and pause_ms is not None:
            self._timetable.after(pause_ms, partial(self._resume, line))
        return goes_on

    def _resume(self, line: Line) -> None:
        with self._lock:
            self._runnable += 1
        self._line_up(line)

    def _consume(
        self, line: Line, messages: Sequence[ReceivedMessage], *, queue: ProcessQueue
    ) -> int | None:
        """One call; for how long the key pauses, None: it goes on."""
        key = line.key[1]
        context = KeyContext(queue.queue, None if key is messages[0] else key)
        answer = self._calling(messages, context)
        done = done_of(answer.result, ack_index=context.ack_index, count=len(messages))
        failed = messages[done:]
        self._statistics.consumed(
            queue.queue.topic, done=done, failed=len(failed), took_ms=answer.took_ms
        )
        if not failed:
            self._settling.settle(Part(messages))
            return None
        return self._failed(line, messages, done=done, answer=answer, context=context)

    def _failed(
        self,
        line: Line,
        messages: Sequence[ReceivedMessage],
        *,
        done: int,
        answer: Answer,
        context: KeyContext,
    ) -> int | None:
        """Keep what failed in its place, one by one from now on; or give it up."""
        failed = messages[done:]
        hopeless = len(failed) == 1 and failed[0].delivery_attempt >= self._max_attempts
        if hopeless:
            parts = parts_of(messages, done, answer=answer, how=Again("give_up"))
            if self._gives_back_behind and context.key is not None:
                self._forget_behind(line, failed[0])
            self._settling.settle(*parts)
            return None
        if done:
            self._settling.settle(Part(messages[:done]))
        for message in failed:
            message.failures += 1
        failed[0].queue.consume_again(failed)
        self._put_back(line, failed)
        with self._lock:
            # One that failed alone is the first of them again.
            line.singly = max(line.singly + 1, len(failed))
        return suspension_ms(context.suspend_ms, usual_ms=self._suspend_ms)

    def _forget_behind(self, line: Line, given_up: ReceivedMessage) -> None:
        """What is held of the key behind a message is not ours any more: it comes again, or not."""
        with self._lock:
            behind = [m for m in line.messages if m.queue is given_up.queue]
            others = [m for m in line.messages if m.queue is not given_up.queue]
            line.messages = deque(others)
        for message in behind:
            message.queue.lose(message)


def by_message_group(message: ReceivedMessage) -> Hashable | None:
    """Its message group."""
    return message.message_group


def by_keys(message: ReceivedMessage) -> Hashable | None:
    """Its keys, all of them; RocketMQ's own choice."""
    return tuple(message.keys) or None
