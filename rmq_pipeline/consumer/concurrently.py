"""Consumption without order: one call per worker at a time (semantics §6.8)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.listener import (
    Again,
    Answer,
    Calling,
    ConcurrentContext,
    Result,
    Status,
    again,
    done_of,
)
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Workers

#: Delay level of the retry after a call that timed out.
TIMEOUT_LEVEL: Final = 3


@dataclass(slots=True, eq=False)
class _Running:
    messages: Sequence[ReceivedMessage]
    since_ms: int


class Concurrently:
    """Service that passes batches of a queue to the next free worker."""

    #: The span of held offsets is bounded, which bounds the redeliveries after a crash.
    spans = True

    def __init__(
        self,
        calling: Calling,
        *,
        settling: Settling,
        workers: Workers,
        statistics: Statistics,
        clock: Clock,
        batch: int,
        timeout_ms: int,
    ) -> None:
        self._calling, self._settling, self._workers = calling, settling, workers
        self._statistics, self._clock = statistics, clock
        self._batch, self._timeout_ms = batch, timeout_ms
        self._lock = threading.Lock()
        self._running: set[_Running] = set()

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Accept pulled messages."""
        queue.put(messages)
        for start in range(0, len(messages), self._batch):
            batch = messages[start : start + self._batch]
            self._workers.submit(partial(self._consume, queue, batch))

    def is_starving(self) -> bool:
        """Return False: no message waits for another one."""
        return False

    def expire(self) -> None:
        """Retry the messages of calls that take too long; their later results are ignored."""
        before_ms = self._clock.now_ms() - self._timeout_ms
        with self._lock:
            late = [running for running in self._running if running.since_ms <= before_ms]
            self._running.difference_update(late)
        for running in late:
            how = again(TIMEOUT_LEVEL)
            self._settling.settle(
                Part(
                    running.messages,
                    how.outcome,
                    how.retry_after_ms,
                    f"the listener took longer than {self._timeout_ms} ms",
                    Status.TIME_OUT.value,
                )
            )

    def _consume(self, queue: ProcessQueue, batch: Sequence[ReceivedMessage]) -> None:
        messages = queue.begin(batch)
        if not messages:
            return
        context = ConcurrentContext(queue.queue)
        running = _Running(messages, self._clock.now_ms())
        with self._lock:
            self._running.add(running)
        answer = self._calling(messages, context)
        with self._lock:
            in_time = running in self._running
            self._running.discard(running)
        done = done_of(answer.result, ack_index=context.ack_index, count=len(messages))
        self._statistics.consumed(
            queue.queue.topic, done=done, failed=len(messages) - done, took_ms=answer.took_ms
        )
        if in_time:
            how = again(context.delay_level_when_next_consume)
            self._settling.settle(*parts_of(messages, done, answer=answer, how=how))


def parts_of(
    messages: Sequence[ReceivedMessage], done: int, *, answer: Answer, how: Again
) -> list[Part]:
    """Split the messages of a call: the first ``done`` are acked, the others fail as ``how``."""
    parts = [Part(messages[:done])] if done else []
    if done == len(messages):
        return parts
    reason, error_type = answer.reason, answer.error_type
    if answer.result is Result.SUCCESS:
        reason = f"the listener finished {done} of {len(messages)} messages"
        error_type = Status.FAILED.value
    failed = Part(messages[done:], how.outcome, how.retry_after_ms, reason, error_type)
    return [*parts, failed]
