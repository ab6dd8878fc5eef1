"""What of a queue a receive wants: by tag hashes, or by verdicts that were found before.

The writer never reads a message to decide. It asks a sieve about rows of the read-ahead. For SQL92
the sieve knows what ``filtering.judge`` has found; where it knows nothing, the receive stops.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.stored.queue_index import PAGE_ROWS, IndexRows
from rmq_pipeline.filter.expression import SqlFilter
from rmq_pipeline.message import Int64s

Mask: TypeAlias = npt.NDArray[np.bool_]

#: Pages of verdicts that are kept, a byte a row: 8 MiB.
KEPT_PAGES: Final = 4096
#: Rows of a queue that are judged ahead of a receive's cursor, at most.
AHEAD_ROWS: Final = 32 * PAGE_ROWS


class QueueSieve(Protocol):
    """A filter on one queue."""

    @property
    def ahead(self) -> int:
        """How many rows to have judged ahead of the cursor."""
        ...

    def verdicts(self, rows: IndexRows) -> Mask:
        """Whether rows are wanted: of the first of them, as many as it knows of."""
        ...


@dataclass(frozen=True, slots=True)
class TagSieve:
    """Messages of some tags."""

    hashes: Int64s
    ahead: int = 0

    def of(self, topic_id: int, queue_id: int) -> QueueSieve:
        """The same on every queue."""
        return self

    def verdicts(self, rows: IndexRows) -> Mask:
        """It knows of all of them."""
        return np.isin(rows.tag_hash, self.hashes)


class _Key(NamedTuple):
    expression: str
    topic_id: int
    queue_id: int
    #: Of the page: offset // PAGE_ROWS.
    number: int


class _Page(NamedTuple):
    #: The first row of the page that ``wanted`` speaks of.
    low: int
    wanted: Mask

    def joined(self, other: "_Page") -> "_Page":
        """This one with what the other adds at its end; the other where they are apart."""
        end = self.low + len(self.wanted)
        if not self.low <= other.low <= end:
            return other
        if other.low + len(other.wanted) <= end:
            return self
        return _Page(self.low, np.concatenate([self.wanted[: other.low - self.low], other.wanted]))


class Verdicts:
    """Verdicts of all SQL filters, page by page; what was not asked for longest goes first.

    Messages never change, so a verdict holds for good. Only what a failed write has taken back may
    get its offsets again: then all are forgotten, and those on their way belong to an older
    ``generation``. For any thread.
    """

    def __init__(self, pages: int = KEPT_PAGES) -> None:
        self.generation = 0
        self._most = pages
        self._lock = threading.Lock()
        self._pages: OrderedDict[_Key, _Page] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, key: _Key) -> _Page | None:
        """What is known of a page."""
        with self._lock:
            found = self._pages.get(key)
            if found is not None:
                self._pages.move_to_end(key)
            return found

    def put(self, key: _Key, page: _Page, *, generation: int) -> None:
        """Keep verdicts that were asked for when it was this generation."""
        with self._lock:
            if generation != self.generation:
                return
            known = self._pages.get(key)
            self._pages[key] = page if known is None else known.joined(page)
            self._pages.move_to_end(key)
            while len(self._pages) > self._most:
                self._pages.popitem(last=False)

    def clear(self) -> None:
        """Forget all: offsets may be given again."""
        with self._lock:
            self.generation += 1
            self._pages.clear()


class SqlSieve:
    """Messages for which a condition is true; made for one receive.

    Its own latest verdicts are held beside the kept ones, which others may push out.
    """

    def __init__(self, sql: SqlFilter, kept: Verdicts, *, ahead: int) -> None:
        self.sql = sql
        self.ahead = min(max(PAGE_ROWS, ahead), AHEAD_ROWS)
        self._kept = kept
        self._latest: dict[_Key, _Page] = {}
        self._generation = kept.generation

    def begin(self) -> None:
        """To be called before the writer is asked: what is learned then is of that time."""
        if self._generation != self._kept.generation:
            self._generation = self._kept.generation
            self._latest.clear()

    def of(self, topic_id: int, queue_id: int) -> QueueSieve:
        """What is known of a queue."""
        return _Known(self, topic_id, queue_id)

    def verdicts(self, topic_id: int, queue_id: int, *, rows: IndexRows) -> Mask:
        """Whether rows of a page are wanted, as far as known."""
        number, at = divmod(rows.base, PAGE_ROWS)
        key = _Key(self.sql.expression, topic_id, queue_id, number)
        for page in (self._latest.get(key), self._kept.get(key)):
            if page is not None and page.low <= at < page.low + len(page.wanted):
                return page.wanted[at - page.low : at - page.low + len(rows)]
        return np.zeros(0, dtype=np.bool_)

    def learn(
        self, topic_id: int, judged: Sequence[tuple[int, IndexRows]], *, wanted: Mask
    ) -> None:
        """Take in verdicts on rows of queues, one after the other; look further next time."""
        self._latest.clear()
        done = 0
        for queue_id, rows in judged:
            number, low = divmod(rows.base, PAGE_ROWS)
            key = _Key(self.sql.expression, topic_id, queue_id, number)
            # A copy: a view would keep the verdicts on all rows.
            page = _Page(low, wanted[done : done + len(rows)].copy())
            self._latest[key] = page
            self._kept.put(key, page, generation=self._generation)
            done += len(rows)
        self.ahead = min(2 * self.ahead, AHEAD_ROWS)


@dataclass(frozen=True, slots=True)
class _Known:
    sieve: SqlSieve
    topic_id: int
    queue_id: int

    @property
    def ahead(self) -> int:
        return self.sieve.ahead

    def verdicts(self, rows: IndexRows) -> Mask:
        return self.sieve.verdicts(self.topic_id, self.queue_id, rows=rows)


Sieve: TypeAlias = TagSieve | SqlSieve
