"""Bringing doomed messages to the dead letters: find, read, copy and settle."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.dead_letters import Bury, Doomed, FindDoomed, copy_columns
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.sending.publish import checked
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch

_COLUMNS = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
#: Messages that one frame buries; also how many a caller does that was to do something else.
AT_ONCE = 10_000


def bury(engine: Engine, keys: Sequence[QueueKey] | None, *, limit: int | None = None) -> int:
    """Copy what is doomed in these queues (None: in all) to its dead letters; how many.

    Args:
        limit: after so many it ends; None: when nothing is doomed there any more.
    """
    buried = 0
    chosen = tuple(keys) if keys is not None else None
    while True:
        found: list[Doomed] = engine.submit(FindDoomed(chosen, AT_ONCE))
        if not found:
            return buried
        for doomed in found:
            buried += _bury_queue(engine, doomed)
        if limit is not None and buried >= limit:
            return buried


def _bury_queue(engine: Engine, doomed: Doomed) -> int:
    state = engine.state
    group = state.groups.get(doomed.key.group_id)
    topic = state.topics.get(doomed.key.topic_id)
    if group is None or topic is None:
        return 0
    queue_id = np.full(len(doomed), doomed.key.queue_id, dtype=np.int32)
    places = locate(
        engine,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
        places=Places(doomed.position, doomed.row),
    )
    messages: pa.Table = fetch(
        engine,
        places,
        columns=_COLUMNS,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
    )
    columns = copy_columns(messages, doomed, topic=topic.topic.name)
    dead_letters = state.topics[group.dead_letter_topic_id].topic
    copies = checked(
        dead_letters,
        columns,
        ids=engine.ids,
        delay_max_ms=engine.settings.delay_max_ms,
        now_ms=engine.clock.now_ms(),
    )
    buried: int = engine.submit(Bury(doomed, copies))
    return buried
