"""Reading: messages by offset, offsets by time, progress, keyed state, SQL."""

import os
import time
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from rmq_pipeline import __version__, schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.filtering import matching
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.moments import span_of
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import IllegalOffsetError, RequestError
from rmq_pipeline.filter.expression import Filter, SqlFilter, compile_filter
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.store.consume_queue import Search


class Offsets(Request):
    """A question: the topic's id and the (min_offset, max_offset) of its queues."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored."""
        topic = state.topic(self._topic)
        bounds = [(queue.min_offset, queue.max_offset) for queue in topic.queues]
        return Decision((topic.topic, bounds))


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
    """What a filter wants of the messages [offset, offset + limit) of a queue, as schema.READ.

    Raises:
        FilterExpressionError: the filter does not parse.
        IllegalOffsetError: no such queue, or an offset that it does not keep.
    """
    wanted = compile_filter(filter, filter_type)
    described, bounds = engine.submit(Offsets(topic))
    if not 0 <= queue_id < len(bounds):
        raise IllegalOffsetError(f"Topic {topic} has no queue {queue_id}.")
    low, high = bounds[queue_id]
    if not low <= offset <= high:
        raise IllegalOffsetError(f"Queue {queue_id} keeps offsets {low} to {high}, not {offset}.")
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
        text = f"Queue {queue_id} keeps offsets {low} to {high}, not {offset}."
        raise IllegalOffsetError(text) from None
    return found.cast(schema.READ)


def _read(
    engine: Engine, wanted: Filter, *, topic_id: int, queue_id: int, offset: Int64s
) -> pa.Table:
    n = len(offset)
    if not n:
        return schema.READ.empty_table()
    # The read-ahead belongs to the writer; a read of any part of the log goes by the database.
    engine.dispatched()
    unknown = Places(np.full(n, -1, np.int64), np.zeros(n, np.int32))
    queue_ids = np.full(n, queue_id, dtype=np.int32)
    places = locate(engine, topic_id=topic_id, queue_id=queue_ids, offset=offset, places=unknown)
    # A condition may have no property, and yet not want everything.
    if wanted.columns or isinstance(wanted, SqlFilter):
        # What is not wanted is not read as a whole.
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
    """The first offset stored at or after a moment; the end of the queue when there is none."""
    bounds: list[tuple[int, int]]
    described, bounds = engine.submit(Offsets(topic))
    if not 0 <= queue_id < len(bounds):
        raise IllegalOffsetError(f"Topic {topic} has no queue {queue_id}.")
    low, high = bounds[queue_id]
    if at_ms < 0:
        return high
    topic_id = described.topic_id
    start, stop = span_of(engine, topic_id, queue_id=queue_id, at_ms=at_ms, bounds=(low, high))
    search = Search(
        topic_id=topic_id, queue_id=queue_id, start=start, stop=stop, limit=1, from_ms=at_ms
    )
    engine.dispatched()
    found = engine.database.find(search)
    return int(found[0]) if len(found) else high


def keyed_state(
    engine: Engine, group: str, *, topic: str, message_groups: pa.Table | None
) -> pa.Table | None:
    """The keyed state of a consumer: message_group and its own columns; None when never written."""
    state = engine.state
    group_id = state.group(group).group_id
    topic_id = state.topic(topic).topic.topic_id
    hashes = None
    if message_groups is not None:
        asked = message_groups.column("message_group").combine_chunks().cast(pa.string())
        if isinstance(asked, pa.ChunkedArray):
            asked = asked.chunk(0) if asked.num_chunks else pa.array([], pa.string())
        hashes = np.unique(hash64(asked))
    engine.dispatched()
    return engine.database.keyed_state(group_id, topic_id, hashes=hashes)


def status(engine: Engine, started_at: float, *, mode: str, fallback: Any) -> dict[str, Any]:
    """What an operator asks first; sizes in bytes."""
    process = psutil.Process()
    log = engine.log
    return {
        "version": __version__,
        "home": str(engine.home.path),
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - started_at, 1),
        "upkeep": mode,
        "flush": engine.flush,
        "log_first": log.first,
        "log_end": log.end,
        "log_synced": log.synced,
        "dispatched": engine.database.dispatched,
        "dispatch_behind_bytes": engine.dispatcher.behind_bytes,
        "memory_bytes": process.memory_info().rss,
        "topics": len(engine.state.topics),
        "groups": len(engine.state.groups),
        "scheduled": len(engine.state.schedule),
        "last_fallback": fallback,
        "settings": engine.settings.model_dump(mode="json"),
        **{name: report() for name, report in list(engine.reports.items())},
    }
