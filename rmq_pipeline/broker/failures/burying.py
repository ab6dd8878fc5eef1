"""Bringing doomed messages to the dead letters: find, read, copy and settle."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.dead_letters import Bury, Doomed, FindDoomed, copy_columns
from rmq_pipeline.broker.receiving.reading import has_another_log, whatever_log
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.sending.publish import checked
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.parts import cut, parts
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.errors import CorruptLogError, OperatorError, RocketMQError, StorageError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.commit_log import CommitLog

log = logging.getLogger(__name__)

_COLUMNS = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
#: Messages that one frame buries, limits.STEP_BYTES of them at most; also how many a caller does
#: that was to do something else.
AT_ONCE = 10_000
#: What reading raises where the store is damaged, or lacks something.
_UNREADABLE = (CorruptLogError, StorageError, LookupError)


@dataclass(slots=True)
class Buried:
    """How many there were; and by queue and offset what keeps others from it, of those tried."""

    n: int = 0
    kept: dict[QueueKey, dict[int, Exception]] = field(default_factory=dict)


def bury(
    engine: Engine,
    keys: Sequence[QueueKey] | None,
    *,
    limit: int | None = None,
    again: bool = False,
) -> Buried:
    """Copy what is doomed in these queues (None: in all) to its dead letters.

    What cannot be read, or copied, stays doomed and is noted (unburied.py): it keeps no other from
    its dead letters, and whoever buries from what he was to do.

    Args:
        limit: after so many it ends; None: when nothing is doomed there any more.
        again: try what could not be buried before, too.

    Raises:
        RocketMQError: nothing can be stored now, of whatever queue.
    """
    unburied, buried = engine.unburied, Buried()
    chosen = tuple(keys) if keys is not None else None
    but: dict[QueueKey, Int64s] = {} if again else unburied.offsets()
    while limit is None or buried.n < limit:
        found: list[Doomed] = engine.submit(FindDoomed(chosen, AT_ONCE, but))
        for doomed in found:
            kept = whatever_log(engine, partial(_bury_queue, engine, doomed, buried=buried))
            unburied.note(doomed.key, doomed.queue_offset, kept=kept)
            if kept:
                buried.kept.setdefault(doomed.key, {}).update(kept)
                # It would be found again, and much of it in the place of others.
                offsets = np.array([*kept], dtype=np.int64)
                but[doomed.key] = np.concatenate([but.get(doomed.key, offsets[:0]), offsets])
        if not found:
            if again and chosen is None:
                unburied.are_only(but)
            break
    return buried


def told(error: Exception) -> Exception:
    """What keeps a message from being buried, as a caller is told."""
    if isinstance(error, (RocketMQError, LookupError)):
        return error
    said = OperatorError(f"A message cannot be buried: {error}")
    said.__cause__ = error
    return said


def finish_burying(engine: Engine) -> None:
    """Bury what a broker left doomed that was cut off after the step that doomed it.

    Before anybody receives: with order the message groups of these messages stand still until then.
    Where it cannot be done the home opens all the same, and revive tries again.
    """
    try:
        buried = bury(engine, None).n
    except Exception:
        log.exception("What was left doomed is not buried yet; revive tries again.")
        return
    if buried:
        log.info("buried %d messages that were left doomed", buried)


def _bury_queue(engine: Engine, doomed: Doomed, *, buried: Buried) -> dict[int, Exception]:
    """Bury a queue's, and count them; by offset what keeps the others from it.

    Raises:
        RocketMQError: nothing can be stored now, of whatever queue.
    """
    done, before = 0, engine.log
    try:
        located = _located(engine, doomed)
        for rows in _parts_of(engine, located):
            buried.n += _bury_part(engine, located.take(rows))
            done = rows.stop
    except Exception as error:
        if _is_for_all(engine, error, before=before):
            raise
        log.info("Doomed messages of %s are buried one by one: %r", doomed.key, error)
        return _bury_each(engine, doomed.take(slice(done, len(doomed))), buried=buried)
    return {}


def _bury_each(engine: Engine, doomed: Doomed, *, buried: Buried) -> dict[int, Exception]:
    """One frame for each of them, but for those that cannot be read or copied."""
    before = engine.log
    kept: dict[int, Exception] = {}
    #: Damaged sections of the log: their messages are read all together or not at all.
    damaged: dict[int, Exception] = {}
    for row, offset in enumerate(doomed.queue_offset.tolist()):
        one = doomed.take(slice(row, row + 1))
        try:
            one = _located(engine, one)
            if int(one.position[0]) in damaged:
                kept[offset] = damaged[int(one.position[0])]
            else:
                buried.n += _bury_part(engine, one)
        except Exception as error:
            if _is_for_all(engine, error, before=before):
                raise
            kept[offset] = error
            if isinstance(error, CorruptLogError) and one.position[0] >= engine.log.first:
                damaged[int(one.position[0])] = error
    return kept


def _is_for_all(engine: Engine, error: Exception, *, before: CommitLog) -> bool:
    """Whether it says nothing of a message: the store is full, busy, another's, or was rebuilt."""
    if isinstance(error, _UNREADABLE):
        return not isinstance(error, CorruptLogError) and has_another_log(engine, before)
    return isinstance(error, RocketMQError)


def _located(engine: Engine, doomed: Doomed) -> Doomed:
    """The same, with where they lie now.

    Raises:
        LookupError: one of them has expired.
    """
    places = locate(
        engine,
        topic_id=doomed.key.topic_id,
        queue_id=np.full(len(doomed), doomed.key.queue_id, dtype=np.int32),
        offset=doomed.queue_offset,
        places=Places(doomed.position, doomed.row),
    )
    return replace(doomed, position=places.position, row=places.row)


def _parts_of(engine: Engine, located: Doomed) -> Iterator[slice]:
    """The rows of each frame, which has what is said of each message twice: there, and of it."""
    said = np.array([2 * len(failure) for failure in located.failures], dtype=np.int64)
    for rows in parts(
        engine,
        Places(located.position, located.row),
        topic_id=located.key.topic_id,
        queue_id=np.full(len(located), located.key.queue_id, dtype=np.int32),
        offset=located.queue_offset,
    ):
        for part in cut(said[rows], limits.STEP_BYTES):
            yield slice(rows.start + part.start, rows.start + part.stop)


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
