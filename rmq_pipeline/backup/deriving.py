"""Derived state at a moment: a log that is cut there, and its frames in the database.

Events about files are left out: the files of a backup are those that its snapshot names, and a fork
has none. What they held is still in the log, and the broker seals it again.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from rmq_pipeline.backup.log_files import time_of
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.writer import EVENTS
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.database import FILE_NAME, Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.recovery import MARK_FILE
from rmq_pipeline.store.log.stretch import Rows, Stretch, Stretches

LOG: Final = "log"
#: Events about segments and history files.
OF_HISTORY: Final = frozenset(
    {
        Kind.SEGMENT,
        Kind.SEGMENTS_REPLACED,
        Kind.EVENT_SEGMENT,
        Kind.EVENT_SEGMENTS_REPLACED,
        Kind.SNAPSHOT,
    }
)
#: Events about files of sinks.
OF_SINKS: Final = frozenset({Kind.SINK_FILE, Kind.SINK_REPLACED})
#: Rows of one transaction: a row group of DuckDB.
_ROWS: Final = 122_880


class Cut(NamedTuple):
    """Where a log is cut: before the first frame that is later than a moment."""

    position: int
    #: Time of the last frame before it.
    at_ms: int
    #: Time of the first frame that was read; -1 if there is none.
    first_ms: int

    @classmethod
    def find(cls, log: CommitLog, *, start: int, at_ms: int | None) -> "Cut":
        """Read frames until one is later; None: until the end."""
        position, reached, first = start, 0, -1
        for end, sections in log.frames(start, log.end):
            time_ms = time_of(sections)
            if at_ms is not None and time_ms > at_ms:
                first = time_ms if first < 0 else first
                break
            position, reached = end, max(reached, time_ms)
            first = time_ms if first < 0 else first
        return cls(position, reached, first)


@contextmanager
def opened(home: Path, settings: Settings, *, dispatched: int = 0) -> Iterator[CommitLog]:
    """Open the log of a home that no broker has open."""
    found = CommitLog.open(
        home / LOG,
        schemas=SCHEMAS,
        file_bytes=settings.log_file_bytes,
        reserve_bytes=0,
        flush="async",
        dispatched_position=dispatched,
    )
    try:
        yield found
    finally:
        found.close()


def truncate(home: Path, position: int) -> None:
    """Drop all frames of a closed log from a position on."""
    log = home / LOG
    (log / MARK_FILE).unlink(missing_ok=True)
    for path in sorted(log.glob(f"*{log_file.SUFFIX}")):
        base = int(path.stem)
        if base and base >= position:
            path.unlink()
            continue
        end = frame.FILE_HEADER_BYTES + position - base
        if end < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(end)
                file.truncate(log_file.whole_pages(end + frame.HEADER_BYTES))


def derive(home: Path, settings: Settings, *, without: Collection[Kind]) -> int:
    """Apply the frames of the log that the database lacks; return the end of the log.

    Args:
        home: a home that no broker has open.
        settings: of its broker.
        without: kinds of events that are left out.
    """
    database = Database.open(home / FILE_NAME, memory_bytes=settings.duckdb_memory_bytes)
    try:
        with opened(home, settings, dispatched=database.dispatched) as log:
            some: list[Stretch] = []
            count = 0
            for stretch in Stretches(log).between(database.dispatched, log.end):
                some.append(_without(stretch, without))
                count += sum(rows.batch.num_rows for rows in stretch.rows)
                if count >= _ROWS:
                    database.dispatch(some)
                    some, count = [], 0
            database.dispatch(some)
            return log.end
    finally:
        database.close()


def _without(stretch: Stretch, kinds: Collection[Kind]) -> Stretch:
    return Stretch(
        stretch.end,
        [_kept(rows, kinds) if rows.kind == EVENTS else rows for rows in stretch.rows],
    )


def _kept(rows: Rows, without: Collection[Kind]) -> Rows:
    """Return the events of other kinds."""
    kinds = rows.batch.column("kind").to_numpy()
    keep = ~np.isin(kinds, np.array(sorted(without)))
    if keep.all():
        return rows
    section = np.repeat(np.arange(len(rows.counts)), rows.counts)
    counts = np.bincount(section[keep], minlength=len(rows.counts)).tolist()
    return rows._replace(batch=rows.batch.filter(pa.array(keep)), counts=counts)
