"""Messages of a queue one after another: one call at a time for each queue (semantics §6.9)."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.calling import Answer, Calling
from rmq_pipeline.consumer.listener import OrderlyContext, Result, suspension_ms
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.timetable import Timetable
from rmq_pipeline.consumer.workers import Workers

log = logging.getLogger(__name__)

#: A queue with so much to do without end lets others go first.
CONTINUOUS_MS: Final = 60_000
YIELD_MS: Final = 10
#: When a queue is looked at again that is not locked.
UNLOCKED_MS: Final = 100


class Orderly:
    """Gives messages of a queue to the listener in order; a failure suspends the queue."""

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
    ) -> None:
        """Begin nothing yet.

        Args:
            holds: whether this client may work on a queue.
            max_reconsume_times: messages that have failed so often no longer hold up the queue:
                they come again behind others, after the group's backoff; -1: never.
        """
        self._calling, self._settling, self._workers = calling, settling, workers
        self._statistics, self._timetable, self._clock = statistics, timetable, clock
        self._holds, self._batch, self._suspend_ms = holds, batch, suspend_ms
        self._max_reconsume_times = max_reconsume_times

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages were pulled."""
        if queue.put(messages):
            self._workers.submit(partial(self._go_on, queue))

    def is_starving(self) -> bool:
        """Whether what is held is stuck, and pulling more would help: it would not."""
        return False

    def expire(self) -> None:
        """Calls may take as long as they like: what follows has to wait."""

    def _go_on(self, queue: ProcessQueue) -> None:
        """Consume what waits; come back later where that is to be."""
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
            messages = queue.take(self._batch)
            if not messages:
                self._settling.hurry()
                return
            try:
                suspended_ms = self._consume(queue, messages)
            except BaseException:
                place = queue.queue
                log.exception(
                    "the end of a call failed: queue %d of %s is suspended",
                    place.queue_id,
                    place.topic,
                )
                # Or nobody would ever look at the queue again.
                queue.consume_again(messages)
                suspended_ms = self._suspend_ms
            queue.keep()
            if suspended_ms is not None:
                self._later(queue, suspended_ms)
                return

    def _later(self, queue: ProcessQueue, delay_ms: int) -> None:
        self._timetable.after(delay_ms, partial(self._workers.submit, partial(self._go_on, queue)))

    def _consume(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> int | None:
        """One call; for how long the queue is suspended, None: it goes on."""
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
        """Messages failed: whether any of them is to hold up the queue."""
        hopeless = [m for m in messages if self._is_hopeless(m)]
        left = [m for m in messages if not self._is_hopeless(m)]
        if hopeless:
            part = Part(hopeless, "retry", reason=answer.reason, error_type=answer.error_type)
            self._settling.settle(part)
        queue.consume_again(left)
        for message in left:
            message.failures += 1
        return bool(left)

    def _is_hopeless(self, message: ReceivedMessage) -> bool:
        most = self._max_reconsume_times
        return 0 <= most <= message.reconsume_times


def _understood(result: Result, context: OrderlyContext, *, queue: ProcessQueue) -> Result:
    """What an answer means, with and without auto_commit: SUCCESS is then nothing yet."""
    if result is Result.LATER:
        return Result.SUSPEND
    if not context.auto_commit:
        return result
    if result in (Result.COMMIT, Result.ROLLBACK):
        log.warning(
            "%s for queue %d of %s is for listeners without auto_commit: taken as success",
            result.value,
            queue.queue.queue_id,
            queue.queue.topic,
        )
        return Result.COMMIT
    return Result.COMMIT if result is Result.SUCCESS else result
