"""The read-ahead of a message queue: where its messages lie and what a receive asks of them."""

from dataclasses import dataclass

import numpy as np

from rmq_pipeline.message import Int32s, Int64s

PAGE_ROWS = 2048
#: Pages that one load brings in.
LOAD_PAGES = 16


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Consecutive rows of a queue from offset ``base`` on."""

    base: int
    #: Position in the commit log of the section that holds the message, and its row there.
    position: Int64s
    row: Int32s
    message_group_hash: Int64s
    tag_hash: Int64s

    def __len__(self) -> int:
        return len(self.position)

    def first(self, n: int) -> "IndexRows":
        """The first rows."""
        if n >= len(self):
            return self
        return IndexRows(
            self.base,
            self.position[:n],
            self.row[:n],
            self.message_group_hash[:n],
            self.tag_hash[:n],
        )


class _Page:
    """Up to PAGE_ROWS rows, of which [low, high) are filled."""

    __slots__ = ("group", "high", "low", "position", "row", "tag", "used")

    def __init__(self, low: int) -> None:
        self.low = self.high = low
        self.used = 0
        self.position = np.empty(PAGE_ROWS, np.int64)
        self.row = np.empty(PAGE_ROWS, np.int32)
        self.group = np.empty(PAGE_ROWS, np.int64)
        self.tag = np.empty(PAGE_ROWS, np.int64)

    def put(self, at: int, rows: IndexRows, *, start: int, stop: int) -> None:
        """Take over rows[start:stop] from place ``at`` on."""
        end = at + stop - start
        self.position[at:end] = rows.position[start:stop]
        self.row[at:end] = rows.row[start:stop]
        self.group[at:end] = rows.message_group_hash[start:stop]
        self.tag[at:end] = rows.tag_hash[start:stop]


class QueueIndex:
    """Pages of one queue; those that dispatch has reached may be dropped and loaded again."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._tick = 0

    @property
    def pages(self) -> int:
        """How many pages are held."""
        return len(self._pages)

    def append(self, rows: IndexRows) -> None:
        """Add what was just published at the end of the queue."""
        done = 0
        while done < len(rows):
            number, at = divmod(rows.base + done, PAGE_ROWS)
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page(at)
            stop = min(len(rows), done + PAGE_ROWS - at)
            page.put(at, rows, start=done, stop=stop)
            page.high = at + stop - done
            done = stop

    def fill(self, rows: IndexRows) -> None:
        """Put in rows that were loaded; they begin at a page, or at what a page lacks.

        Rows that another load put in meanwhile are the same rows: putting them in again is no harm.
        """
        done = 0
        while done < len(rows):
            number, at = divmod(rows.base + done, PAGE_ROWS)
            stop = min(len(rows), done + PAGE_ROWS - at)
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page(at)
            page.put(at, rows, start=done, stop=stop)
            page.low = min(page.low, at)
            page.high = max(page.high, at + stop - done)
            done = stop

    def get(self, offset: int, stop: int) -> IndexRows | None:
        """Rows from ``offset`` on, to ``stop`` or the end of a page; None when not held."""
        number, at = divmod(offset, PAGE_ROWS)
        page = self._pages.get(number)
        if page is None or at < page.low or at >= page.high:
            return None
        self._tick += 1
        page.used = self._tick
        end = min(page.high, at + stop - offset)
        return IndexRows(
            offset, page.position[at:end], page.row[at:end], page.group[at:end], page.tag[at:end]
        )

    def missing(self, offset: int, stop: int) -> tuple[int, int]:
        """What to load so that ``get(offset, …)`` finds rows: some pages before ``stop``."""
        number, at = divmod(offset, PAGE_ROWS)
        page = self._pages.get(number)
        start = number * PAGE_ROWS
        if page is not None and at >= page.high:
            start += page.high
        return start, min(stop, start + LOAD_PAGES * PAGE_ROWS)

    def drop(self, keep: int, dispatched: int) -> None:
        """Forget the pages used longest ago until ``keep`` are left.

        Only full ones whose messages lie before the log position ``dispatched``: those can be
        loaded again.
        """
        free = [
            (page.used, number)
            for number, page in self._pages.items()
            if page.high == PAGE_ROWS and page.position[-1] < dispatched
        ]
        for _, number in sorted(free)[: max(0, len(self._pages) - keep)]:
            del self._pages[number]

    def locate(self, offsets: Int64s) -> tuple[Int64s, Int32s]:
        """Position and row of messages anywhere in the queue; position -1 where none is held."""
        position = np.full(len(offsets), -1, dtype=np.int64)
        row = np.zeros(len(offsets), dtype=np.int32)
        numbers = offsets // PAGE_ROWS
        for number in np.unique(numbers).tolist():
            page = self._pages.get(number)
            if page is None:
                continue
            at = offsets - number * PAGE_ROWS
            here = np.flatnonzero((numbers == number) & (at >= page.low) & (at < page.high))
            position[here] = page.position[at[here]]
            row[here] = page.row[at[here]]
        return position, row
