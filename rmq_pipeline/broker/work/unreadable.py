"""Messages that cannot be read: repeated halving finds them, so that they do not stop the others.

Those of the system topics are left out. Of leased messages the delivery has failed: if they were
released, they would be delivered first again and block the messages behind them. A failing store
is not the fault of a message. In that case the messages are released without counting the attempt,
but become visible only after a delay, so that later messages come first.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.deliver import Delivery, Receive, receipts_of
from rmq_pipeline.broker.decide.settle_each import FailEach, ReleaseEach, Renew
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.broker.work.chunks import parts
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import delivered, fetch, part_of, segments_of, whatever_log
from rmq_pipeline.errors import CorruptLogError, RocketMQError, StorageError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int32s, Int64s

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

#: Errors after which messages are read in parts: one is damaged or gone, or the store failed.
UNREADABLE: Final = (CorruptLogError, LookupError, StorageError)
#: Delay after which messages in a failed store are visible again, at least.
AWAY_MS: Final = 10_000
#: Time after which failing rows are no longer halved but left out as a whole.
WITHIN_MS: Final = 2_000
#: Times that reading may fail although reading in parts succeeds.
_IN_VAIN: Final = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """Messages of one topic, and their places."""

    topic_id: int
    queue_id: Int32s
    offset: Int64s
    places: Places

    def __len__(self) -> int:
        return len(self.offset)

    def take(self, rows: Rows | slice) -> "Stored":
        """Return the messages of these rows."""
        places = Places(self.places.position[rows], self.places.row[rows])
        return Stored(self.topic_id, self.queue_id[rows], self.offset[rows], places)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that could not be read."""

    rows: Rows
    #: Mask of rows that failed alone; the time was too short to halve the others.
    alone: Mask
    #: Error of the last failed read.
    why: Exception


def read_parts(
    engine: Engine,
    stored: Stored,
    *,
    columns: tuple[str, ...],
    bound_bytes: int,
    leave_out: Callable[[LeftOut], object],
) -> Iterator[tuple[Rows, pa.Table]]:
    """Yield these messages in parts, in order: row indices and messages.

    Args:
        columns: names of schema.MESSAGE.
        bound_bytes: most bytes of a part, unless it is a single message.
        leave_out: called with the rows that are in no part.

    Raises:
        OperatorError, LookupError: reading fails, although each part can be read alone.
    """
    rows, in_vain = np.arange(len(stored)), 0
    while len(rows):
        some, done = stored.take(rows), 0
        try:
            for part in _parts(engine, some, bound_bytes=bound_bytes):
                messages = _read_stored(engine, some.take(part), columns=columns)
                done = part.stop
                # An error of the caller is not raised here, so UNREADABLE below is an error of
                # reading.
                yield rows[part], messages
        except UNREADABLE:
            rows = rows[done:]
            found = _unreadable(engine, stored.take(rows), columns=columns, bound_bytes=bound_bytes)
            if found is None:
                in_vain += 1
                if in_vain == _IN_VAIN:
                    raise
                continue
            leave_out(LeftOut(rows[found.rows], found.alone, found.why))
            rows = np.delete(rows, found.rows)
        else:
            return


def _parts(engine: Engine, stored: Stored, *, bound_bytes: int) -> Iterator[slice]:
    return parts(
        engine,
        stored.places,
        topic_id=stored.topic_id,
        queue_id=stored.queue_id,
        offset=stored.offset,
        bound_bytes=bound_bytes,
    )


def _read_stored(engine: Engine, stored: Stored, *, columns: tuple[str, ...]) -> pa.Table:
    def read() -> pa.Table:
        return fetch(
            engine,
            stored.places,
            columns=columns,
            topic_id=stored.topic_id,
            queue_id=stored.queue_id,
            offset=stored.offset,
        )

    return whatever_log(engine, read)


def _unreadable(
    engine: Engine, stored: Stored, *, columns: tuple[str, ...], bound_bytes: int
) -> LeftOut | None:
    """Read file by file, and halve what fails; return None if all rows can be read."""

    def read_all(some: Stored) -> None:
        for part in _parts(engine, some, bound_bytes=bound_bytes):
            _read_stored(engine, some.take(part), columns=columns)

    left: list[Rows] = []
    alone: list[Mask] = []
    why: Exception | None = None
    until_ms = engine.clock.now_ms() + WITHIN_MS
    pieces = _by_file(engine, stored)[::-1]
    while pieces:
        rows = pieces.pop()
        some = stored.take(rows)
        try:
            read_all(some)
        except UNREADABLE as error:
            middle = _middle(some.places.position, kept_from=engine.log.first)
            is_gone = isinstance(error.__cause__, FileNotFoundError)
            if middle and not is_gone and engine.clock.now_ms() < until_ms:
                pieces += [rows[middle:], rows[:middle]]
                continue
            left.append(rows)
            alone.append(np.full(len(rows), is_gone or not middle))
            why = error
    if why is None:
        return None
    return LeftOut(np.concatenate(left), np.concatenate(alone), why)


def _by_file(engine: Engine, stored: Stored) -> list[Rows]:
    """Return the rows of each segment, by queue and offset; the rows in the log are one part."""
    order = np.lexsort((stored.offset, stored.queue_id))
    sealed = stored.places.position < engine.log.first
    found = [order[~sealed[order]]]
    order = order[sealed[order]]
    for queue_id in np.unique(stored.queue_id[order]).tolist():
        rows = order[stored.queue_id[order] == queue_id]
        segments = segments_of(engine).of_queue(stored.topic_id, queue_id)
        bases = np.array([segment.base for segment in segments], dtype=np.int64)
        cuts = np.searchsorted(stored.offset[rows], bases)
        found += np.split(rows, cuts)
    return [rows for rows in found if len(rows)]


def _middle(position: Int64s, *, kept_from: int) -> int:
    """Return where to cut in two.

    The result is 0 for one message or one log section, which is read as a whole.
    """
    cuts = np.flatnonzero(np.diff(position)) + 1
    if len(cuts):
        return int(cuts[len(cuts) // 2])
    return 0 if position[0] >= kept_from else len(position) // 2


def readable(engine: Engine, delivery: Delivery, *, request: Receive) -> pa.Table:
    """Return the messages of a delivery that can be read, as schema.RECEIVED.

    Raises:
        OperatorError, LookupError: no message of it can be read.
    """
    try:
        return delivered(engine, delivery)
    except UNREADABLE:
        rest = sorted_out(engine, delivery, request=request)
        return _read_delivery(engine, rest) if len(rest) else schema.RECEIVED.empty_table()


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
            _read_delivery(engine, part)
        except UNREADABLE as error:
            middle = _middle(position[start:stop], kept_from=engine.log.first)
            if middle and not _is_file_gone(engine, part, error=error):
                parts += [(start + middle, stop), (start, start + middle)]
            elif isinstance(error, StorageError):
                away[start:stop], failure = True, error
            else:
                wrong[start:stop], damage = True, error
    return _Tried(wrong, away, untried, damage or failure)


def _read_delivery(engine: Engine, delivery: Delivery) -> pa.Table:
    return whatever_log(engine, lambda: delivered(engine, delivery))


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
