"""Deliveries that a member's listener may have had when the member died: the attempt counts.

If a death counted nothing, a message that kills its consumer would be redelivered forever. The
broker knows the leases of the member, but not the messages that the listener had. It counts the
first of each queue, or of each message group, up to the listener's concurrency. A counted message
is a suspect. The next member tries suspects one at a time and names the one it tries. Then a death
counts for the named suspect only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rmq_pipeline import limits
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import WAITING
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

#: Place of a message: topic, queue_id, queue_offset.
Place = tuple[str, int, int]
#: Failure shown in the dead letter.
_FAILURE: Final = Failure.of(
    "the consumer died while it may have been handling the message", error_type="ConsumerDied"
).to_json()


@dataclass(frozen=True, slots=True)
class Begun:
    """State of its work that a member reports in a heartbeat."""

    #: Most messages of a queue that the listener has at a time.
    calls: int
    #: True if it handles a queue by offset, regardless of message groups.
    by_queue: bool
    #: Messages counted at an earlier death: they count again only if they are in ``trying``.
    suspects: frozenset[Place]
    #: Suspects that the listener has now.
    trying: frozenset[Place]

    @classmethod
    def of(cls, details: Mapping[str, Any], suspects: frozenset[Place]) -> "Begun | None":
        """Parse a member's details; return None if they do not describe its work.

        Entries of ``trying`` that name no message are skipped.
        """
        calls, trying = details.get("calls"), details.get("trying")
        if type(calls) is not int or calls < 1 or not isinstance(trying, list):
            return None
        places = (_place(each) for each in trying[: limits.GROUP_SUSPECTS])
        named = frozenset(place for place in places if place is not None)
        return cls(calls, details.get("order") == "queue", suspects, named)


def _place(said: object) -> Place | None:
    if not isinstance(said, list | tuple) or len(said) != 3:
        return None
    topic, queue_id, offset = said
    if type(topic) is not str or type(queue_id) is not int or type(offset) is not int:
        return None
    return topic, queue_id, offset


def begun_offsets(
    consumption: Consumption,
    begun: Begun,
    *,
    queue: tuple[str, int],
    now_ms: int,
) -> Int64s:
    """Return the offsets of a queue that the listener may have had."""
    leases = consumption.leases
    running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
    rows = np.flatnonzero(running)
    if not begun.by_queue:
        rows = consumption.handled_first(rows)
    places = [(*queue, offset) for offset in leases.offset[rows[: begun.calls]].tolist()]
    counted = [p[2] for p in places if p not in begun.suspects or p in begun.trying]
    return np.array(counted, dtype=np.int64)


def died_with(consumption: Consumption, offsets: Int64s, *, now_ms: int) -> EventRows:
    """Build the event that fails these deliveries and redelivers them at once."""
    leases = consumption.leases
    rows = leases.find(offsets)
    return EventRows(
        kind=Kind.EXPIRE,
        at_ms=now_ms,
        queue_offset=offsets,
        attempt=leases.attempt[rows],
        visible_at_ms=now_ms,
        delivery=WAITING,
        message_group_hash=leases.group[rows],
        detail=[_FAILURE] * len(rows),
    )
