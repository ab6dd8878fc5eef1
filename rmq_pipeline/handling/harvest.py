"""What counts of a walk's calls: rows, states and messages gathered into one table each."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from rmq_pipeline.handling.returned import Published, Result

_MERGED_AT_ONCE: Final = 256

#: What is not simply acked; ``row`` is the message's place in the table walked. "release": given
#: back untried, because an earlier message of its group failed.
EXCEPTION: Final = pa.schema(
    [
        ("row", pa.int32()),
        ("outcome", pa.string()),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
    ]
)

_Row = tuple[int, str, int | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk leaves to settle. Every message without an exception is acked."""

    rows: pa.Table | None
    #: ``message_group``, ``removed`` and the state's columns; a row per group that changed.
    state: pa.Table | None
    publish: dict[str, pa.Table]
    exceptions: pa.Table


class Effects(NamedTuple):
    """What one call did, checked. A tuple: one is made for each call."""

    rows: pa.Table | None
    state: pa.Table | None
    publish: list[Published]
    results: list[Result]


class _Pile:
    """Many small tables of one schema, made one.

    Small ones are merged while they are still in the processor's cache: a hundred thousand of them
    kept until the end scatter the heap, and the calls in between take twice as long.
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
        """All of it in few chunks; something was added."""
        if self._small:
            self._merge()
        return pa.concat_tables(self._merged)


class Harvest:
    """What counts so far, as lists of the tables that the calls returned."""

    def __init__(self) -> None:
        self._rows = _Pile()
        self._state = _Pile()
        self._state_rows: list[int] = []
        self._removed: list[bool] = []
        self._publish: dict[str, _Pile] = {}
        self._exceptions: list[_Row] = []

    def keep(self, effects: Effects, *, group_row: int | None) -> None:
        """Count the rows, messages and state of a call."""
        if effects.rows is not None:
            self._rows.add(effects.rows)
        for topic, table in effects.publish:
            self._publish.setdefault(topic, _Pile()).add(table)
        if effects.state is not None and group_row is not None:
            self.changed_state(effects.state, group_row=group_row)

    def keep_with_results(self, effects: Effects, *, group_row: int | None, start: int) -> None:
        """Count a call, but nothing of a single message that is retried."""
        results = effects.results
        if not any(r.outcome == "retry" for r in results):
            self.keep(effects, group_row=group_row)
        for r in results:
            self._exceptions.append((start + r.place, r.outcome, r.retry_after_ms, r.reason, None))

    def keep_single(self, effects: Effects, *, row: int) -> bool:
        """Count the call of one message, state aside; whether it is to be retried."""
        retried = any(r.outcome == "retry" for r in effects.results)
        if not retried:
            self.keep(effects, group_row=None)
        for r in effects.results:
            self._exceptions.append((row, r.outcome, r.retry_after_ms, r.reason, None))
        return retried

    def changed_state(self, state: pa.Table, *, group_row: int) -> None:
        """Note a group's state; ``group_row`` is a row of one of its messages."""
        self._state.add(state)
        self._state_rows.append(group_row)
        self._removed.append(not state.num_rows)

    def failed(self, row: int, reason: str, *, error_type: str) -> None:
        """Note that a message's call failed; its group's backoff says when it comes again."""
        self._exceptions.append((row, "retry", None, reason, error_type))

    def release(self, start: int, stop: int) -> None:
        """Give messages back untried."""
        self._exceptions.extend((row, "release", None, None, None) for row in range(start, stop))

    def gathered(self, groups: pa.ChunkedArray | None) -> Walked:
        """Everything as one table a kind."""
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
        # A removed state is a table of no rows: its place becomes a row of nulls.
        own = self._state.table()
        removed = np.array(self._removed)
        if removed.any():
            places = pa.array(np.cumsum(~removed) - 1, mask=removed)
            own = own.take(places) if own.num_rows else _nulls(own.schema, len(removed))
        named = own.add_column(0, "message_group", groups.take(pa.array(self._state_rows)))
        return named.add_column(1, "removed", pa.array(removed))


def _nulls(schema: pa.Schema, n: int) -> pa.Table:
    return pa.table([pa.nulls(n, f.type) for f in schema], names=schema.names)
