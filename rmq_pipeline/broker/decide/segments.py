"""Requests that register, replace and expire segments and event files.

Expiry moves the cursors and backlogs of groups to the first offset that is left.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide.request import Decision, Fence, Request
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import RequestError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID


@dataclass(frozen=True, slots=True)
class ReplaceSegments(Request):
    """Request that registers one segment in place of others."""

    removed: tuple[Segment, ...]
    added: Segment
    bytes: int
    window: Fence | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event, unless the topic was deleted."""
        state.fence(self.window)
        added = self.added
        if added.topic_id not in state.topics:
            raise RequestError(f"Topic {added.topic} was deleted.")
        detail = {
            "path": f"topics/{added.relative}",
            "base": added.base,
            "end": added.end,
            "rows": added.rows,
            "bytes": self.bytes,
            "removed": [f"topics/{each.relative}" for each in self.removed],
        }
        event = single(
            Kind.SEGMENTS_REPLACED,
            now_ms,
            offset=added.base,
            topic_id=added.topic_id,
            queue_id=added.queue_id,
            detail=json.dumps(detail),
        )
        return Decision(events=[event])


@dataclass(frozen=True, slots=True)
class RegisterHistory(Request):
    """Request that registers or unregisters files of the history."""

    details: dict[Kind, dict[str, Any]]
    window: Fence | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event for each entry."""
        state.fence(self.window)
        return Decision(
            events=[
                single(kind, now_ms, detail=json.dumps(detail))
                for kind, detail in self.details.items()
            ]
        )


@dataclass(frozen=True, slots=True)
class Sealed:
    """Files of a turn before registration; they hold the log from ``start`` to ``end``."""

    segments: tuple[Segment, ...]
    events: Path
    event_rows: int
    start: int
    end: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class RegisterSealed(Request):
    """Request that registers the files of a turn."""

    done: Sealed
    sizes: tuple[int, ...]
    window: Fence | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event for each segment of an existing topic; the answer is these segments."""
        state.fence(self.window)
        done = self.done
        kept: list[Segment] = []
        decision = Decision(kept)
        for segment, size in zip(done.segments, self.sizes, strict=True):
            if segment.topic_id in state.topics:
                kept.append(segment)
                detail = {
                    "path": f"topics/{segment.relative}",
                    "base": segment.base,
                    "end": segment.end,
                    "rows": segment.rows,
                    "bytes": size,
                }
                decision.events.append(
                    single(
                        Kind.SEGMENT,
                        now_ms,
                        offset=segment.base,
                        topic_id=segment.topic_id,
                        queue_id=segment.queue_id,
                        detail=json.dumps(detail),
                    )
                )
        events = {
            "path": f"{done.events.parent.name}/{done.events.name}",
            "from_position": done.start,
            "to_position": done.end,
            "rows": done.event_rows,
        }
        decision.events.append(single(Kind.EVENT_SEGMENT, now_ms, detail=json.dumps(events)))
        return decision


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
