"""The group's on_failure: the fate of messages that failed permanently, and of later messages.

``dead_letter``: the message goes to the dead letters, and the later messages are delivered.
``park``: the message is held until an operator unparks it. With order, all later messages of its
message group are held too.
``dead_letter_group``: with order, the message group is quarantined. Its later messages go to the
dead letters too, until an operator lifts the quarantine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rmq_pipeline.broker.decide.release import release
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import EXHAUSTED, FAR, HELD, PARKED, WAITING, Rows
from rmq_pipeline.failure import Failure
from rmq_pipeline.group import OnFailure
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

_NONE: Final = np.zeros(0, dtype=np.int64)
#: Share of a frame for the failures of the later messages, each of which has its own copy. The
#: share is small so that the failures of all queues of a topic fit into one frame. _COPY_BYTES is
#: the least for one message.
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
