"""Leased messages that cannot be read: their delivery has failed.

If they were released, they would be delivered first again and block the messages behind them. A
failing store is not the fault of a message. In that case the messages are released without counting
the attempt, but become visible only after a delay, so that later messages come first.
"""

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.deliver import Delivery, Receive, receipts_of
from rmq_pipeline.broker.decide.settle import Mask
from rmq_pipeline.broker.decide.settle_each import FailEach, ReleaseEach, Renew
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import delivered, part_of, whatever_log
from rmq_pipeline.broker.work.sealed import segments_of
from rmq_pipeline.errors import CorruptLogError, RocketMQError, StorageError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s

log = logging.getLogger(__name__)

#: Delay after which messages in a failed store are visible again, at least.
AWAY_MS: Final = 10_000
#: Errors after which messages are read in parts: one is damaged or gone, or the store failed.
UNREADABLE: Final = (CorruptLogError, LookupError, StorageError)


def readable(engine: Engine, delivery: Delivery, *, request: Receive) -> pa.Table:
    """Return the messages of a delivery that can be read, as schema.RECEIVED.

    Raises:
        OperatorError, LookupError: no message of it can be read.
    """
    try:
        return delivered(engine, delivery)
    except UNREADABLE:
        rest = sorted_out(engine, delivery, request=request)
        return _read(engine, rest) if len(rest) else schema.RECEIVED.empty_table()


def sorted_out(engine: Engine, delivery: Delivery, *, request: Receive) -> Delivery:
    """Return the readable part of a delivery; fail or delay the rest.

    With order by message group, as on lite topics, no message behind an unreadable one of its group
    is delivered; with order by queue, none behind it in the queue. A large delivery is released
    partly untried, so that results take effect before the leases end.

    Raises:
        OperatorError, LookupError: no message of it can be read.
    """
    delivery = _renewed(engine, delivery, request=request)
    if not len(delivery):
        return delivery
    receipts = receipts_of(delivery)
    tried = _tried(engine, delivery, request=request)
    wrong, away = tried.wrong, tried.away
    group = engine.state.group(request.group)
    if engine.state.order(group, delivery.topic_id) is ByQueue:
        wrong, away = (_and_what_is_behind(delivery, some) for some in (wrong, away))
    if tried.untried.any():
        engine.submit(ReleaseEach(receipts.take(tried.untried)))
    # Released before the damaged ones fail: in order, a message behind one that is released must
    # not be charged an attempt.
    if away.any():
        engine.submit(ReleaseEach(receipts.take(away), AWAY_MS))
        log.warning("%d messages of a receive are in a missing file: %s", away.sum(), tried.why)
    if wrong.any():
        said = Failure.of(f"It cannot be read: {tried.why}", error_type=type(tried.why).__name__)
        engine.submit(FailEach(receipts.take(wrong), said.to_json()))
        log.error("%d messages of a receive cannot be read: %s", wrong.sum(), tried.why)
    # Failing a message has released the later messages of its message group.
    rest = _renewed(engine, delivery, request=request)
    if tried.why is not None and not len(rest):
        raise tried.why
    return rest


def _renewed(engine: Engine, delivery: Delivery, *, request: Receive) -> Delivery:
    """Renew the leases for the requested duration; return the part that is still leased."""
    renewal = Renew(receipts_of(delivery), request.invisible_duration_ms)
    return part_of(delivery, engine.submit(renewal))


@dataclass(frozen=True, slots=True)
class _Tried:
    """Result of reading the parts of a delivery."""

    wrong: Mask
    #: Messages at which the store failed.
    away: Mask
    #: Messages not tried because time ran out; the last ones.
    untried: Mask
    #: Last error of a damaged message, or else of the store; None: all could be read.
    why: Exception | None


def _tried(engine: Engine, delivery: Delivery, *, request: Receive) -> _Tried:
    """Read halves, and the halves of those that fail, in message order."""
    n = len(delivery)
    rows = np.arange(n)
    position = np.concatenate([taken.position for _, taken in delivery.taken])
    wrong, away, untried = (np.zeros(n, dtype=np.bool_) for _ in range(3))
    damage: Exception | None = None
    failure: StorageError | None = None
    within_ms = request.invisible_duration_ms // 2
    until_ms = engine.clock.now_ms() + within_ms
    parts = [(0, n)]
    while parts:
        start, stop = parts.pop()
        if engine.clock.now_ms() >= until_ms:
            if start:
                untried[start:] = True
                break
            # Nothing is known yet, and releasing all would bring the next receive no further.
            _renewed(engine, delivery, request=request)
            until_ms = engine.clock.now_ms() + within_ms
        part = part_of(delivery, (rows >= start) & (rows < stop))
        try:
            _read(engine, part)
        except UNREADABLE as error:
            one = _is_one(position[start:stop], kept_from=engine.log.first)
            if not one and not _is_file_gone(engine, part, error=error):
                middle = start + _middle(position[start:stop])
                parts += [(middle, stop), (start, middle)]
            elif isinstance(error, StorageError):
                away[start:stop], failure = True, error
            else:
                wrong[start:stop], damage = True, error
    return _Tried(wrong, away, untried, damage or failure)


def _read(engine: Engine, delivery: Delivery) -> pa.Table:
    return whatever_log(engine, lambda: delivered(engine, delivery))


def _middle(position: Int64s) -> int:
    """Return where to cut in two: between sections of the log, if there are several."""
    cuts = np.flatnonzero(np.diff(position)) + 1
    return int(cuts[len(cuts) // 2]) if len(cuts) else len(position) // 2


def _is_one(position: Int64s, *, kept_from: int) -> bool:
    """Return True for one message, or messages of one log section, which is read as a whole."""
    return len(position) == 1 or bool(position[0] >= kept_from and np.all(position == position[0]))


def _is_file_gone(engine: Engine, part: Delivery, *, error: Exception) -> bool:
    """Return True if the segment file of all these messages is missing: none needs its own try."""
    if not isinstance(error.__cause__, FileNotFoundError) or len(part.taken) > 1:
        return False
    [(queue_id, taken)] = part.taken
    if int(taken.position.max()) >= engine.log.first:
        return False
    first, last = int(taken.offset.min()), int(taken.offset.max())
    segments = segments_of(engine).of_queue(part.topic_id, queue_id)
    return any(each.base <= first and last < each.end for each in segments)


def release_delivery(engine: Engine, delivery: Delivery) -> None:
    """Release messages that will reach no caller, as if never leased; skip settled ones."""
    if not len(delivery):
        return
    try:
        engine.submit(ReleaseEach(receipts_of(delivery)))
    except RocketMQError as error:  # the store has failed; the caller gets that error
        log.warning("a delivery that reached no caller ends with its lease: %s", error)


def _and_what_is_behind(delivery: Delivery, wrong: Mask) -> Mask:
    parts, done = [], 0
    for _, taken in delivery.taken:
        parts.append(np.logical_or.accumulate(wrong[done : done + len(taken)]))
        done += len(taken)
    return np.concatenate(parts)
