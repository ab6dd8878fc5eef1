"""Receiving a batch of a queue that is kept in order as a whole."""

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.redeliver import Ended, ended_leases
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.queue_order import blocked_until, of_attempt, reopened
from rmq_pipeline.broker.receiving.scan import QueueScan, Taken
from rmq_pipeline.broker.receiving.sieve import QueueSieve
from rmq_pipeline.broker.state import Queue
from rmq_pipeline.group import Group


class BatchScan(QueueScan):
    """A scan in order by queue: all from the first unsettled message on, or nothing."""

    def __init__(
        self,
        queue: Queue,
        consumption: Consumption,
        *,
        sieve: QueueSieve | None,
        group: Group,
        attempt: int,
        now_ms: int,
    ) -> None:
        """``attempt``: as ``epoch`` of a lease has it; 0: none that may have been made before."""
        leases = consumption.leases
        rows = of_attempt(leases, attempt, now_ms=now_ms) if attempt else ()
        #: Whether the same attempt has blocked the queue: its client is given the batch again.
        self.again = len(rows) > 0
        if self.again:
            ended = Ended(leases.offset[rows], leases.attempt[rows], leases.group[rows])
        else:
            ended = ended_leases(consumption, group, now_ms=now_ms)
        super().__init__(queue, consumption, sieve=sieve, ended=ended)
        self._max_attempts = group.max_attempts
        #: Nothing may be given that was not given before.
        self._closed = self.again or bool(ended.events) or blocked_until(leases) > now_ms

    def _fresh_left(self) -> bool:
        return not self._closed and super()._fresh_left()

    def progress_events(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """The cursor, and what was acked behind the end of the batch, which comes after it."""
        events = super().progress_events(taken, now_ms)
        if len(taken) and not self.again:
            leases, last = self.consumption.leases, int(taken.offset[-1])
            events.extend(reopened(leases, last, max_attempts=self._max_attempts, now_ms=now_ms))
        return events
