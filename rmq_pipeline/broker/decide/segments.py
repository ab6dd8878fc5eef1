"""Requests that register segments and event files, and replace segments by a merged one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide.request import Decision, Fence, Request
from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import RequestError
from rmq_pipeline.store.events import Kind


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
