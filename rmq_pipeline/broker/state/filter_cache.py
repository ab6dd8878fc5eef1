"""Filters of receives: tag hashes, or a cache of SQL92 filter results.

The writer never reads a message to decide. It looks up filter results for rows of the read-ahead.
For SQL92 the cache holds the results of ``filtering.judge``. At a row without a result the receive
stops, and its caller evaluates the condition.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state.queue_index import PAGE_ROWS, IndexRows
from rmq_pipeline.filter.expression import SqlFilter
from rmq_pipeline.message import Int64s

Mask: TypeAlias = npt.NDArray[np.bool_]

#: Most pages of filter results in the cache: one byte a row, 8 MiB in all.
KEPT_PAGES: Final = 4096
#: Most rows of a queue evaluated ahead of a receive's cursor.
AHEAD_ROWS: Final = 32 * PAGE_ROWS


class QueueFilter(Protocol):
    """Filter on one queue."""

    @property
    def ahead(self) -> int:
        """Number of rows to evaluate ahead of the cursor."""
        ...

    def results(self, rows: IndexRows) -> Mask:
        """Return the filter results of the first rows, as many as are known; True: deliver."""
        ...


@dataclass(frozen=True, slots=True)
class TagHashFilter:
    """Filter by tags."""

    hashes: Int64s
    ahead: int = 0

    def of(self, topic_id: int, queue_id: int) -> QueueFilter:
        """Return the filter for a queue: it is the same on each."""
        return self

    def results(self, rows: IndexRows) -> Mask:
        """Return the filter results of all rows."""
        return np.isin(rows.tag_hash, self.hashes)


class _Key(NamedTuple):
    expression: str
    topic_id: int
    queue_id: int
    #: Number of the page: offset // PAGE_ROWS.
    number: int


class _Page(NamedTuple):
    #: Row in the page of the first value in ``wanted``.
    low: int
    wanted: Mask

    def joined(self, other: "_Page") -> "_Page":
        """Return this page extended by ``other``, or ``other`` alone if it does not continue it."""
        end = self.low + len(self.wanted)
        if not self.low <= other.low <= end:
            return other
        if other.low + len(other.wanted) <= end:
            return self
        return _Page(self.low, np.concatenate([self.wanted[: other.low - self.low], other.wanted]))


class FilterResults:
    """LRU cache of the results of all SQL filters, page by page; safe for all threads.

    Messages never change, so results stay valid. One exception: a failed write frees its offsets,
    and other messages may get them. Then ``clear`` drops all results, and results still being
    computed belong to an older ``generation`` and are dropped too.
    """

    def __init__(self, pages: int = KEPT_PAGES) -> None:
        self.generation = 0
        self._most = pages
        self._lock = threading.Lock()
        self._pages: OrderedDict[_Key, _Page] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: _Key) -> _Page | None:
        """Return the known results of a page."""
        with self._lock:
            found = self._pages.get(key)
            if found is not None:
                self._pages.move_to_end(key)
            return found

    def put(self, key: _Key, page: _Page, *, generation: int) -> None:
        """Add results to the cache, unless ``generation`` is no longer the current one."""
        with self._lock:
            if generation != self.generation:
                return
            known = self._pages.get(key)
            self._pages[key] = page if known is None else known.joined(page)
            self._pages.move_to_end(key)
            while len(self._pages) > self._most:
                self._pages.popitem(last=False)

    def clear(self) -> None:
        """Drop all results: their offsets may be assigned again."""
        with self._lock:
            self.generation += 1
            self._pages.clear()


class CachedSqlFilter:
    """SQL92 filter of one receive.

    The receive's own latest results are held outside the cache, which may evict them.
    """

    def __init__(self, sql: SqlFilter, kept: FilterResults, *, ahead: int) -> None:
        self.sql = sql
        self.ahead = min(max(PAGE_ROWS, ahead), AHEAD_ROWS)
        self._kept = kept
        self._latest: dict[_Key, _Page] = {}
        self._generation = kept.generation

    def begin(self) -> None:
        """Drop results of an older generation. Call it before each submit of the receive."""
        if self._generation != self._kept.generation:
            self._generation = self._kept.generation
            self._latest.clear()

    def of(self, topic_id: int, queue_id: int) -> QueueFilter:
        """Return the filter for a queue."""
        return _Known(self, topic_id, queue_id)

    def results(self, topic_id: int, queue_id: int, *, rows: IndexRows) -> Mask:
        """Return the known filter results of the first rows."""
        number, at = divmod(rows.base, PAGE_ROWS)
        key = _Key(self.sql.expression, topic_id, queue_id, number)
        for page in (self._latest.get(key), self._kept.get(key)):
            if page is not None and page.low <= at < page.low + len(page.wanted):
                return page.wanted[at - page.low : at - page.low + len(rows)]
        return np.zeros(0, dtype=np.bool_)

    def learn(
        self, topic_id: int, judged: Sequence[tuple[int, IndexRows]], *, wanted: Mask
    ) -> None:
        """Store filter results of rows, in their order; evaluate more rows ahead next time."""
        self._latest.clear()
        done = 0
        for queue_id, rows in judged:
            number, low = divmod(rows.base, PAGE_ROWS)
            key = _Key(self.sql.expression, topic_id, queue_id, number)
            # A copy: a view would keep the results of all rows in memory.
            page = _Page(low, wanted[done : done + len(rows)].copy())
            self._latest[key] = page
            self._kept.put(key, page, generation=self._generation)
            done += len(rows)
        self.ahead = min(2 * self.ahead, AHEAD_ROWS)


@dataclass(frozen=True, slots=True)
class _Known:
    row_filter: CachedSqlFilter
    topic_id: int
    queue_id: int

    @property
    def ahead(self) -> int:
        return self.row_filter.ahead

    def results(self, rows: IndexRows) -> Mask:
        return self.row_filter.results(self.topic_id, self.queue_id, rows=rows)


ReceiveFilter: TypeAlias = TagHashFilter | CachedSqlFilter
