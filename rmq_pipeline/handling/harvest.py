"""Results of a walk: rows, states and published messages, gathered into one table each."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from rmq_pipeline.handling.failing import Failure
from rmq_pipeline.handling.returned import Published, Result

_MERGED_AT_ONCE: Final = 256

#: Messages that are not simply acked; ``row`` is the row in the walked table. "release": not tried,
#: because an earlier message of its group failed.
EXCEPTION: Final = pa.schema(
    [
        ("row", pa.int32()),
        ("outcome", pa.string()),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        # Only for the first of similar failures, so a failing batch has one traceback and not
        # thousands.
        ("traceback", pa.string()),
    ]
)

_Row = tuple[int, str, int | None, str | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class Walked:
    """Result of a walk, to be settled. Every message without an exception is acked."""

    rows: pa.Table | None
    #: ``message_group``, ``removed`` and the state's columns; one row per changed group.
    state: pa.Table | None
    publish: dict[str, pa.Table]
    exceptions: pa.Table


class Effects(NamedTuple):
    """Validated result of one call. A tuple, because one is created for each call."""

    rows: pa.Table | None
    state: pa.Table | None
    publish: list[Published]
    results: list[Result]


class _Pile:
    """Accumulates many small tables of one schema into one table.

    Small tables are merged while they are still in the processor's cache. A hundred thousand tables
    kept to the end would fragment the heap, and double the time of handler calls.
    """

    def __init__(self) -> None:
        self._small: list[pa.Table] = []
        self._merged: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        self._small.append(table)
        if len(self._small) == _MERGED_AT_ONCE:
            self._merge()

    def _merge(self) -> None:
        self._merged.append(pa.concat_tables(self._small).combine_chunks())
        self._small.clear()

    def __bool__(self) -> bool:
        return bool(self._small or self._merged)

    def table(self) -> pa.Table:
        """Return all rows in few chunks; at least one table must have been added."""
        if self._small:
            self._merge()
        return pa.concat_tables(self._merged)


class Harvest:
    """Results so far, as lists of the tables that the calls returned."""

    def __init__(self) -> None:
        self._rows = _Pile()
        self._state = _Pile()
        self._state_rows: list[int] = []
        self._removed: list[bool] = []
        self._publish: dict[str, _Pile] = {}
        self._exceptions: list[_Row] = []
        self._signatures: set[str] = set()

    def keep(self, effects: Effects, *, group_row: int | None) -> None:
        """Add the rows, messages and state of a call."""
        if effects.rows is not None:
            self._rows.add(effects.rows)
        for topic, table in effects.publish:
            self._publish.setdefault(topic, _Pile()).add(table)
        if effects.state is not None and group_row is not None:
            self.changed_state(effects.state, group_row=group_row)

    def keep_with_results(self, effects: Effects, *, group_row: int | None, start: int) -> None:
        """Add a call and its results; drop its output if a message is retried."""
        results = effects.results
        if not any(r.outcome == "retry" for r in results):
            self.keep(effects, group_row=group_row)
        for r in results:
            self._exceptions.append(
                (start + r.place, r.outcome, r.retry_after_ms, r.reason, None, None)
            )

    def keep_single(self, effects: Effects, *, row: int) -> bool:
        """Add the call of one message without its state; return True if the message is retried."""
        retried = any(r.outcome == "retry" for r in effects.results)
        if not retried:
            self.keep(effects, group_row=None)
        for r in effects.results:
            self._exceptions.append((row, r.outcome, r.retry_after_ms, r.reason, None, None))
        return retried

    def changed_state(self, state: pa.Table, *, group_row: int) -> None:
        """Add a group's new state; ``group_row`` is the row of one of its messages."""
        self._state.add(state)
        self._state_rows.append(group_row)
        self._removed.append(not state.num_rows)

    def failed(self, row: int, failure: Failure) -> None:
        """Record that a message's call failed; the group's backoff delays its redelivery."""
        where = None
        if failure.signature not in self._signatures:
            self._signatures.add(failure.signature)
            where = failure.traceback() or None
        self._exceptions.append((row, "retry", None, failure.reason, failure.error_type, where))

    def release(self, start: int, stop: int) -> None:
        """Release messages that were not tried."""
        self._exceptions.extend(
            (row, "release", None, None, None, None) for row in range(start, stop)
        )

    def gathered(self, groups: pa.ChunkedArray | None) -> Walked:
        """Return all results as one table per kind."""
        columns = (
            zip(*self._exceptions, strict=True) if self._exceptions else ((),) * len(EXCEPTION)
        )
        return Walked(
            rows=self._rows.table() if self._rows else None,
            state=self._state_table(groups) if groups is not None and self._state else None,
            publish={t: p.table() for t, p in self._publish.items()},
            exceptions=pa.table(
                [pa.array(c, f.type) for c, f in zip(columns, EXCEPTION, strict=True)],
                schema=EXCEPTION,
            ),
        )

    def _state_table(self, groups: pa.ChunkedArray) -> pa.Table:
        # A removed state is a table without rows, and becomes a row of nulls.
        own = self._state.table()
        removed = np.array(self._removed)
        if removed.any():
            places = pa.array(np.cumsum(~removed) - 1, mask=removed)
            own = own.take(places) if own.num_rows else _nulls(own.schema, len(removed))
        named = own.add_column(0, "message_group", groups.take(pa.array(self._state_rows)))
        return named.add_column(1, "removed", pa.array(removed))


def _nulls(schema: pa.Schema, n: int) -> pa.Table:
    return pa.table([pa.nulls(n, f.type) for f in schema], names=schema.names)
