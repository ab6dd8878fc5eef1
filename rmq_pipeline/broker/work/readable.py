"""Reading messages of the system topics in parts, without the unreadable ones.

A damaged or missing message does not stop the others. Repeated halving finds it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.chunks import parts
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import whatever_log
from rmq_pipeline.broker.work.sealed import fetch, segments_of
from rmq_pipeline.broker.work.unreadable import UNREADABLE
from rmq_pipeline.message import Int32s, Int64s

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

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
                messages = _read(engine, some.take(part), columns=columns)
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


def _read(engine: Engine, stored: Stored, *, columns: tuple[str, ...]) -> pa.Table:
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
            _read(engine, some.take(part), columns=columns)

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
