"""Consumption in the order of queues: one call per queue at a time (semantics §6.9)."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.listener import Answer, Calling, OrderlyContext, Result, suspension_ms
from rmq_pipeline.consumer.membership import Suspects
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable, Workers

log = logging.getLogger(__name__)

#: After this time without a break, a queue yields its worker to others.
CONTINUOUS_MS: Final = 60_000
YIELD_MS: Final = 10
#: Pause of a queue that is not locked.
UNLOCKED_MS: Final = 100


class Orderly:
    """Service that calls the listener in the order of a queue; a failure suspends the queue."""

    spans = False

    def __init__(
        self,
        calling: Calling,
        *,
        settling: Settling,
        workers: Workers,
        statistics: Statistics,
        timetable: Timetable,
        clock: Clock,
        holds: Callable[[MessageQueue], bool],
        batch: int,
        suspend_ms: int,
        max_reconsume_times: int,
        suspects: Suspects | None = None,
    ) -> None:
        """Prepare the service; it starts with ``arrived``.

        Args:
            holds: returns True if this client may work on a queue.
            max_reconsume_times: failures after which a message no longer blocks the queue: it is
                retried out of order, after the group's backoff; -1: never.
            suspects: messages to try one at a time; None: no suspects.
        """
        self._suspects = suspects or Suspects(frozenset, tell=lambda: None)
        self._calling, self._settling, self._workers = calling, settling, workers
        self._statistics, self._timetable, self._clock = statistics, timetable, clock
        self._holds, self._batch, self._suspend_ms = holds, batch, suspend_ms
        self._max_reconsume_times = max_reconsume_times

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Accept pulled messages."""
        if queue.put(messages):
            self._workers.submit(partial(self._go_on, queue))

    def is_starving(self) -> bool:
        """Return False: more messages of a blocked queue would not help."""
        return False

    def expire(self) -> None:
        """Do nothing: a call has no time limit, and later messages wait for it."""

    def _go_on(self, queue: ProcessQueue) -> None:
        """Consume waiting messages until the queue is empty, suspended or not locked."""
        began_ms = self._clock.now_ms()
        while not queue.dropped:
            if not self._workers.goes_on():
                self._workers.submit(partial(self._go_on, queue))
                return
            if not self._holds(queue.queue):
                self._later(queue, UNLOCKED_MS)
                return
            if self._clock.now_ms() - began_ms > CONTINUOUS_MS:
                self._later(queue, YIELD_MS)
                return
            messages = self._take(queue)
            if not messages:
                self._settling.hurry()
                return
            if not self._suspects.begin(messages):
                queue.consume_again(messages)
                queue.keep()
                self._later(queue, UNLOCKED_MS)
                return
            try:
                suspended_ms = self._consume(queue, messages)
            except BaseException:
                place = queue.queue
                log.exception(
                    "a call could not be completed: queue %d of %s is suspended",
                    place.queue_id,
                    place.topic,
                )
                # Without this the queue would stay blocked forever.
                queue.consume_again(messages)
                suspended_ms = self._suspend_ms
            self._suspects.end(messages)
            queue.keep()
            if suspended_ms is not None:
                self._later(queue, suspended_ms)
                return

    def _take(self, queue: ProcessQueue) -> list[ReceivedMessage]:
        """Take the next messages; a suspect comes alone."""
        messages = queue.take(self._batch)
        if not self._suspects.any:
            return messages
        suspected = [i for i, message in enumerate(messages) if self._suspects.includes(message)]
        if suspected and len(messages) > 1:
            stop = max(1, suspected[0])
            queue.consume_again(messages[stop:])
            messages = messages[:stop]
        return messages

    def _later(self, queue: ProcessQueue, delay_ms: int) -> None:
        self._timetable.after(delay_ms, partial(self._workers.submit, partial(self._go_on, queue)))

    def _consume(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> int | None:
        """Call the listener once; return the queue's suspension in ms, or None."""
        context = OrderlyContext(queue.queue)
        answer = self._calling(messages, context)
        result = _understood(answer.result, context, queue=queue)
        failed = result in (Result.SUSPEND, Result.ROLLBACK)
        n = len(messages)
        self._statistics.consumed(
            queue.queue.topic,
            done=0 if failed else n,
            failed=n if failed else 0,
            took_ms=answer.took_ms,
        )
        suspension = suspension_ms(context.suspend_ms, usual_ms=self._suspend_ms)
        if result is Result.COMMIT:
            self._commit(queue)
        elif result is Result.ROLLBACK:
            queue.rollback()
            return suspension
        elif result is Result.SUSPEND and self._again(queue, messages, answer=answer):
            return suspension
        elif result is Result.SUSPEND and context.auto_commit:
            self._commit(queue)
        return None

    def _commit(self, queue: ProcessQueue) -> None:
        done = queue.commit()
        if done:
            self._settling.settle(Part(done))

    def _again(
        self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], *, answer: Answer
    ) -> bool:
        """Retry failed messages; return True if any of them still blocks the queue."""
        exhausted = [m for m in messages if self._is_exhausted(m)]
        left = [m for m in messages if not self._is_exhausted(m)]
        if exhausted:
            part = Part(exhausted, "retry", reason=answer.reason, error_type=answer.error_type)
            self._settling.settle(part)
        queue.consume_again(left)
        for message in left:
            message.failures += 1
        return bool(left)

    def _is_exhausted(self, message: ReceivedMessage) -> bool:
        most = self._max_reconsume_times
        return 0 <= most <= message.reconsume_times


def _understood(result: Result, context: OrderlyContext, *, queue: ProcessQueue) -> Result:
    """Translate a result; without auto_commit, SUCCESS settles nothing yet."""
    if result is Result.LATER:
        return Result.SUSPEND
    if not context.auto_commit:
        return result
    if result in (Result.COMMIT, Result.ROLLBACK):
        log.warning(
            "%s for queue %d of %s is for listeners without auto_commit; treated as success",
            result.value,
            queue.queue.queue_id,
            queue.queue.topic,
        )
        return Result.COMMIT
    return Result.COMMIT if result is Result.SUCCESS else result
