"""Bringing doomed messages to the dead letters: find, read, copy and settle."""

import logging
from collections.abc import Iterator, Sequence
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
from rmq_pipeline.errors import CorruptLogError, OperatorError, RocketMQError, StorageError

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
        OperatorError: some cannot be read, or copied; they stay doomed, and all others that were
            found are buried.
        LookupError: the same.
    """
    buried = 0
    chosen = tuple(keys) if keys is not None else None
    kept: dict[QueueKey, Exception] = {}
    while limit is None or buried < limit:
        found: list[Doomed] = engine.submit(FindDoomed(chosen, AT_ONCE))
        if not found:
            break
        for doomed in found:
            some, error = _bury_queue(engine, doomed)
            buried += some
            if error is not None:
                kept[doomed.key] = error
        if kept:
            # What stays doomed would be found again, and many of it in the place of others.
            among = map(QueueKey._make, tuple(engine.state.consumptions))
            chosen = tuple(key for key in (keys if keys is not None else among) if key not in kept)
    for error in kept.values():
        if isinstance(error, (RocketMQError, LookupError)):
            raise error
        raise OperatorError(f"A message cannot be buried: {error}") from error
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


def _bury_queue(engine: Engine, doomed: Doomed) -> tuple[int, Exception | None]:
    """Bury a queue's; how many there were, and what keeps the others from it.

    Raises:
        RocketMQError: nothing can be stored now, of whatever queue.
    """
    buried = done = 0
    try:
        for located, rows in _parts_of(engine, doomed):
            buried += _bury_part(engine, located.take(rows))
            done = rows.stop
    except Exception as error:
        if _is_for_all(error):
            raise
        log.warning("Doomed messages of %s are buried one by one: %r", doomed.key, error)
        some, kept = _bury_each(engine, doomed.take(slice(done, len(doomed))))
        return buried + some, kept
    return buried, None


def _bury_each(engine: Engine, doomed: Doomed) -> tuple[int, Exception | None]:
    """One frame for each of them, but for those that cannot be read or copied."""
    buried = 0
    kept: dict[int, Exception] = {}
    for row, offset in enumerate(doomed.queue_offset.tolist()):
        try:
            for located, rows in _parts_of(engine, doomed.take(slice(row, row + 1))):
                buried += _bury_part(engine, located.take(rows))
        except Exception as error:
            if _is_for_all(error):
                raise
            kept[offset] = error
    if not kept:
        return buried, None
    first = next(iter(kept))
    log.error(
        "%d messages of %s cannot be buried and stay doomed, the first at offset %d",
        len(kept),
        doomed.key,
        first,
        exc_info=kept[first],
    )
    return buried, kept[first]


def _is_for_all(error: Exception) -> bool:
    """Whether it says nothing of a message: the store is full, busy, or somebody else's."""
    return isinstance(error, RocketMQError) and not isinstance(error, _UNREADABLE)


def _parts_of(engine: Engine, doomed: Doomed) -> Iterator[tuple[Doomed, slice]]:
    """Where they lie now, and the rows of each frame."""
    queue_id = np.full(len(doomed), doomed.key.queue_id, dtype=np.int32)
    places = locate(
        engine,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
        places=Places(doomed.position, doomed.row),
    )
    located = replace(doomed, position=places.position, row=places.row)
    for rows in parts(
        engine,
        places,
        topic_id=doomed.key.topic_id,
        queue_id=queue_id,
        offset=doomed.queue_offset,
    ):
        yield located, rows


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
