"""Order by queue, like RocketMQ's orderly pop: one batch of a queue at a time.

A receive leases a queue's next messages as a batch, which blocks the queue. The block ends when
each message of the batch is settled or due again (its lease or its retry delay has ended). Then all
messages from the first unsettled one on are redelivered, including later ones that were acked. An
acked message behind an unsettled one stays as AHEAD until it is redelivered, or until nothing
before it is unsettled.
"""

import numpy as np

from rmq_pipeline.broker.state.consumption import NO_ROWS, Consumption, Mask, Redelivery, acked
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import AHEAD, FAR, WAITING, Rows
from rmq_pipeline.message import Int32s
from rmq_pipeline.store.events import Kind


class ByQueue(Consumption):
    """State of a consumer group on a queue, with order by queue: the leases hold all of it."""

    __slots__ = ("_eases", "_told_eases")

    def __init__(self) -> None:
        super().__init__()
        #: How often acks have ended the block or moved its end forward, and how many of these
        #: changes the waiting receives were told of. The writer counts; another thread tells.
        self._eases = 0
        self._told_eases = -1

    def blocked_until(self) -> int:
        """Return the time until which the queue is blocked.

        FAR while a message is parked or marked for the dead letters; 0 if nothing is unsettled.
        """
        leases = self.leases
        rows = leases.unsettled()
        if not len(rows):
            return 0
        if leases.delivery[rows].min() < WAITING:
            return FAR
        return int(leases.visible_at[rows].max())

    def is_blocked(self, now_ms: int) -> bool:
        """Return True while a batch is with a receiver, waits for its retry, or is parked."""
        return self.blocked_until() > now_ms

    def has_nothing(self, end: int, now_ms: int, *, may_repeat: bool) -> bool:
        """Return True if a receive can skip the queue, unless it may repeat a batch."""
        return not may_repeat and super().has_nothing(end, now_ms, may_repeat=False)

    def next_after(self, now_ms: int) -> int | None:
        """Return when a blocked queue becomes free by itself.

        None: it is free, or only a settle or unpark frees it.
        """
        until = self.blocked_until()
        return until if now_ms < until < FAR else None

    def of_attempt(self, attempt_id_hash: int, *, now_ms: int) -> Rows:
        """Return the rows of a batch that an earlier call of the same attempt leased.

        Empty if that batch is not the one that blocks the queue.
        """
        leases = self.leases
        rows = leases.unsettled()
        running = leases.visible_at[rows] > now_ms
        mine = running & (leases.delivery[rows] > WAITING)
        mine &= leases.attempt_id_hash[rows] == attempt_id_hash
        if not mine.any():
            return NO_ROWS
        last = int(np.flatnonzero(mine)[-1])
        if not mine[: last + 1].all() or running[last + 1 :].any():
            return NO_ROWS
        chosen: Rows = rows[mine]
        return chosen

    def due(self, rows: Rows, *, max_attempts: int, now_ms: int) -> Redelivery:
        """Return what may be redelivered: all messages from the first unsettled one on, or none.

        Every delivery counts, for all of them. At the end of the lease only the first message can
        be exhausted: the consumer may never have processed the later ones.
        """
        leases = self.leases
        none = np.zeros(0, np.int32)
        if self.is_blocked(now_ms):
            return Redelivery(NO_ROWS, none, NO_ROWS)
        first = leases.unsettled()[:1]
        if leases.attempt[first[0]] >= max_attempts:
            return Redelivery(NO_ROWS, none, first)
        again = np.flatnonzero(leases.alive)
        before = self._counted(again, max_attempts=max_attempts)
        return Redelivery(again, before + np.int32(1), NO_ROWS)

    def ended(self, rows: Rows, due: Redelivery) -> tuple[Rows, Rows]:
        """Return the leased rows; none if the first message is exhausted, which resets the rest."""
        leased = rows[self.leases.delivery[rows] > WAITING]
        return (NO_ROWS if len(due.exhausted) else leased), NO_ROWS

    def blameless(self, spent: Mask) -> Mask:
        """Mark the rows behind the first one without an attempt left: it had them redelivered."""
        behind: Mask = np.cumsum(spent) > spent
        return behind

    def begun_again(self, failed: Rows, *, settled: Rows, now_ms: int) -> list[EventRows]:
        """Reset the attempts of unsettled rows behind the first failed row, unless settled with it.

        A leased message is at its first attempt now, and its receipt stays valid. Messages that are
        parked or marked for the dead letters failed themselves and keep their attempts.
        """
        if not len(failed):
            return []
        leases = self.leases
        rows = np.setdiff1d(leases.unsettled(), settled)
        rows = rows[(rows > failed[0]) & (leases.delivery[rows] >= WAITING)]
        if not len(rows):
            return []
        running = (leases.delivery[rows] > WAITING) & (leases.visible_at[rows] > now_ms)
        return [
            EventRows(
                kind=Kind.INVISIBLE,
                at_ms=now_ms,
                queue_offset=leases.offset[rows],
                attempt=running.astype(np.int32),
                visible_at_ms=leases.visible_at[rows],
                delivery=leases.delivery[rows],
                epoch=leases.epoch[rows],
                attempt_id_hash=leases.attempt_id_hash[rows],
                message_group_hash=leases.group[rows],
            )
        ]

    def handled_first(self, rows: Rows) -> Rows:
        """Return the leased rows: a listener handles the queue by offset."""
        return rows

    def acks(self, done: Rows, *, settled: Rows = NO_ROWS, now_ms: int) -> list[EventRows]:
        """Build the events of acks; an ack behind an unsettled message becomes AHEAD."""
        leases = self.leases
        left = leases.alive & (leases.delivery != AHEAD)
        left[done] = False
        left[settled] = False
        gap = int(np.argmax(left)) if left.any() else len(left)
        held_up = np.flatnonzero((leases.alive & (leases.delivery == AHEAD))[:gap])
        past = np.union1d(done[done < gap], held_up)
        ahead = done[done > gap]
        events = []
        if len(past):
            events.append(acked(leases, past, now_ms=now_ms))
        if len(ahead):
            events.append(
                EventRows(
                    kind=Kind.ACK_AHEAD,
                    at_ms=now_ms,
                    queue_offset=leases.offset[ahead],
                    attempt=leases.attempt[ahead],
                    visible_at_ms=FAR,
                    delivery=AHEAD,
                    message_group_hash=leases.group[ahead],
                )
            )
        return events

    def acks_wake(self) -> bool:
        """Return True if acks may have unblocked the queue since the last call.

        Most acks of a batch leave the queue blocked, and would wake the receives for nothing.
        """
        eases = self._eases
        told, self._told_eases = self._told_eases, eases
        return eases != told

    def reopened(self, beyond: int, *, max_attempts: int, now_ms: int) -> list[EventRows]:
        """Make acked messages behind the end of a redelivered batch available again.

        Args:
            beyond: the last offset of the batch.
        """
        leases = self.leases
        rows = np.flatnonzero(leases.alive & (leases.delivery == AHEAD) & (leases.offset > beyond))
        if not len(rows):
            return []
        return [
            EventRows(
                kind=Kind.RELEASE,
                at_ms=now_ms,
                queue_offset=leases.offset[rows],
                attempt=self._counted(rows, max_attempts=max_attempts),
                visible_at_ms=now_ms,
                delivery=WAITING,
                message_group_hash=leases.group[rows],
            )
        ]

    def _counted(self, rows: Rows, *, max_attempts: int) -> Int32s:
        """Return the deliveries that count; an acked row did not fail, so it keeps one attempt."""
        attempts = self.leases.attempt[rows]
        acked_before = self.leases.delivery[rows] == AHEAD
        capped: Int32s = np.where(acked_before, np.minimum(attempts, max_attempts - 1), attempts)
        return capped

    def apply(self, events: EventRows) -> None:
        """Apply the events to the state, and note an earlier end of the block."""
        if events.kind not in (Kind.ACK, Kind.ACK_AHEAD):
            super().apply(events)
            return
        before = self.blocked_until()
        super().apply(events)
        self._eases += self.blocked_until() < before
