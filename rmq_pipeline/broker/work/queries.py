"""Queries: messages by offset, offsets by time, lag, keyed state, status.

Lag has the part that matches a group's filters. Tags are counted in DuckDB. A SQL92 filter needs
properties, which are in the log and in segments. So it is evaluated on all of a few messages, or on
a sample of many. RocketMQ does the same, with 20,000 rows of a consume queue or a sample of 5,000.
"""

import bisect
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.filter_cache import ReceiveFilter, TagHashFilter
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import matching, row_filter, wanted_of
from rmq_pipeline.broker.work.reading import fetch, held, places_of, segments_of
from rmq_pipeline.errors import (
    ConsumerGroupNotFoundError,
    IllegalOffsetError,
    IllegalQueueError,
    RequestError,
    StorageError,
    TableSchemaError,
    TopicNotFoundError,
)
from rmq_pipeline.filter.expression import Filter, SqlFilter, compile_filter
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.store.consume_queue import Lags, Search, TagCount
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of, sound

LAG: Final = pa.schema(
    [
        ("consumer_group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("lag", pa.int64()),
        ("matching_lag", pa.int64()),
        ("estimated", pa.bool_()),
        ("filters", pa.list_(pa.string())),
        ("in_flight", pa.int64()),
        ("retrying", pa.int64()),
        ("parked", pa.int64()),
        ("committed_offset", pa.int64()),
        ("max_offset", pa.int64()),
        ("oldest_unread_at_ms", pa.int64()),
    ]
)
#: Places of a sample in a queue; each costs a read.
_PLACES: Final = 16
Row = dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class _Matching:
    """Number of unread messages of a queue that match; None: unknown."""

    count: int | None
    estimated: bool = False
    #: True if there is no filter: all messages match.
    everything: bool = False


def lag(engine: Engine, group: str | None) -> pa.Table:
    """Return the rows of ``Broker.lag``.

    Raises:
        ConsumerGroupNotFoundError: the group does not exist.
    """
    if group is not None:
        engine.state.group(group)
    engine.dispatched()  # it counts messages of all topics that the groups read
    rows: list[Row] = engine.database.find(Lags(group)).to_pylist()
    reads: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        reads.setdefault((row["consumer_group"], row["topic"]), []).append(row)
    for (name, topic), queues in reads.items():
        _complete(engine, queues, filters=engine.filters.last(name, topic))
    return pa.Table.from_pylist(rows, schema=LAG)


def _complete(engine: Engine, queues: Sequence[Row], *, filters: set[tuple[str, str]]) -> None:
    """Add matching_lag, estimated and filters to the rows of a group and topic."""
    matching = _of_queues(engine, queues, filters=filters)
    texts = sorted(text for _, text in filters)
    for row in queues:
        found = matching[row["queue_id"]]
        unread = row["max_offset"] - row["unread_from"]
        row["filters"] = texts
        row["matching_lag"] = None if found.count is None else row["lag"] - unread + found.count
        # A message that waits behind another of its group may be before the cursor, unfiltered.
        behind = row["lag"] - unread - row["in_flight"] - row["retrying"] - row["parked"]
        unasked = found.count is not None and not found.everything and behind > 0
        row["estimated"] = found.estimated or unasked


def _of_queues(
    engine: Engine, queues: Sequence[Row], *, filters: set[tuple[str, str]]
) -> dict[int, _Matching]:
    stretches = {row["queue_id"]: (row["unread_from"], row["max_offset"]) for row in queues}
    unknown = dict.fromkeys(stretches, _Matching(None))
    if not filters:
        return unknown
    compiled = [
        row_filter(engine, text, filter_type=kind, limit=1) for kind, text in sorted(filters)
    ]
    wanted = [one for one in compiled if one is not None]
    if len(wanted) < len(compiled):
        return {
            q: _Matching(stop - start, everything=True) for q, (start, stop) in stretches.items()
        }
    try:
        group_id = engine.state.group(queues[0]["consumer_group"]).group_id
        topic_id = engine.state.topic(queues[0]["topic"]).topic.topic_id
    except (ConsumerGroupNotFoundError, TopicNotFoundError):  # deleted a moment ago
        return unknown
    rows = sum(stop - start for start, stop in stretches.values())
    tags = [one.hashes for one in wanted if isinstance(one, TagHashFilter)]
    if len(tags) == len(wanted) and rows <= limits.LAG_COUNTED_ROWS:
        hashes = np.unique(np.concatenate(tags))
        counts = engine.database.find(TagCount(topic_id, hashes, stretches))
        return {queue_id: _Matching(counts.get(queue_id, 0)) for queue_id in stretches}
    keys = {queue_id: QueueKey(group_id, topic_id, queue_id) for queue_id in stretches}
    return dict(_sampled(engine, wanted, keys=keys, stretches=stretches))


def _sampled(
    engine: Engine,
    filters: Sequence[ReceiveFilter],
    *,
    keys: Mapping[int, QueueKey],
    stretches: Mapping[int, tuple[int, int]],
) -> Iterator[tuple[int, _Matching]]:
    """Evaluate the filters on a sample of each queue, or on all messages if they are few."""
    rows = max(1, sum(stop - start for start, stop in stretches.values()))
    share = min(1.0, limits.LAG_JUDGED_ROWS / rows)
    for queue_id, (start, stop) in stretches.items():
        asked = _spread(start, stop, most=max(1, int(share * (stop - start))))
        if not len(asked):
            yield queue_id, _Matching(0)
            continue
        try:
            wanted = np.zeros(len(asked), dtype=np.bool_)
            for each in filters:
                wanted |= wanted_of(engine, each, key=keys[queue_id], offset=asked)
        except (LookupError, StorageError):  # expired a moment ago, or damaged
            yield queue_id, _Matching(None)
            continue
        estimate = round(int(wanted.sum()) * (stop - start) / len(asked))
        yield queue_id, _Matching(estimate, estimated=len(asked) < stop - start)


def _spread(start: int, stop: int, *, most: int) -> Int64s:
    """Return all offsets of [start, stop), or runs of offsets at evenly spread places."""
    n = stop - start
    if n <= most:
        return np.arange(start, stop, dtype=np.int64)
    places = min(_PLACES, most)
    run = most // places
    begins = start + (np.arange(places) * 2 + 1) * n // (2 * places) - run // 2
    offsets: Int64s = (begins[:, None] + np.arange(run)).ravel().astype(np.int64)
    return offsets
