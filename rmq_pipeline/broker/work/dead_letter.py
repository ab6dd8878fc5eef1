"""Dead-lettering: find the marked messages, read them, copy them, and settle the originals."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.dead_letter import Bury, Doomed, FindDoomed, copy_columns
from rmq_pipeline.broker.decide.publish import checked
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.chunks import cut, parts
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.placement import locate
from rmq_pipeline.broker.work.reading import has_another_log, whatever_log
from rmq_pipeline.broker.work.sealed import fetch
from rmq_pipeline.errors import CorruptLogError, OperatorError, RocketMQError, StorageError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.commit_log import CommitLog

log = logging.getLogger(__name__)

_COLUMNS = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
#: Messages that one frame dead-letters (their bodies: limits.STEP_BYTES at most). Also the most
#: that one call dead-letters as a side task.
AT_ONCE = 10_000
#: Raised by reading when the store is damaged or a message is gone.
_UNREADABLE = (CorruptLogError, StorageError, LookupError)


@dataclass(slots=True)
class Buried:
    """Result of one dead-lettering: the number of copies, and the errors by queue and offset."""

    n: int = 0
    kept: dict[QueueKey, dict[int, Exception]] = field(default_factory=dict)


def bury(
    engine: Engine,
    keys: Sequence[QueueKey] | None,
    *,
    limit: int | None = None,
    again: bool = False,
) -> Buried:
    """Copy the messages marked for dead-lettering in these queues (None: all) to the dead letters.

    A message that cannot be read or copied stays marked, and is retried later. It stops
    neither the other messages nor the caller.

    Args:
        limit: stop after this many messages; None: continue until no marked message is left.
        again: also retry the messages that failed before.

    Raises:
        RocketMQError: the store accepts no writes now, for any queue.
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
                # Otherwise the next FindDoomed returns it again, and the limit leaves no place for
                # others.
                offsets = np.array([*kept], dtype=np.int64)
                but[doomed.key] = np.concatenate([but.get(doomed.key, offsets[:0]), offsets])
        if not found:
            if again and chosen is None:
                unburied.are_only(but)
            break
    return buried


def told(error: Exception) -> Exception:
    """Return the error to raise to a caller when a message cannot be dead-lettered."""
    if isinstance(error, (RocketMQError, LookupError)):
        return error
    said = OperatorError(f"A message cannot be dead-lettered: {error}")
    said.__cause__ = error
    return said


def finish_burying(engine: Engine) -> None:
    """Dead-letter the messages that a stopped broker had marked but not copied.

    Runs before the first receive, because in order these message groups are blocked until then. On
    an error the home opens all the same, and revive retries.
    """
    try:
        buried = bury(engine, None).n
    except Exception:
        log.exception("Exhausted messages are not dead-lettered yet; revive tries again.")
        return
    if buried:
        log.info("dead-lettered %d exhausted messages of an earlier process", buried)


def _bury_queue(engine: Engine, doomed: Doomed, *, buried: Buried) -> dict[int, Exception]:
    """Dead-letter and count the messages of one queue; return the errors of the others by offset.

    Raises:
        RocketMQError: the store accepts no writes now, for any queue.
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
        log.info("Exhausted messages of %s are dead-lettered one by one: %r", doomed.key, error)
        return _bury_each(engine, doomed.take(slice(done, len(doomed))), buried=buried)
    return {}


def _bury_each(engine: Engine, doomed: Doomed, *, buried: Buried) -> dict[int, Exception]:
    """Dead-letter messages one frame each; return the errors of the others by offset."""
    before = engine.log
    kept: dict[int, Exception] = {}
    #: Damaged sections of the log: a section is read as a whole, so none of its messages is
    #: readable.
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
    """Return True if the error concerns the store, not one message.

    The store may be full, busy, owned by another process, or rebuilt during the call.
    """
    if isinstance(error, _UNREADABLE):
        return not isinstance(error, CorruptLogError) and has_another_log(engine, before)
    return isinstance(error, RocketMQError)


def _located(engine: Engine, doomed: Doomed) -> Doomed:
    """Return the messages with their current places.

    Raises:
        LookupError: one of the messages has expired.
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
    """Yield the rows of each frame. A failure counts twice: in the copy and in its event."""
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
    """Dead-letter messages in one frame; return how many were still marked."""
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
