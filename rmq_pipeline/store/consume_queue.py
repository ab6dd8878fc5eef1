"""Queries on the rows of a consume queue; each runs on a database cursor."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol, TypeVar

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import StorageError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.statements import named

#: Offsets scanned first in a lookup of message groups; the count doubles with each further scan.
_BACKLOG_ROWS: Final = 65_536

_Answer_co = TypeVar("_Answer_co", covariant=True)
_Numbers = npt.NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True)
class IndexPage:
    """Consecutive rows of a queue from offset ``base``; columns of equal length."""

    base: int
    #: Log position of the section that contains the message, and the message's row in it.
    position: Int64s
    row: Int32s
    message_group_hash: Int64s
    tag_hash: Int64s


def index(
    cursor: duckdb.DuckDBPyConnection, *, topic_id: int, queue_id: int, start: int, stop: int
) -> IndexPage:
    """Return the rows of a queue in [start, stop); see Database.index."""
    params = {"topic_id": topic_id, "queue_id": queue_id, "start": start, "stop": stop}
    rows = cursor.sql(named("index"), params=params).to_arrow_table()
    offsets = rows.column("queue_offset").to_numpy()
    base = int(offsets[0]) if len(offsets) else start
    if len(offsets) and offsets[-1] - base != len(offsets) - 1:
        raise StorageError(f"Queue {queue_id} of topic {topic_id} has a gap after offset {base}.")
    return IndexPage(
        base,
        rows.column("position").to_numpy(),
        rows.column("row").to_numpy(),
        rows.column("message_group_hash").to_numpy(),
        rows.column("tag_hash").to_numpy(),
    )


def backlog(
    cursor: duckdb.DuckDBPyConnection,
    *,
    topic_id: int,
    queue_id: int,
    hashes: Int64s,
    starts: Int64s,
    stop: int,
    limit: int,
) -> tuple[Int64s, Int64s]:
    """Return the first messages of each message group; see Database.backlog.

    The scan starts at the smallest start and stops when every group has ``limit`` messages. Its
    cost therefore does not grow with the queue when one group owns most of it.
    """
    # NumPy sorts 16-bit numbers several times faster than hashes.
    small = np.int16 if len(hashes) <= np.iinfo(np.int16).max else np.int32
    ordinals = np.arange(len(hashes), dtype=small)
    asked = pa.table({"message_group_hash": hashes, "start": starts, "ordinal": ordinals})
    parts: list[tuple[_Numbers, Int64s]] = [(np.zeros(0, small), np.zeros(0, np.int64))]
    counts = np.zeros(len(hashes), np.int64)
    first, rows = int(starts.min(initial=stop)), _BACKLOG_ROWS
    while first < stop and asked.num_rows:
        last = min(first + rows, stop)
        params = {"topic_id": topic_id, "queue_id": queue_id, "first": first, "stop": last}
        cursor.register("asked", asked)
        found = cursor.sql(named("backlog"), params=params).to_arrow_table()
        parts.append((found.column("ordinal").to_numpy(), found.column("queue_offset").to_numpy()))
        counts += np.bincount(parts[-1][0], minlength=len(counts))
        asked = asked.filter(pa.array(counts[asked.column("ordinal").to_numpy()] < limit))
        first, rows = last, rows * 2
    which, offsets = _first_of_each(
        np.concatenate([part for part, _ in parts]),
        np.concatenate([part for _, part in parts]),
        limit=limit,
    )
    return hashes[which], offsets


class Question(Protocol[_Answer_co]):
    """A read of the database, with its parameters."""

    def run(self, cursor: duckdb.DuckDBPyConnection) -> _Answer_co:
        """Execute it with a cursor."""
        ...


@dataclass(frozen=True, slots=True)
class Lags:
    """Positions of consumer groups on the queues they read, for one group or for all."""

    consumer_group: str | None

    def run(self, cursor: duckdb.DuckDBPyConnection) -> pa.Table:
        """Return one row per queue; no message from ``unread_from`` on was delivered yet."""
        return cursor.sql(named("lag_of_groups"), params=asdict(self)).to_arrow_table()


@dataclass(frozen=True, slots=True)
class StoredAt:
    """Storage times of single messages: topic_id, queue_id, queue_offset."""

    places: Sequence[tuple[int, int, int]]

    def run(self, cursor: duckdb.DuckDBPyConnection) -> dict[tuple[int, int, int], int]:
        """Return the times in ms; expired messages are omitted."""
        found: dict[tuple[int, int, int], int] = {}
        for place in self.places:
            params = dict(zip(("topic_id", "queue_id", "queue_offset"), place, strict=True))
            for (at_ms,) in cursor.sql(named("stored_at"), params=params).fetchall():
                found[place] = at_ms
        return found


@dataclass(frozen=True, slots=True)
class TagCount:
    """Count of a topic's messages that have one of the given tags."""

    topic_id: int
    hashes: Int64s
    #: Queue -> [start, stop) of offsets.
    stretches: Mapping[int, tuple[int, int]]

    def run(self, cursor: duckdb.DuckDBPyConnection) -> dict[int, int]:
        """Return the count for each queue; queues with none are omitted."""
        start, stop = zip(*self.stretches.values(), strict=True)
        asked = {"queue_id": list(self.stretches), "start": start, "stop": stop}
        cursor.register("stretches", pa.table(asked))
        params = {"topic_id": self.topic_id, "hashes": self.hashes.tolist()}
        return dict(cursor.sql(named("count_tags"), params=params).fetchall())


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Search for messages of a queue in [start, stop); a filter that is None matches all."""

    topic_id: int
    queue_id: int
    start: int
    stop: int
    limit: int
    key: str | None = None
    message_id: str | None = None
    #: Matches messages stored in [from_ms, to_ms).
    from_ms: int | None = None
    to_ms: int | None = None

    def run(self, cursor: duckdb.DuckDBPyConnection) -> Int64s:
        """Return the first ``limit`` offsets that match."""
        rows = cursor.sql(named("find_offsets"), params=asdict(self)).to_arrow_table()
        offsets: Int64s = rows.column("queue_offset").to_numpy()
        return offsets


def _first_of_each(which: _Numbers, offsets: Int64s, *, limit: int) -> tuple[_Numbers, Int64s]:
    """Return the first ``limit`` rows of each ordinal, in offset order."""
    if not len(which):
        return which, offsets
    if np.any(np.diff(offsets) < 0):
        by_offset = np.argsort(offsets, kind="stable")
        which, offsets = which[by_offset], offsets[by_offset]
    if np.bincount(which).max() <= limit:
        return which, offsets
    order = np.argsort(which, kind="stable")
    ordered = which[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ranks = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    keep = np.sort(order[ranks < limit])
    return which[keep], offsets[keep]
