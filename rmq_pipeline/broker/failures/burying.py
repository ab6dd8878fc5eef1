"""Bringing doomed messages to the dead letters: find, read, copy and settle."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.dead_letters import Bury, Doomed, FindDoomed, copy_columns
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.sending.publish import checked
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.parts import parts
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.errors import CorruptLogError, StorageError

log = logging.getLogger(__name__)

_COLUMNS = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
#: Messages that one frame buries, limits.STEP_BYTES of them at most; also how many a caller does
#: that was to do something else.
AT_ONCE = 10_000
#: What reading raises where the store is damaged, or lacks something.
_UNREADABLE = (CorruptLogError, StorageError, LookupError)


def bury(engine: Engine, keys: Sequence[QueueKey] | None, *, limit: int | None = None) -> int:
    """Copy what is doomed in these queues (None: in all) to its dead letters; how many.

    Args:
        limit: after so many it ends; None: when nothing is doomed there any more.

    Raises:
        OperatorError: some cannot be read; they stay doomed, and the others found are buried.
        LookupError: the same.
    """
    buried = 0
    chosen = tuple(keys) if keys is not None else None
    while True:
        found: list[Doomed] = engine.submit(FindDoomed(chosen, AT_ONCE))
        if not found:
            return buried
        unreadable: Exception | None = None
        for doomed in found:
            try:
                buried += _bury_queue(engine, doomed)
            except _UNREADABLE as error:
                unreadable = error
        if unreadable is not None:
            raise unreadable
        if limit is not None and buried >= limit:
            return buried


def finish_burying(engine: Engine) -> None:
    """Bury what a broker left doomed that was cut off after the step that doomed it.

    Before anybody receives: with order the message groups of these messages stand still until then.
    Where it cannot be done the home opens all the same, and revive tries again.
    """
    try:
        buried = bury(engine, None)
    except Exception:
        log.exception("What was left doomed is not buried yet; revive tries again.")
        return
    if buried:
        log.info("buried %d messages that were left doomed", buried)


def _bury_queue(engine: Engine, doomed: Doomed) -> int:
    queue_id = np.full(len(doomed), doomed.key.queue_id, dtype=np.int32)
    places = locate(
        engine,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
        places=Places(doomed.position, doomed.row),
    )
    doomed = replace(doomed, position=places.position, row=places.row)
    slices = parts(
        engine,
        places,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
    )
    try:
        return sum(_bury_part(engine, doomed.take(rows)) for rows in slices)
    except _UNREADABLE:
        if len(doomed) == 1:
            raise
        return _bury_each(engine, doomed)


def _bury_each(engine: Engine, doomed: Doomed) -> int:
    """One frame for each of them, but for those that cannot be read."""
    buried = 0
    unreadable: Exception | None = None
    for row in range(len(doomed)):
        try:
            buried += _bury_part(engine, doomed.take(slice(row, row + 1)))
        except _UNREADABLE as error:
            unreadable = error
    if unreadable is not None:
        raise unreadable
    return buried


def _bury_part(engine: Engine, doomed: Doomed) -> int:
    """One frame of them; how many were doomed still."""
    state = engine.state
    group = state.groups.get(doomed.key.group_id)
    topic = state.topics.get(doomed.key.topic_id)
    if group is None or topic is None:
        return 0
    messages: pa.Table = fetch(
        engine,
        Places(doomed.position, doomed.row),
        columns=_COLUMNS,
        topic_id=doomed.key.topic_id,
        queue_id=np.full(len(doomed), doomed.key.queue_id, dtype=np.int32),
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
