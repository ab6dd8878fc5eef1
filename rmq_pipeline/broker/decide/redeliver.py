"""Failed deliveries and ended leases: the next attempt, or on_failure when none is left.

``dead_letter``: the message goes to the dead letters, and the later messages are delivered.
``park``: the message is held until an operator unparks it. With order, all later messages of its
message group are held too.
``dead_letter_group``: with order, the message group is quarantined. Its later messages go to the
dead letters too, until an operator lifts the quarantine.

Leased messages behind a failed one are released: receipts become void, attempts do not count.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import (
    EXHAUSTED,
    FAR,
    HELD,
    PARKED,
    WAITING,
    LeaseTable,
    Rows,
)
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.failure import Failure
from rmq_pipeline.group import Group, OnFailure
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

_NONE: Final = np.zeros(0, dtype=np.int64)
#: Share of a frame for the failures of the later messages, each of which has its own copy. The
#: share is small so that the failures of all queues of a topic fit into one frame. _COPY_BYTES is
#: the least for one message.
_COPIES_BYTES: Final = 512 * 1024
_COPY_BYTES: Final = 256


def release(
    consumption: Consumption,
    rows: Rows,
    *,
    visible_at_ms: int | Int64s,
    delivery: int = WAITING,
) -> list[EventRows]:
    """Build the events that release messages: receipts void, a running attempt not counted.

    Args:
        delivery: WAITING, or HELD if they must not be delivered.
    """
    leases = consumption.leases
    leased = leases.delivery[rows] > WAITING
    attempt = leases.attempt[rows] - leased.astype(np.int32)
    return [
        EventRows(
            kind=Kind.RELEASE,
            at_ms=0,
            queue_offset=leases.offset[rows],
            attempt=attempt,
            visible_at_ms=visible_at_ms,
            delivery=delivery,
            message_group_hash=leases.group[rows],
        )
    ]


def release_running(
    consumption: Consumption, chosen: npt.NDArray[np.bool_], *, now_ms: int
) -> list[EventRows]:
    """Release the chosen rows that a receiver holds now, without counting the attempt.

    A lease that has ended counts as a failed attempt, even if no event has recorded its end.
    """
    leases = consumption.leases
    running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
    rows = np.flatnonzero(running & chosen)
    return release(consumption, rows, visible_at_ms=now_ms) if len(rows) else []


def released_behind(
    consumption: Consumption, failed: Rows, *, visible_at: Int64s, settled: Int64s
) -> list[EventRows]:
    """Release the leased messages that failed ones block.

    A waiting message keeps its own time, which may be later than the failed message's.
    """
    leases = consumption.leases
    behind, first = consumption.behind(failed, settled=settled)
    leased = leases.delivery[behind] > WAITING
    if not leased.any():
        return []
    return release(consumption, behind[leased], visible_at_ms=visible_at[first[leased]])


def give_up(
    consumption: Consumption,
    failed: Rows,
    *,
    policy: OnFailure,
    now_ms: int,
    said: Sequence[str | None] | None = None,
    settled: Int64s = _NONE,
    keep_behind: bool = False,
) -> list[EventRows]:
    """Build the events of messages that failed permanently, and of the messages behind them.

    Args:
        failed: rows; none lies behind another unless both go to the dead letters.
        said: JSON of each failure; None: the leases ended without a report.
        settled: offsets that are settled in the same step.
        keep_behind: keep the leases behind the failed messages, because the caller still holds
            their receipts. Has no effect if the message group is quarantined.
    """
    leases = consumption.leases
    offsets, groups = leases.offset[failed], leases.group[failed]
    behind, _ = consumption.behind(failed, settled=settled)
    policy = consumption.policy(policy)
    kind = Kind.EXPIRE if said is None else Kind.RETRY
    state: dict[str, Any] = {"visible_at_ms": now_ms, "delivery": EXHAUSTED, "detail": said}
    if policy == "park":
        kind = Kind.PARK
        why = _failures(consumption, offsets, said=said)
        state = {"visible_at_ms": FAR, "delivery": PARKED, "detail": why}
    event = EventRows(
        kind=kind,
        at_ms=now_ms,
        queue_offset=offsets,
        attempt=leases.attempt[failed],
        message_group_hash=groups,
        **state,
    )
    if policy == "park":
        follow = release(consumption, behind, visible_at_ms=FAR, delivery=HELD)
    elif policy == "dead_letter_group":
        why = _failures(consumption, offsets, said=said)
        return [event, *_quarantine(consumption, failed, why=why, behind=behind, now_ms=now_ms)]
    else:
        behind = behind[leases.delivery[behind] > WAITING] if not keep_behind else behind[:0]
        follow = release(consumption, behind, visible_at_ms=now_ms)
    return [event, *follow] if len(behind) else [event]


def _failures(
    consumption: Consumption, offsets: Int64s, *, said: Sequence[str | None] | None
) -> list[str]:
    """Return the failure of each message as JSON: this one, an earlier one, or "no report"."""
    known = consumption.failures
    now = said or [None] * len(offsets)
    unsaid = Failure.unsaid().to_json()
    return [one or known.get(o, unsaid) for one, o in zip(now, offsets.tolist(), strict=True)]


def _quarantine(
    consumption: Consumption, failed: Rows, *, why: list[str], behind: Rows, now_ms: int
) -> list[EventRows]:
    """Quarantine the message groups of failed messages, with their unsettled messages.

    With many later messages their failure texts are cut; the group's own event has the full text.
    """
    leases = consumption.leases
    groups = leases.group[failed]
    _, firsts = np.unique(groups, return_index=True)
    firsts = firsts[groups[firsts] != 0]
    if not len(firsts):
        return []
    events = [
        EventRows(
            kind=Kind.QUARANTINE,
            at_ms=now_ms,
            queue_offset=leases.offset[failed][firsts],
            message_group_hash=groups[firsts],
            detail=[why[i] for i in firsts.tolist()],
        )
    ]
    if len(behind):
        of_group = dict(
            zip(groups[firsts].tolist(), (why[i] for i in firsts.tolist()), strict=True)
        )
        leased = leases.delivery[behind] > WAITING
        events.append(
            exhausted_with_group(
                leases.offset[behind],
                leases.group[behind],
                failures=of_group,
                attempt=leases.attempt[behind] - leased.astype(np.int32),
                now_ms=now_ms,
                copy_bytes=max(_COPY_BYTES, _COPIES_BYTES // len(behind)),
            )
        )
    return events


def exhausted_with_group(
    offsets: Int64s,
    groups: Int64s,
    *,
    failures: Mapping[int, str],
    attempt: Any,
    now_ms: int,
    copy_bytes: int | None = None,
) -> EventRows:
    """Build the events of messages dead-lettered because their message group is quarantined.

    Args:
        failures: JSON of the failure that quarantined each message group.
        attempt: number of deliveries that count.
        copy_bytes: most bytes of the failure of each message; None: no limit.
    """
    distinct = {
        group: _of_follower(Failure.from_json(failures[group]), copy_bytes)
        for group in np.unique(groups).tolist()
    }
    return EventRows(
        kind=Kind.EXPIRE,
        at_ms=now_ms,
        queue_offset=offsets,
        attempt=attempt,
        visible_at_ms=now_ms,
        delivery=EXHAUSTED,
        message_group_hash=groups,
        detail=[distinct[group] for group in groups.tolist()],
    )


def _of_follower(failure: Failure, most_bytes: int | None) -> str:
    """Return a later message's failure as JSON of at most ``most_bytes``.

    The signature is never cut: failures are grouped by it.
    """
    text = failure.of_follower().to_json()
    for name in ("reason", "error_type", "run_id"):
        while (
            most_bytes is not None and len(text) > most_bytes and (said := getattr(failure, name))
        ):
            # Bytes a character takes in JSON depend on the language; this is their average.
            left = 1 - (len(text) - most_bytes) / len(json.dumps(said))
            said = said[: max(0, min(int(len(said) * left), len(said) - 1))]
            failure = replace(failure, **{name: said})
            text = failure.of_follower().to_json()
    return text


@dataclass(frozen=True, slots=True)
class Ended:
    """Unsettled messages that may be redelivered now."""

    offset: Int64s
    #: Number of the next delivery.
    attempt: Int32s
    group: Int64s
    #: Events of the messages without an attempt left, and of the messages behind them.
    events: list[EventRows] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.offset)

    def slice(self, start: int, stop: int) -> "Ended":
        """Return the rows ``[start, stop)``."""
        return Ended(self.offset[start:stop], self.attempt[start:stop], self.group[start:stop])


_NOTHING: Final = Ended(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))


def ended_leases(consumption: Consumption, group: Group, *, now_ms: int) -> Ended:
    """Return what a receive may redeliver: retries that are due, and leases that have ended."""
    rows = consumption.leases.visible(now_ms)
    if not len(rows):
        return _NOTHING
    due = consumption.due(rows, max_attempts=group.max_attempts, now_ms=now_ms)
    leases = consumption.leases
    events = _failed(consumption, due.exhausted, group=group, now_ms=now_ms)
    return Ended(leases.offset[due.rows], due.attempt, leases.group[due.rows], events)


def _failed(consumption: Consumption, rows: Rows, *, group: Group, now_ms: int) -> list[EventRows]:
    """Build the events of messages without an attempt left, and of the messages behind them."""
    if not len(rows):
        return []
    events = give_up(consumption, rows, policy=group.on_failure, now_ms=now_ms)
    return [*events, *consumption.begun_again(rows, settled=rows, now_ms=now_ms)]


def exhausts(events: Iterable[EventRows]) -> bool:
    """Return True if these events mark messages for the dead letters."""
    return any(np.any(rows.column("delivery", np.int64) == EXHAUSTED) for rows in events)


def backoff_ms(group: Group, attempts: Int32s) -> Int64s:
    """Return the delay in ms after the n-th delivery has failed."""
    distinct, place = np.unique(attempts, return_inverse=True)
    delays: Int64s = np.array([group.delay_ms(n) for n in distinct.tolist()], dtype=np.int64)
    return delays[place]


def counted_in_place(
    leases: LeaseTable, rows: Rows, *, group: Group, said: pa.Array, now_ms: int
) -> EventRows:
    """Build the event of failed deliveries that go on as the next attempt under the same receipts.

    Args:
        group: its max_attempts caps the count. A consumer that retries more often decides itself
            when to reject the message.
        said: JSON of each failure, null without a report.
    """
    attempt = leases.attempt[rows]
    return EventRows(
        kind=Kind.INVISIBLE,
        at_ms=now_ms,
        queue_offset=leases.offset[rows],
        attempt=np.maximum(attempt, np.minimum(attempt + 1, group.max_attempts)).astype(np.int32),
        visible_at_ms=leases.visible_at[rows],
        delivery=leases.delivery[rows],
        epoch=leases.epoch[rows],
        attempt_id_hash=leases.attempt_id_hash[rows],
        message_group_hash=leases.group[rows],
        detail=None if said.null_count == len(said) else said.to_pylist(),
    )


def expire(consumption: Consumption, group: Group, *, now_ms: int, limit: int) -> list[EventRows]:
    """Build the events of ended leases for revive: the messages wait, or go to the dead letters.

    A message that waits already gets no event: a receive finds it as it is.
    """
    leases = consumption.leases
    rows = leases.visible(now_ms)[:limit]
    if not len(rows):
        return []
    due = consumption.due(rows, max_attempts=group.max_attempts, now_ms=now_ms)
    events = _failed(consumption, due.exhausted, group=group, now_ms=now_ms)
    ended, behind = consumption.ended(rows, due)
    if len(ended):
        events.append(_expired(consumption, ended))
    if len(behind):
        events.extend(release(consumption, behind, visible_at_ms=now_ms))
    return events


def _expired(consumption: Consumption, rows: Rows) -> EventRows:
    leases = consumption.leases
    return EventRows(
        kind=Kind.EXPIRE,
        at_ms=0,
        queue_offset=leases.offset[rows],
        attempt=leases.attempt[rows],
        visible_at_ms=leases.visible_at[rows],
        delivery=WAITING,
        message_group_hash=leases.group[rows],
    )


@dataclass(frozen=True, slots=True)
class Revive(Request):
    """Request that records ended leases of all groups."""

    limit: int
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (revived, parked, marked, when the next lease ends) as the answer.

        ``marked`` is above 0 if messages wait for dead-lettering.
        """
        state.fence(self.window)
        decision = Decision()
        revived, parked, exhausted, next_visible = 0, 0, 0, FAR
        for key, consumption in state.consumptions.items():
            group = state.groups.get(key[0])
            if group is None or not len(consumption.leases):
                continue
            found: list[EventRows] = []
            if now_ms >= consumption.leases.next_visible and revived < self.limit:
                found = expire(consumption, group, now_ms=now_ms, limit=self.limit - revived)
                for events in found:
                    again = events.column("delivery", np.int64) == WAITING
                    revived += int(again.sum()) if events.kind != Kind.QUARANTINE else 0
                    parked += len(events) if events.kind == Kind.PARK else 0
                decision.events.extend(QueueKey._make(key).events(found, now_ms))
            leases = consumption.leases
            running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
            if running.any():
                next_visible = min(next_visible, int(leases.visible_at[running].min()))
            exhausted += len(consumption.leases.exhausted()) + exhausts(found)
        decision.answer = (
            revived,
            parked,
            exhausted,
            None if next_visible == FAR else next_visible,
        )
        return decision
