"""Consumption in the order of keys: one call per key at a time, keys in parallel (semantics §6.14).

No key belongs to a worker. Each free worker takes the waiting key whose next message is the
oldest. So no worker idles while a key waits, and a stuck key delays no other key. A key that has
fallen behind comes first.
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

from rmq_pipeline.consumer.concurrently import parts_of
from rmq_pipeline.consumer.listener import (
    Again,
    Answer,
    Calling,
    KeyContext,
    done_of,
    suspension_ms,
)
from rmq_pipeline.consumer.membership import Suspects
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part, Retries, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable, Workers

log = logging.getLogger(__name__)

#: Pause of a key whose queue is not locked.
UNLOCKED_MS: Final = 100
#: Runnable keys per worker that suffice: one key may run out before the next pull.
KEYS_EACH: Final = 2
#: Key of messages whose key function failed: they are consumed one after another.
UNKNOWN: Final = object()

#: Returns the key of a message; messages of one key keep their order. None: no order.
KeyOf = Callable[[ReceivedMessage], Hashable | None]


@dataclass(slots=True, eq=False)
class Line:
    """Waiting messages of one key, in order."""

    #: Topic and key.
    key: tuple[str, Hashable]
    messages: deque[ReceivedMessage] = field(default_factory=deque)
    #: True while the key waits for a worker, is with one, or pauses; it is not queued twice.
    busy: bool = False
    #: Number of next messages to deliver one by one, because one of them has failed.
    singly: int = 0
    #: Failed message that causes the pause; None: no pause.
    pauses_for: ReceivedMessage | None = None
    #: Number of pauses, so that the timer of an earlier pause does nothing.
    pause: int = 0

    def outlives_its_pause(self, arrived: ReceivedMessage) -> bool:
        """Return True if the key pauses for a message that is neither held nor redelivered.

        Drops leading messages that are no longer held: their queue was dropped, or a newer
        delivery replaced them.
        """
        failed = self.pauses_for
        if failed is None or failed.queue.waits(failed):
            return False
        while self.messages and not (first := self.messages[0]).queue.waits(first):
            self.messages.popleft()
        if self.messages and self.messages[0].failures:
            self.pauses_for = self.messages[0]  # it failed in the same call
        elif _is_again(arrived, failed):
            self.pauses_for = arrived
        else:
            self.pauses_for = None
        return self.pauses_for is None


class ByKey:
    """Service that calls the listener in the order of message keys."""

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
        suspend_ms: int | None,
        retries: Retries,
        gives_back_behind: bool,
        suspects: Suspects | None = None,
    ) -> None:
        """Prepare the service; it starts with ``arrived``.

        Args:
            holds: returns True if this client may work on a queue.
            suspend_ms: the pause of a key after a failure; None: the group's backoff.
            retries: attempts and backoff of the group.
            gives_back_behind: the group is ordered too, so after a final failure the broker
                releases the later leased messages of the key.
            suspects: messages to try one at a time; None: no suspects.
        """
        self._suspects = suspects or Suspects(frozenset, tell=lambda: None)
        self._calling, self._settling, self._workers = calling, settling, workers
        self._key_of, self._statistics, self._timetable = key_of, statistics, timetable
        self._holds, self._batch, self._suspend_ms = holds, batch, suspend_ms
        self._retries, self._gives_back_behind = retries, gives_back_behind
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, Hashable], Line] = {}
        #: Heap of waiting keys: stored_at_ms and offset of the next message, a tiebreaker, the key.
        self._standing: list[tuple[int, int, int, Line]] = []
        self._numbers = itertools.count()
        #: Number of keys that wait for a worker or are with one.
        self._runnable = 0

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Accept pulled messages."""
        queue.put(messages)
        topic = queue.queue.topic
        keys = [self._key(message) for message in messages]
        begun: list[Line] = []
        with self._lock:
            for key, message in zip(keys, messages, strict=True):
                # A message without a key gets a line of its own.
                place = (topic, message if key is None else key)
                line = self._lines.get(place)
                if line is None:
                    line = self._lines[place] = Line(place)
                is_free = line.outlives_its_pause(message) or not line.busy
                line.messages.append(message)
                if is_free:
                    line.busy = True
                    line.pause += 1
                    begun.append(line)
            self._runnable += len(begun)
        for line in begun:
            self._line_up(line)

    def is_starving(self) -> bool:
        """Return True if too few keys are runnable to keep the workers busy."""
        return self._runnable - self._workers.stuck < KEYS_EACH * self._workers.threads

    def expire(self) -> None:
        """Do nothing: a call has no time limit, as it delays only its own key."""

    def _key(self, message: ReceivedMessage) -> Hashable | None:
        try:
            key = self._key_of(message)
            hash(key)
        except Exception:
            log.exception("no key of %r: consuming it in order with others without a key", message)
            return UNKNOWN
        return key

    def _line_up(self, line: Line) -> None:
        """Queue the key and submit one turn, which takes the key with the oldest message."""
        with self._lock:
            first = line.messages[0]
            age = first.stored_at_ms, first.queue_offset
            heappush(self._standing, (*age, next(self._numbers), line))
        self._workers.submit(self._turn)

    def _turn(self) -> None:
        """Consume one batch of the key with the oldest message, then queue the key again."""
        with self._lock:
            line = heappop(self._standing)[-1]
        while self._step(line):
            # If no other turn waits, this key is next: continue without waking another worker.
            if not (self._workers.idle and self._workers.goes_on()):
                self._line_up(line)
                return

    def _step(self, line: Line) -> bool:
        """Consume one batch of a key; return True if the key can continue now."""
        pause_ms: int | None = None
        messages, queue = self._take(line)
        if queue is None:
            return self._end(line, None)
        if not (self._holds(queue.queue) and self._suspects.begin(messages)):
            pause_ms = UNLOCKED_MS
            self._put_back(line, messages)
        else:
            pause_ms = self._begin(line, messages, queue=queue)
            self._suspects.end(messages)
            if pause_ms is None:  # otherwise they were put back, and remain single
                line.singly = max(0, line.singly - 1)
        return self._end(line, pause_ms)

    def _begin(
        self, line: Line, messages: Sequence[ReceivedMessage], *, queue: ProcessQueue
    ) -> int | None:
        """Call the listener with the messages still held; return the key's pause in ms, or None."""
        if begun := queue.begin(messages):
            try:
                return self._consume(line, begun, queue=queue)
            except BaseException:
                log.exception(
                    "a call could not be completed: a key of %s pauses", queue.queue.topic
                )
                # Without this the key would stay busy forever. ``consume_again`` skips messages
                # that are already settled.
                queue.consume_again(begun)
                self._put_back(line, begun)
                return suspension_ms(self._suspend_ms)
        return None

    def _take(self, line: Line) -> tuple[list[ReceivedMessage], ProcessQueue | None]:
        """Take the next messages of a key, all from one queue."""
        taken: list[ReceivedMessage] = []
        may_be_suspects = self._suspects.any
        with self._lock:
            limit = 1 if line.singly else self._batch
            waiting = line.messages
            while waiting and waiting[0].queue.dropped:
                waiting.popleft()
            queue = waiting[0].queue if waiting else None
            while waiting and len(taken) < limit and waiting[0].queue is queue:
                is_suspect = may_be_suspects and self._suspects.includes(waiting[0])
                if is_suspect and taken:
                    break
                taken.append(waiting.popleft())
                if is_suspect:
                    break
        return taken, queue

    def _put_back(self, line: Line, messages: Sequence[ReceivedMessage]) -> None:
        with self._lock:
            line.messages.extendleft(reversed(messages))

    def _end(self, line: Line, pause_ms: int | None) -> bool:
        """Pause the key, or delete it if it is empty; return True if it can continue now."""
        with self._lock:
            left = bool(line.messages)
            line.busy = left
            if not left:
                del self._lines[line.key]
            goes_on = left and pause_ms is None
            if not goes_on:
                self._runnable -= 1
            if left and not goes_on:
                line.pauses_for = line.messages[0]
                line.pause += 1
            pause = line.pause
        if not left and self.is_starving():
            self._settling.hurry()
        if left and pause_ms is not None:
            self._timetable.after(pause_ms, partial(self._resume, line, pause))
        return goes_on

    def _resume(self, line: Line, pause: int) -> None:
        with self._lock:
            if line.pause != pause:
                return
            line.pauses_for = None
            self._runnable += 1
        self._line_up(line)

    def _consume(
        self, line: Line, messages: Sequence[ReceivedMessage], *, queue: ProcessQueue
    ) -> int | None:
        """Call the listener once; return the key's pause in ms, or None."""
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
        """Put failed messages back, to be delivered singly, or settle them as exhausted."""
        failed = messages[done:]
        exhausted = len(failed) == 1 and failed[0].delivery_attempt >= self._retries.max_attempts
        if exhausted:
            parts = parts_of(messages, done, answer=answer, how=Again("give_up"))
            if self._gives_back_behind and context.key is not None:
                self._forget_behind(line, failed[0])
            self._settling.settle(*parts)
            return None
        if done:
            self._settling.settle(Part(messages[:done]))
        self._settling.count(Part(failed, reason=answer.reason, error_type=answer.error_type))
        for message in failed:
            message.failures += 1
        failed[0].queue.consume_again(failed)
        self._put_back(line, failed)
        with self._lock:
            # A message that failed alone is the first of the single ones again.
            line.singly = max(line.singly, len(failed))
        return self._pause_ms(context, failed[0])

    def _pause_ms(self, context: KeyContext, failed: ReceivedMessage) -> int:
        """Return the pause in ms: of the listener, else of the consumer, else the backoff."""
        asked_ms = context.suspend_ms
        if asked_ms is None or asked_ms < 0:
            asked_ms = self._suspend_ms
        if asked_ms is None:
            return self._retries.delay_ms(failed.reconsume_times)
        return suspension_ms(asked_ms)

    def _forget_behind(self, line: Line, given_up: ReceivedMessage) -> None:
        """Drop the held messages of the key behind an exhausted one: their leases have ended."""
        with self._lock:
            behind = [m for m in line.messages if m.queue is given_up.queue]
            others = [m for m in line.messages if m.queue is not given_up.queue]
            line.messages = deque(others)
        for message in behind:
            message.queue.lose(message)


def _is_again(message: ReceivedMessage, failed: ReceivedMessage) -> bool:
    """Return True if a message is the same or a newer delivery of a failed one."""
    is_same = message.queue_offset == failed.queue_offset
    is_same = is_same and message.queue.queue == failed.queue.queue
    return is_same and message.delivery_attempt >= failed.delivery_attempt


def by_message_group(message: ReceivedMessage) -> Hashable | None:
    """Return the message group, or None."""
    return message.message_group


def by_keys(message: ReceivedMessage) -> Hashable | None:
    """Return all keys of a message as one key, as RocketMQ does; None without keys."""
    return tuple(message.keys) or None
