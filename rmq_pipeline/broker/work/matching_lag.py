"""Lag of consumer groups, and the part of it that matches their filters.

Tags are counted in DuckDB. A SQL92 filter needs properties, which are in the log and in segments.
So it is evaluated on all of a few messages, or on a sample of many. RocketMQ does the same, with
20,000 rows of a consume queue or a sample of 5,000.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.filter_cache import ReceiveFilter, TagHashFilter
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import row_filter, wanted_of
from rmq_pipeline.errors import ConsumerGroupNotFoundError, StorageError, TopicNotFoundError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.consume_queue import Lags, TagCount

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
