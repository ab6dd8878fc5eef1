"""Messages that were leased and cannot be read: that delivery of them has failed.

Given back they would be the next ones again, and nobody would ever get what lies behind them.
A store that fails says nothing of them: those that are away are given back, and no attempt is
counted, but they come again only after a while, so that what lies behind them comes before.
"""

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.deliver import Delivery, Receive
from rmq_pipeline.broker.receiving.reading import (
    delivered,
    part_of,
    receipts_of,
    whatever_log,
)
from rmq_pipeline.broker.settling.each import FailEach, GiveBack, Renew
from rmq_pipeline.broker.settling.settle import Mask
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.errors import CorruptLogError, RocketMQError, StorageError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s

log = logging.getLogger(__name__)

#: How long what is away is let be, at least.
AWAY_MS: Final = 10_000
#: After which there is something to sort out: one is damaged, gone, or the store has failed.
UNREADABLE: Final = (CorruptLogError, LookupError, StorageError)


def readable(engine: Engine, delivery: Delivery, *, request: Receive) -> pa.Table:
    """The messages of a delivery as schema.RECEIVED, as far as they can be read.

    Raises:
        OperatorError, LookupError: nothing of it can be given.
    """
    try:
        return delivered(engine, delivery)
    except UNREADABLE:
        rest = sorted_out(engine, delivery, request=request)
        return _read(engine, rest) if len(rest) else schema.RECEIVED.empty_table()


def sorted_out(engine: Engine, delivery: Delivery, *, request: Receive) -> Delivery:
    """The part of a delivery that can be read; the rest has failed, or is away, and waits.

    In a message group nothing is given that lies behind a message that cannot be read, nor in a
    queue where the consumer group is in order by queue. Where there is much to try, some of it is
    given back untried, so that what was found counts before the leases end.

    Raises:
        OperatorError, LookupError: nothing of it can be given.
    """
    delivery = _renewed(engine, delivery, request=request)
    if not len(delivery):
        return delivery
    receipts = receipts_of(delivery)
    tried = _tried(engine, delivery, request=request)
    wrong, away = tried.wrong, tried.away
    if engine.state.group(request.group).order == "queue":
        wrong, away = (_and_what_is_behind(delivery, some) for some in (wrong, away))
    if tried.untried.any():
        engine.submit(GiveBack(receipts.take(tried.untried)))
    # Before the wrong ones: in order, one that lies behind what is away is not to blame.
    if away.any():
        engine.submit(GiveBack(receipts.take(away), AWAY_MS))
        log.warning("%d messages of a receive are away: %s", away.sum(), tried.why)
    if wrong.any():
        said = Failure.of(f"It cannot be read: {tried.why}", error_type=type(tried.why).__name__)
        engine.submit(FailEach(receipts.take(wrong), said.to_json()))
        log.error("%d messages of a receive cannot be read: %s", wrong.sum(), tried.why)
    # Of a message group what lies behind was given back with the one that has failed.
    rest = _renewed(engine, delivery, request=request)
    if tried.why is not None and not len(rest):
        raise tried.why
    return rest


def _renewed(engine: Engine, delivery: Delivery, *, request: Receive) -> Delivery:
    """What of it is leased still, for as long as was asked for."""
    renewal = Renew(receipts_of(delivery), request.invisible_duration_ms)
    return part_of(delivery, engine.submit(renewal))


@dataclass(frozen=True, slots=True)
class _Tried:
    """What came of reading the parts of a delivery."""

    wrong: Mask
    #: The store failed when these were read.
    away: Mask
    #: Time was over before these; they are the last ones.
    untried: Mask
    #: Why the last of the wrong ones, or else of those away, could not be read; None: all could.
    why: Exception | None


def _tried(engine: Engine, delivery: Delivery, *, request: Receive) -> _Tried:
    """Read halves, and halves of those that fail, in the order of the messages."""
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
            # Nothing is known yet: given back now, the next receive would come no further.
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
    """Where to cut in two: between sections, as long as there are several."""
    cuts = np.flatnonzero(np.diff(position)) + 1
    return int(cuts[len(cuts) // 2]) if len(cuts) else len(position) // 2


def _is_one(position: Int64s, *, kept_from: int) -> bool:
    """One message, or messages of one section of the log: that is read as a whole or not at all."""
    return len(position) == 1 or bool(position[0] >= kept_from and np.all(position == position[0]))


def _is_file_gone(engine: Engine, part: Delivery, *, error: Exception) -> bool:
    """Whether there is no such file as all of them are in: then none of them is tried alone."""
    if not isinstance(error.__cause__, FileNotFoundError) or len(part.taken) > 1:
        return False
    [(queue_id, taken)] = part.taken
    if int(taken.position.max()) >= engine.log.first:
        return False
    first, last = int(taken.offset.min()), int(taken.offset.max())
    segments = segments_of(engine).of_queue(part.topic_id, queue_id)
    return any(each.base <= first and last < each.end for each in segments)


def give_back(engine: Engine, delivery: Delivery) -> None:
    """What nobody will get after all, as if it had not been leased; what is settled is let be."""
    if not len(delivery):
        return
    try:
        engine.submit(GiveBack(receipts_of(delivery)))
    except RocketMQError as error:  # the store has failed, which is what the caller hears of
        log.warning("a delivery that nobody got ends with its lease: %s", error)


def _and_what_is_behind(delivery: Delivery, wrong: Mask) -> Mask:
    parts, done = [], 0
    for _, taken in delivery.taken:
        parts.append(np.logical_or.accumulate(wrong[done : done + len(taken)]))
        done += len(taken)
    return np.concatenate(parts)
