"""Evaluating filters on messages, outside the writer."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Final

import numpy as np

from rmq_pipeline import schema
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.filter_cache import (
    CachedSqlFilter,
    Mask,
    ReceiveFilter,
    TagHashFilter,
)
from rmq_pipeline.broker.state.queue_index import IndexRows, Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch, places_of, tags_of
from rmq_pipeline.filter.expression import Filter, SqlFilter, compile_filter
from rmq_pipeline.message import Int32s, Int64s

#: Messages read at once to evaluate a filter.
JUDGED_ROWS: Final = 131_072


def row_filter(
    engine: Engine, filter: str, *, filter_type: str, limit: int
) -> ReceiveFilter | None:
    """Compile a receive's filter; return None if it accepts all messages.

    Raises:
        FilterExpressionError: the expression does not parse.
    """
    compiled = compile_filter(filter, filter_type)
    if isinstance(compiled, SqlFilter):
        return CachedSqlFilter(compiled, engine.filter_results, ahead=limit)
    return None if compiled.hashes is None else TagHashFilter(compiled.hashes)


def judge(
    engine: Engine,
    row_filter: CachedSqlFilter,
    *,
    topic_id: int,
    unjudged: Sequence[tuple[int, list[IndexRows]]],
    turn: int,
) -> None:
    """Read rows that a receive has reached, and store the filter results.

    Reads at most about JUDGED_ROWS; the receive then asks for the rest again.

    Args:
        unjudged: rows by queue_id.
        turn: any number; selects the queue that comes first, so that no queue is always last.
    """
    rows = _some_of_each(unjudged, turn)
    queue_ids = np.concatenate([np.full(len(page), q, dtype=np.int32) for q, page in rows])
    offset = [np.arange(page.base, page.base + len(page), dtype=np.int64) for _, page in rows]
    places = Places(
        np.concatenate([page.position for _, page in rows]),
        np.concatenate([page.row for _, page in rows]),
    )
    wanted = matching(
        engine,
        row_filter.sql,
        places=places,
        topic_id=topic_id,
        queue_id=queue_ids,
        offset=np.concatenate(offset),
    )
    row_filter.learn(topic_id, rows, wanted=wanted)


def _some_of_each(
    unjudged: Sequence[tuple[int, list[IndexRows]]], turn: int
) -> list[tuple[int, IndexRows]]:
    """Take a page of each queue in turn until there are JUDGED_ROWS rows."""
    first = turn % len(unjudged)
    pages = [[(q, page) for page in some] for q, some in (*unjudged[first:], *unjudged[:first])]
    found = []
    left = JUDGED_ROWS
    for place in chain.from_iterable(zip_longest(*pages)):
        if place is not None and left > 0:
            found.append(place)
            left -= len(place[1])
    return found


def matching(
    engine: Engine,
    filter: Filter,
    *,
    places: Places,
    topic_id: int,
    queue_id: Int32s,
    offset: Int64s,
) -> Mask:
    """Mark the messages at these places that match a filter."""
    messages = fetch(
        engine,
        places,
        columns=filter.columns or schema.READ.names[:1],
        topic_id=topic_id,
        queue_id=queue_id,
        offset=offset,
    )
    wanted: Mask = filter.matches(messages).to_numpy(zero_copy_only=False)
    return wanted


def wanted_of(engine: Engine, row_filter: ReceiveFilter, *, key: QueueKey, offset: Int64s) -> Mask:
    """Mark the messages of a queue that match a filter, wherever they are stored."""
    if isinstance(row_filter, TagHashFilter):
        return np.isin(tags_of(engine, key, offset=offset), row_filter.hashes)
    parts = [
        _judged_at(engine, row_filter, key=key, offset=offset[start : start + JUDGED_ROWS])
        for start in range(0, len(offset), JUDGED_ROWS)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)


def _judged_at(
    engine: Engine, row_filter: CachedSqlFilter, *, key: QueueKey, offset: Int64s
) -> Mask:
    n = len(offset)
    queue_id = np.full(n, key.queue_id, dtype=np.int32)
    found = places_of(engine, topic_id=key.topic_id, queue_id=queue_id, offset=offset)
    return matching(
        engine,
        row_filter.sql,
        places=found,
        topic_id=key.topic_id,
        queue_id=queue_id,
        offset=offset,
    )
