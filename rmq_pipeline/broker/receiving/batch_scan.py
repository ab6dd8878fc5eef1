"""Receiving a batch from a queue with order by queue."""

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.redeliver import Ended, ended_leases
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.queue_order import blocked_until, of_attempt, reopened
from rmq_pipeline.broker.receiving.scan import QueueScan, Taken
from rmq_pipeline.broker.receiving.sieve import QueueSieve
from rmq_pipeline.broker.state import Queue
from rmq_pipeline.group import Group


class BatchScan(QueueScan):
    """Scan in order by queue: all messages from the first unsettled one on, or none."""

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
        """Prepare the scan; ``attempt``: hash of the attempt id, below 0; 0: a call without one."""
        leases = consumption.leases
        rows = of_attempt(leases, attempt, now_ms=now_ms) if attempt else ()
        #: True if the same attempt has leased the batch before: its client gets the batch again.
        self.again = len(rows) > 0
        if self.again:
            ended = Ended(leases.offset[rows], leases.attempt[rows], leases.group[rows])
        else:
            ended = ended_leases(consumption, group, now_ms=now_ms)
        super().__init__(queue, consumption, sieve=sieve, ended=ended)
        self._max_attempts = group.max_attempts
        #: True if no message may be delivered for the first time.
        self._closed = self.again or bool(ended.events) or blocked_until(leases) > now_ms

    def _fresh_left(self) -> bool:
        return not self._closed and super()._fresh_left()

    def progress_events(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """Return the cursor event, and events that reopen messages acked behind the batch."""
        events = super().progress_events(taken, now_ms)
        if len(taken) and not self.again:
            leases, last = self.consumption.leases, int(taken.offset[-1])
            events.extend(reopened(leases, last, max_attempts=self._max_attempts, now_ms=now_ms))
        return events
