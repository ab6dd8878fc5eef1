"""Messages of the system's own topics, read in parts, but for those that cannot be read.

One that is damaged or away keeps no other from being read: which they are is found by halves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.reading import whatever_log
from rmq_pipeline.broker.receiving.unreadable import UNREADABLE
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.parts import parts
from rmq_pipeline.broker.stored.sealed import fetch, segments_of
from rmq_pipeline.message import Int32s, Int64s

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

#: How long what fails is halved; after that it is left out whole, so that nobody waits for it.
WITHIN_MS: Final = 2_000
#: So often all could be read when it was tried in parts, and not when it was read.
_IN_VAIN: Final = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """Messages of one topic, and where they lie."""

    topic_id: int
    queue_id: Int32s
    offset: Int64s
    places: Places

    def __len__(self) -> int:
        return len(self.offset)

    def take(self, rows: Rows | slice) -> "Stored":
        """These messages."""
        places = Places(self.places.position[rows], self.places.row[rows])
        return Stored(self.topic_id, self.queue_id[rows], self.offset[rows], places)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that could not be read."""

    rows: Rows
    #: Which of them could not be read alone; there was no time to halve the others.
    alone: Mask
    #: What the last of them raised.
    why: Exception


def read_parts(
    engine: Engine,
    stored: Stored,
    *,
    columns: tuple[str, ...],
    bound_bytes: int,
    leave_out: Callable[[LeftOut], object],
) -> Iterator[tuple[Rows, pa.Table]]:
    """Parts of these messages in their order: which rows, and the messages.

    Args:
        columns: of schema.MESSAGE.
        bound_bytes: of each part, or it is one message.
        leave_out: is told of rows that come in no part.

    Raises:
        OperatorError, LookupError: reading fails, and it is none of the messages.
    """
    rows, in_vain = np.arange(len(stored)), 0
    while len(rows):
        some, done = stored.take(rows), 0
        try:
            for part in _parts(engine, some, bound_bytes=bound_bytes):
                messages = _read(engine, some.take(part), columns=columns)
                done = part.stop
                # What the caller raises meanwhile does not come by here.
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
    """Read what lies in one file, and halves of what fails; None: all of it can be read."""

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
    """The rows of each segment, in order of queue and offset; those in the log are together."""
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
    """Where to cut in two; 0: it is one message, or one section of the log, read as a whole."""
    cuts = np.flatnonzero(np.diff(position)) + 1
    if len(cuts):
        return int(cuts[len(cuts) // 2])
    return 0 if position[0] >= kept_from else len(position) // 2
