"""Read-ahead of a message queue: the index columns of its messages, in memory."""

from dataclasses import dataclass

import numpy as np

from rmq_pipeline.message import Int32s, Int64s

PAGE_ROWS = 2048
#: Pages that one load reads.
LOAD_PAGES = 16


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Index rows of consecutive messages of a queue, from offset ``base`` on."""

    base: int
    #: Position of the section in the commit log, and the row in it.
    position: Int64s
    row: Int32s
    message_group_hash: Int64s
    tag_hash: Int64s

    def __len__(self) -> int:
        return len(self.position)

    def first(self, n: int) -> "IndexRows":
        """Return the first ``n`` rows."""
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
    """Page of PAGE_ROWS rows, of which [low, high) are filled."""

    __slots__ = ("group", "high", "low", "position", "row", "tag", "used")

    def __init__(self, low: int) -> None:
        self.low = self.high = low
        self.used = 0
        self.position = np.empty(PAGE_ROWS, np.int64)
        self.row = np.empty(PAGE_ROWS, np.int32)
        self.group = np.empty(PAGE_ROWS, np.int64)
        self.tag = np.empty(PAGE_ROWS, np.int64)

    def put(self, at: int, rows: IndexRows, *, start: int, stop: int) -> None:
        """Copy rows[start:stop] to row ``at`` and after."""
        end = at + stop - start
        self.position[at:end] = rows.position[start:stop]
        self.row[at:end] = rows.row[start:stop]
        self.group[at:end] = rows.message_group_hash[start:stop]
        self.tag[at:end] = rows.tag_hash[start:stop]


class QueueIndex:
    """Pages of one queue. Pages that are dispatched may be dropped and loaded again."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._tick = 0

    @property
    def pages(self) -> int:
        """Number of pages in memory."""
        return len(self._pages)

    def append(self, rows: IndexRows) -> None:
        """Add rows that were just published, at the end of the queue."""
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
        """Add rows that were loaded; they start at a page, or at the first missing row of one.

        Two loads may add the same rows; the second has no effect, because rows never change.
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
        """Return rows from ``offset`` to ``stop`` or the end of a page.

        The result is None if the rows are not in memory.
        """
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
        """Return the range to load so that ``get(offset, …)`` finds rows.

        The range covers up to LOAD_PAGES pages and ends at ``stop`` at most.
        """
        number, at = divmod(offset, PAGE_ROWS)
        page = self._pages.get(number)
        start = number * PAGE_ROWS
        if page is not None and at >= page.high:
            start += page.high
        return start, min(stop, start + LOAD_PAGES * PAGE_ROWS)

    def drop(self, keep: int, dispatched: int) -> None:
        """Drop the least recently used pages until ``keep`` are left.

        Only full pages before the log position ``dispatched`` are dropped: those can be loaded
        again.
        """
        free = [
            (page.used, number)
            for number, page in self._pages.items()
            if page.high == PAGE_ROWS and page.position[-1] < dispatched
        ]
        for _, number in sorted(free)[: max(0, len(self._pages) - keep)]:
            del self._pages[number]

    def behind(self, position: int, *, stop: int) -> IndexRows:
        """Return all rows before offset ``stop`` and at or after a dispatched log position.

        Rows that dispatch has not reached are never dropped. After a start, a page may have only
        the rows that came since: those before it are dispatched.
        """
        pages: list[tuple[_Page, slice]] = []
        base = stop
        while base and (page := self._pages.get((base - 1) // PAGE_ROWS)) is not None:
            start = (base - 1) // PAGE_ROWS * PAGE_ROWS
            high = base - start
            if not page.low < high <= page.high:
                break
            low = page.low + int(np.searchsorted(page.position[page.low : high], position))
            pages.insert(0, (page, slice(low, high)))
            base = start + low
            if low:
                break
        return IndexRows(
            base,
            np.concatenate([np.empty(0, np.int64), *(p.position[at] for p, at in pages)]),
            np.concatenate([np.empty(0, np.int32), *(p.row[at] for p, at in pages)]),
            np.concatenate([np.empty(0, np.int64), *(p.group[at] for p, at in pages)]),
            np.concatenate([np.empty(0, np.int64), *(p.tag[at] for p, at in pages)]),
        )

    def locate(self, offsets: Int64s) -> tuple[Int64s, Int32s]:
        """Return position and row of messages anywhere in the queue.

        The position of a missing one is -1.
        """
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


@dataclass(frozen=True, slots=True)
class Places:
    """Places of n messages: section position and row."""

    position: Int64s
    row: Int32s

    def __len__(self) -> int:
        return len(self.position)
