"""Requests of expiry: end segments, and move the cursors and backlogs of groups with them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide.request import Decision, Fence, Request
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID


@dataclass(frozen=True, slots=True)
class ExpireSegments(Request):
    """Request that raises min_offset to the ends of segments, up to the first pending message."""

    topic_id: int
    #: Segments and their bytes, in order within a queue.
    old: tuple[tuple[Segment, int], ...]
    window: Fence | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store the new min_offsets; the answer is the min_offset of each queue in ``old``."""
        state.fence(self.window)
        topic = state.topics.get(self.topic_id)
        decision = Decision({})
        if topic is None:
            return decision
        for queue_id in sorted({each.queue_id for each, _ in self.old}):
            of_queue = [(each, size) for each, size in self.old if each.queue_id == queue_id]
            kept_from = topic.queues[queue_id].min_offset
            held_from = first_open(state, self.topic_id, queue_id=queue_id)
            going = [fact for fact in of_queue if held_from is None or fact[0].end <= held_from]
            if going:
                kept_from = going[-1][0].end
                decision.events.append(self._event(queue_id, going, now_ms=now_ms))
                decision.events.extend(
                    _moved_up(state, self.topic_id, queue_id=queue_id, to=kept_from, now_ms=now_ms)
                )
            decision.answer[queue_id] = kept_from
        return decision

    def _event(
        self, queue_id: int, going: Sequence[tuple[Segment, int]], *, now_ms: int
    ) -> EventRows:
        detail = {
            "segments": len(going),
            "rows": sum(each.rows for each, _ in going),
            "bytes": sum(size for _, size in going),
        }
        return single(
            Kind.EXPIRED,
            now_ms,
            offset=going[-1][0].end,
            topic_id=self.topic_id,
            queue_id=queue_id,
            detail=json.dumps(detail),
        )


def first_open(state: State, topic_id: int, *, queue_id: int) -> int | None:
    """Return the offset of the first pending message of a queue; None: there is none."""
    if topic_id == SCHEDULE_TOPIC_ID:
        return state.schedule.first_offset(queue_id)
    if topic_id == HALF_TOPIC_ID:
        return state.halves.first_offset()
    firsts = [
        consumption.leases.first_offset()
        for key, consumption in state.consumptions.items()
        if key[1:] == (topic_id, queue_id)
    ]
    return min((each for each in firsts if each is not None), default=None)


def _moved_up(
    state: State, topic_id: int, *, queue_id: int, to: int, now_ms: int
) -> list[EventRows]:
    """Build events that move the groups' cursors and backlogs up to offset ``to``."""
    found = []
    for (group_id, *place), consumption in state.consumptions.items():
        if place != [topic_id, queue_id] or not consumption.touched:
            continue
        where = {"group_id": group_id, "topic_id": topic_id, "queue_id": queue_id}
        if consumption.cursor < to:
            found.append(single(Kind.CURSOR, now_ms, offset=to, **where))
        found.extend(_backlogs(consumption, to, now_ms=now_ms, where=where))
    return found


def _backlogs(
    consumption: Consumption, to: int, *, now_ms: int, where: dict[str, int]
) -> list[EventRows]:
    behind: list[tuple[int, int]] = []
    caught_up: list[tuple[int, int]] = []
    for group, entry in consumption.backlog.items():
        first = entry.known[0] if entry.known else entry.more_from
        if first is None or first >= to:
            continue
        left = [offset for offset in entry.known if offset >= to]
        if left:
            behind.append((group, left[0]))
        elif entry.more_from is not None:
            behind.append((group, max(to, entry.more_from)))
        else:
            caught_up.append((group, -1))
    return [
        EventRows(
            kind=kind,
            at_ms=now_ms,
            message_group_hash=np.array([group for group, _ in some], dtype=np.int64),
            queue_offset=np.array([offset for _, offset in some], dtype=np.int64),
            **where,  # type: ignore[arg-type]
        )
        for kind, some in ((Kind.BEHIND, behind), (Kind.CAUGHT_UP, caught_up))
        if some
    ]
