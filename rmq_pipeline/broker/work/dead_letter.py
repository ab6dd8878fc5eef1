"""Dead-lettering: find the marked messages, read them, copy them, and settle the originals."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.dead_letter import (
    Exhausted,
    FindExhausted,
    StoreDeadLetters,
    copy_columns,
)
from rmq_pipeline.broker.decide.publish import checked
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.chunks import cut, parts
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch, has_another_log, locate, whatever_log
from rmq_pipeline.errors import CorruptLogError, OperatorError, RocketMQError, StorageError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.log.commit_log import CommitLog

log = logging.getLogger(__name__)

_COLUMNS = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
#: Messages that one frame dead-letters (their bodies: limits.STEP_BYTES at most). Also the most
#: that one call dead-letters as a side task.
AT_ONCE = 10_000
#: Raised by reading when the store is damaged or a message is gone.
_UNREADABLE = (CorruptLogError, StorageError, LookupError)


@dataclass(slots=True)
class DeadLettered:
    """Result of one dead-lettering: the number of copies, and the errors by queue and offset."""

    n: int = 0
    kept: dict[QueueKey, dict[int, Exception]] = field(default_factory=dict)


def dead_letter_exhausted(
    engine: Engine,
    keys: Sequence[QueueKey] | None,
    *,
    limit: int | None = None,
    again: bool = False,
) -> DeadLettered:
    """Copy the messages marked for dead-lettering in these queues (None: all) to the dead letters.

    A message that cannot be read or copied stays marked, and is retried later. It stops
    neither the other messages nor the caller.

    Args:
        limit: stop after this many messages; None: continue until no marked message is left.
        again: also retry the messages that failed before.

    Raises:
        RocketMQError: the store accepts no writes now, for any queue.
    """
    failures, dead_lettered = engine.dead_letter_failures, DeadLettered()
    chosen = tuple(keys) if keys is not None else None
    but: dict[QueueKey, Int64s] = {} if again else failures.offsets()
    while limit is None or dead_lettered.n < limit:
        found: list[Exhausted] = engine.submit(FindExhausted(chosen, AT_ONCE, but))
        for exhausted in found:
            kept = whatever_log(
                engine,
                partial(_dead_letter_one_queue, engine, exhausted, dead_lettered=dead_lettered),
            )
            failures.note(exhausted.key, exhausted.queue_offset, kept=kept)
            if kept:
                dead_lettered.kept.setdefault(exhausted.key, {}).update(kept)
                # Otherwise the next FindExhausted returns it again, and takes the place of others.
                offsets = np.array([*kept], dtype=np.int64)
                but[exhausted.key] = np.concatenate([but.get(exhausted.key, offsets[:0]), offsets])
        if not found:
            if again and chosen is None:
                failures.are_only(but)
            break
    return dead_lettered


def told(error: Exception) -> Exception:
    """Return the error to raise to a caller when a message cannot be dead-lettered."""
    if isinstance(error, (RocketMQError, LookupError)):
        return error
    said = OperatorError(f"A message cannot be dead-lettered: {error}")
    said.__cause__ = error
    return said


def finish_dead_lettering(engine: Engine) -> None:
    """Dead-letter the messages that a stopped broker had marked but not copied.

    Runs before the first receive, because in order these message groups are blocked until then. On
    an error the home opens all the same, and revive retries.
    """
    try:
        dead_lettered = dead_letter_exhausted(engine, None).n
    except Exception:
        log.exception("Exhausted messages are not dead-lettered yet; revive tries again.")
        return
    if dead_lettered:
        log.info("dead-lettered %d exhausted messages of an earlier process", dead_lettered)


def _dead_letter_one_queue(
    engine: Engine, exhausted: Exhausted, *, dead_lettered: DeadLettered
) -> dict[int, Exception]:
    """Dead-letter and count the messages of one queue; return the errors of the others by offset.

    Raises:
        RocketMQError: the store accepts no writes now, for any queue.
    """
    done, before = 0, engine.log
    try:
        located = _located(engine, exhausted)
        for rows in _parts_of(engine, located):
            dead_lettered.n += _dead_letter_part(engine, located.take(rows))
            done = rows.stop
    except Exception as error:
        if _is_for_all(engine, error, before=before):
            raise
        log.info("Exhausted messages of %s are dead-lettered one by one: %r", exhausted.key, error)
        return _dead_letter_each(
            engine, exhausted.take(slice(done, len(exhausted))), dead_lettered=dead_lettered
        )
    return {}


def _dead_letter_each(
    engine: Engine, exhausted: Exhausted, *, dead_lettered: DeadLettered
) -> dict[int, Exception]:
    """Dead-letter messages one frame each; return the errors of the others by offset."""
    before = engine.log
    kept: dict[int, Exception] = {}
    #: Damaged sections of the log: a section is read as a whole, so none of its messages is
    #: readable.
    damaged: dict[int, Exception] = {}
    for row, offset in enumerate(exhausted.queue_offset.tolist()):
        one = exhausted.take(slice(row, row + 1))
        try:
            one = _located(engine, one)
            if int(one.position[0]) in damaged:
                kept[offset] = damaged[int(one.position[0])]
            else:
                dead_lettered.n += _dead_letter_part(engine, one)
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


def _located(engine: Engine, exhausted: Exhausted) -> Exhausted:
    """Return the messages with their current places.

    Raises:
        LookupError: one of the messages has expired.
    """
    places = locate(
        engine,
        topic_id=exhausted.key.topic_id,
        queue_id=np.full(len(exhausted), exhausted.key.queue_id, dtype=np.int32),
        offset=exhausted.queue_offset,
        places=Places(exhausted.position, exhausted.row),
    )
    return replace(exhausted, position=places.position, row=places.row)


def _parts_of(engine: Engine, located: Exhausted) -> Iterator[slice]:
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


def _dead_letter_part(engine: Engine, exhausted: Exhausted) -> int:
    """Dead-letter messages in one frame; return how many were still marked."""
    state = engine.state
    group = state.groups.get(exhausted.key.group_id)
    topic = state.topics.get(exhausted.key.topic_id)
    if group is None or topic is None:
        return 0
    messages: pa.Table = fetch(
        engine,
        Places(exhausted.position, exhausted.row),
        columns=_COLUMNS,
        topic_id=exhausted.key.topic_id,
        queue_id=np.full(len(exhausted), exhausted.key.queue_id, dtype=np.int32),
        offset=exhausted.queue_offset,
    )
    columns = copy_columns(messages, exhausted, topic=topic.topic.name)
    dead_letters = state.topics[group.dead_letter_topic_id].topic
    copies = checked(
        dead_letters,
        columns,
        ids=engine.ids,
        delay_max_ms=engine.settings.delay_max_ms,
        now_ms=engine.clock.now_ms(),
    )
    dead_lettered: int = engine.submit(StoreDeadLetters(exhausted, copies))
    return dead_lettered
