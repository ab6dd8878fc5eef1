"""Reading: messages by offset, offsets by time, keyed state, status."""

import bisect
import os
import time
from importlib import metadata
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import matching
from rmq_pipeline.broker.work.reading import fetch, held, places_of, segments_of
from rmq_pipeline.errors import (
    IllegalOffsetError,
    IllegalQueueError,
    RequestError,
    TableSchemaError,
)
from rmq_pipeline.filter.expression import Filter, SqlFilter, compile_filter
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.store.consume_queue import Search
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of, sound


def read(
    engine: Engine,
    topic: str,
    *,
    queue_id: int,
    offset: int,
    limit: int,
    filter: str,
    filter_type: str,
) -> pa.Table:
    """Return the messages of [offset, offset + limit) that match a filter, as schema.READ.

    Raises:
        FilterExpressionError: the filter does not parse.
        IllegalQueueError: the queue does not exist.
        IllegalOffsetError: the queue does not have the offset.
    """
    wanted = compile_filter(filter, filter_type)
    described, bounds = engine.submit(Offsets(topic))
    if not 0 <= queue_id < len(bounds):
        raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
    low, high = bounds[queue_id]
    if not low <= offset <= high:
        raise IllegalOffsetError(f"Queue {queue_id} has offsets {low} to {high}, not {offset}.")
    if limit < 0:
        raise RequestError("limit is negative.")
    stop = min(high, offset + limit)
    offsets = np.arange(offset, stop, dtype=np.int64)
    try:
        found = _read(
            engine, wanted, topic_id=described.topic_id, queue_id=queue_id, offset=offsets
        )
    except LookupError:
        _, bounds = engine.submit(Offsets(topic))
        if offset >= bounds[queue_id][0]:
            raise
        # It has expired meanwhile.
        low, high = bounds[queue_id]
        text = f"Queue {queue_id} has offsets {low} to {high}, not {offset}."
        raise IllegalOffsetError(text) from None
    return found.cast(schema.READ)


def _read(
    engine: Engine, wanted: Filter, *, topic_id: int, queue_id: int, offset: Int64s
) -> pa.Table:
    n = len(offset)
    if not n:
        return schema.READ.empty_table()
    queue_ids = np.full(n, queue_id, dtype=np.int32)
    places = places_of(engine, topic_id=topic_id, queue_id=queue_ids, offset=offset)
    # A condition without properties may still reject messages.
    if wanted.columns or isinstance(wanted, SqlFilter):
        # Only matching messages are read completely.
        chosen = matching(
            engine, wanted, places=places, topic_id=topic_id, queue_id=queue_ids, offset=offset
        )
        if not chosen.any():
            return schema.READ.empty_table()
        places = Places(places.position[chosen], places.row[chosen])
        queue_ids, offset = queue_ids[chosen], offset[chosen]
    return fetch(
        engine,
        places,
        columns=schema.READ.names,
        topic_id=topic_id,
        queue_id=queue_ids,
        offset=offset,
    )


def offset_at(engine: Engine, topic: str, *, queue_id: int, at_ms: int) -> int:
    """Return the first offset stored at or after a time, or else the end of the queue."""
    bounds: list[tuple[int, int]]
    described, bounds = engine.submit(Offsets(topic))
    if not 0 <= queue_id < len(bounds):
        raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
    low, high = bounds[queue_id]
    topic_id = described.topic_id
    start, stop = span_of(engine, topic_id, queue_id=queue_id, at_ms=at_ms, bounds=(low, high))
    search = Search(
        topic_id=topic_id, queue_id=queue_id, start=start, stop=stop, limit=1, from_ms=at_ms
    )
    ends = held(
        engine,
        topic_id=topic_id,
        queue_id=np.array([queue_id], dtype=np.int32),
        offset=np.array([stop - 1], dtype=np.int64),
    )
    engine.dispatched(int(ends.position[0]))
    found = engine.database.find(search)
    return int(found[0]) if len(found) else high


def asked_groups(given: pa.Table) -> pa.Array:
    """Return the message groups in a table that a verb was asked about.

    Raises:
        TableSchemaError: it is no table, is damaged, or has no column message_group.
    """
    if "message_group" not in sound(given, "message_groups").column_names:
        raise TableSchemaError("message_groups is a table with the column message_group.")
    return columns_of(given.select(["message_group"]), schema.MESSAGE_GROUP)["message_group"]


def keyed_state(
    engine: Engine, group: str, *, topic: str, message_groups: pa.Table | None
) -> pa.Table | None:
    """Return a consumer's keyed state: message_group and its own columns; None if never written."""
    state = engine.state
    group_id = state.group(group).group_id
    topic_id = state.topic(topic).topic.topic_id
    hashes = None
    if message_groups is not None:
        hashes = np.unique(hash64(asked_groups(message_groups).drop_null()))
    engine.dispatched(engine.state.changed(Kind.SETTLED, group_id, topic_id))
    return engine.database.keyed_state(group_id, topic_id, hashes=hashes)


def status(engine: Engine, started_at: float, *, mode: str, fallback: Any) -> dict[str, Any]:
    """Return the status of the broker for operators; sizes in bytes."""
    process = psutil.Process()
    log = engine.log
    return {
        "version": metadata.version("rmq_pipeline"),
        "home": str(engine.home.path),
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - started_at, 1),
        "upkeep": mode,
        "flush": engine.flush,
        "clock_ahead_ms": engine.clock.ahead_ms(),
        "log_first": log.first,
        "log_end": log.end,
        "log_synced": log.synced,
        "dispatched": engine.database.dispatched,
        "dispatch_behind_bytes": engine.dispatcher.behind_bytes,
        "memory_bytes": process.memory_info().rss,
        "topics": len(engine.state.topics),
        "groups": len(engine.state.groups),
        "scheduled": len(engine.state.schedule),
        "damaged_segments": sorted(each.relative for each in engine.segments.damaged),
        "last_fallback": fallback,
        "settings": engine.settings.model_dump(mode="json"),
        **{name: report() for name, report in list(engine.reports.items())},
    }


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
