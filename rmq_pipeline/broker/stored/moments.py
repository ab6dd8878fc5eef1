"""Offset ranges by time, from the times of segments."""

import bisect

from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.stored.sealed import segments_of


def span_of(
    engine: Engine, topic_id: int, *, queue_id: int, at_ms: int, bounds: tuple[int, int]
) -> tuple[int, int]:
    """Return the range [start, stop) with the first message stored at or after ``at_ms``.

    A queue's messages are in order of time. So the first such message is in the first segment whose
    newest message is not older, or behind all segments. The range lies within ``bounds``.
    """
    low, high = bounds
    counted = segments_of(engine).of_queue(topic_id, queue_id)
    newest = [_newest_ms(engine, each) for each in counted]
    at = bisect.bisect_left(newest, at_ms)
    if at < len(counted):
        return max(low, counted[at].base), min(high, counted[at].end)
    return (max(low, counted[-1].end) if counted else low), high


def _newest_ms(engine: Engine, segment: Segment) -> int:
    """Return when the last message of a segment was stored; each manifest is read once."""
    known = engine.segments.newest_ms
    if segment not in known:
        root = engine.segments.root
        listed = {each["name"]: each for each in manifest.read(root, segment.folder).files}
        for each in engine.segments.of_topic(segment.topic_id):
            entry = listed.get(each.name)
            if entry is not None:
                known[each] = entry["max_stored_at_ms"]
    if segment not in known:
        known[segment] = manifest.entry_of(engine.segments.root, segment)["max_stored_at_ms"]
    return known[segment]
