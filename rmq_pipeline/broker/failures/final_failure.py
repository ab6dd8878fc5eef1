"""What becomes of messages that failed for good, and of what follows them: the group's on_failure.

``dead_letter``: the message goes to the dead letters, what follows it goes on. ``park``: it is
held, and with order all of its message group behind it, until somebody unparks them.
``dead_letter_group``: with order its message group is given up, what follows goes to the dead
letters too, until somebody pardons it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.giving_back import release, unsettled_behind
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.lease_table import DOOMED, FAR, HELD, PARKED, WAITING, Rows
from rmq_pipeline.failure import Failure
from rmq_pipeline.group import OnFailure
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

_NONE: Final = np.zeros(0, dtype=np.int64)
#: What the failures that followers are given take of a frame, in which each has its own copy: so
#: little that those of all queues of a topic fit into one. Of a follower so much at least.
_COPIES_BYTES: Final = 512 * 1024
_COPY_BYTES: Final = 256


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
    """Events of messages that failed for good, and of those behind them.

    Args:
        failed: rows, of which none lies behind another unless both go to the dead letters.
        said: JSON of each failure; None: their leases ended, and nobody said anything.
        settled: offsets that are settled in the same step.
        keep_behind: who says so goes on with what lies behind, as its receipts are still good;
            where all of the message group is given up it cannot.
    """
    leases = consumption.leases
    offsets, groups = leases.offset[failed], leases.group[failed]
    behind = _NONE.astype(np.intp)
    if consumption.ordered:
        behind, _ = unsettled_behind(leases, failed, settled=settled)
    kind = Kind.EXPIRE if said is None else Kind.RETRY
    state: dict[str, Any] = {"visible_at_ms": now_ms, "delivery": DOOMED, "detail": said}
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
    elif policy == "dead_letter_group" and consumption.ordered:
        why = _failures(consumption, offsets, said=said)
        return [event, *_condemn(consumption, failed, why=why, behind=behind, now_ms=now_ms)]
    else:
        behind = behind[leases.delivery[behind] > WAITING] if not keep_behind else behind[:0]
        follow = release(consumption, behind, visible_at_ms=now_ms)
    return [event, *follow] if len(behind) else [event]


def _failures(
    consumption: Consumption, offsets: Int64s, *, said: Sequence[str | None] | None
) -> list[str]:
    """JSON of the failure of each message: said now, or of an earlier delivery, or nothing said."""
    known = consumption.failures
    now = said or [None] * len(offsets)
    unsaid = Failure.unsaid().to_json()
    return [one or known.get(o, unsaid) for one, o in zip(now, offsets.tolist(), strict=True)]


def _condemn(
    consumption: Consumption, failed: Rows, *, why: list[str], behind: Rows, now_ms: int
) -> list[EventRows]:
    """Give up the message groups of failed messages, and what of them is unsettled.

    Where many follow, what they say of the failure is cut: the group's own record has all of it.
    """
    leases = consumption.leases
    groups = leases.group[failed]
    _, firsts = np.unique(groups, return_index=True)
    firsts = firsts[groups[firsts] != 0]
    if not len(firsts):
        return []
    events = [
        EventRows(
            kind=Kind.CONDEMN,
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
            doomed_with_group(
                leases.offset[behind],
                leases.group[behind],
                failures=of_group,
                attempt=leases.attempt[behind] - leased.astype(np.int32),
                now_ms=now_ms,
                copy_bytes=max(_COPY_BYTES, _COPIES_BYTES // len(behind)),
            )
        )
    return events


def doomed_with_group(
    offsets: Int64s,
    groups: Int64s,
    *,
    failures: Mapping[int, str],
    attempt: Any,
    now_ms: int,
    copy_bytes: int | None = None,
) -> EventRows:
    """Messages that go to the dead letters because their message group was given up.

    Args:
        failures: JSON of the failure for which each message group was.
        attempt: their deliveries that count.
        copy_bytes: how long the failure of each may be; None: as long as it is.
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
        delivery=DOOMED,
        message_group_hash=groups,
        detail=[distinct[group] for group in groups.tolist()],
    )


def _of_follower(failure: Failure, most_bytes: int | None) -> str:
    """JSON of a follower's failure, cut to so many bytes; it is known by its signature, as ever."""
    text = failure.of_follower().to_json()
    for name in ("reason", "error_type", "run_id"):
        while (
            most_bytes is not None and len(text) > most_bytes and (said := getattr(failure, name))
        ):
            # What a character takes, in JSON, depends on the language; on average it is this.
            left = 1 - (len(text) - most_bytes) / len(json.dumps(said))
            said = said[: max(0, min(int(len(said) * left), len(said) - 1))]
            failure = replace(failure, **{name: said})
            text = failure.of_follower().to_json()
    return text
