"""A micro-batch: received messages in the order of the walk, divided into parts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.handling.group_walk import group_starts
from rmq_pipeline.handling.handler import MESSAGES
from rmq_pipeline.handling.results import MessageFailure
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, SEEN_BEFORE

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of whole message groups, and the bounds of the parts."""

    number: int
    #: schema.RECEIVED; with order, each message group is contiguous and sorted by offset. If the
    #: consumer has an idempotency key, idempotency.mark has added its columns.
    received: pa.Table
    #: len(parts) + 1 row numbers; no message group is in two parts.
    bounds: list[int]

    @property
    def parts(self) -> int:
        """Number of parts, which is the number of tasks."""
        return len(self.bounds) - 1

    def halves(self, *, number: int, ordered: bool) -> list["Batch"]:
        """Return two batches of one part; the first must be settled before the second begins.

        Message groups stay whole, unless there is only one.
        """
        made = cut(self.received, number=number, batches=2, parts=1, ordered=ordered)
        if len(made) == 2:
            return made
        n = self.received.num_rows
        middle = n // 2
        return [
            Batch(number, self.received.slice(0, middle), [0, middle]),
            Batch(number + 1, self.received.slice(middle), [0, n - middle]),
        ]

    def goes_on_in(self, following: "Batch") -> bool:
        """Return True if this batch ends with the message group with which the other begins."""
        last, first = self.received["message_group"][-1], following.received["message_group"][0]
        return bool(last.is_valid and last.equals(first))

    def message_groups(self) -> pa.Table:
        """Return each message group once, in the column message_group."""
        found = pc.drop_null(pc.unique(self.received["message_group"]))
        return pa.table({"message_group": found})

    def given(self, state: pa.Table | None) -> list[tuple[pa.Table, pa.Table | None]]:
        """Return the messages of each part, and the state of their groups if any has state."""
        marked = [SEEN_BEFORE.name] if SEEN_BEFORE.name in self.received.column_names else []
        messages = self.received.select([*MESSAGES.names, *marked])
        spans = list(zip(self.bounds[:-1], self.bounds[1:], strict=True))
        mine = [messages.slice(start, stop - start) for start, stop in spans]
        if state is None:
            return [(each, None) for each in mine]
        # For each state, the first row of its group: parts are ranges of these rows.
        begins = pc.index_in(state["message_group"], messages["message_group"]).to_numpy()
        order = np.argsort(begins, kind="stable")
        state = state.take(pa.array(order))
        at = np.searchsorted(begins[order], self.bounds)
        return [
            (each, state.slice(start, stop - start))
            for each, start, stop in zip(mine, at[:-1], at[1:], strict=True)
        ]

    def outcomes(self, exceptions: dict[int, pa.Table], *, run_id: str) -> pa.Table:
        """Return the outcomes to settle: those of all messages but the released ones.

        Args:
            exceptions: part -> results.EXCEPTION, with rows counted from the start of the part.
            run_id: the run that saw the failures.

        Returns:
            schema.OUTCOME.
        """
        n = self.received.num_rows
        receipts = self.received["receipt_handle"]
        shifted = [_shifted(t, self.bounds[part]) for part, t in sorted(exceptions.items())]
        found = pa.concat_tables(shifted) if shifted else None
        if found is None or not found.num_rows:
            columns = [
                receipts,
                pa.repeat("ack", n),
                pa.nulls(n, pa.int64()),
                *(pa.nulls(n, pa.string()) for _ in range(3)),
                self._keys(),
                pa.nulls(n, pa.string()),
            ]
            return pa.table(columns, schema=schema.OUTCOME)
        # For each row the number of its exception, null if it has none.
        place = np.full(n, -1, dtype=np.int64)
        place[found["row"].to_numpy()] = np.arange(found.num_rows)
        at = pa.array(place, mask=place < 0)
        outcome = found["outcome"].take(at).fill_null("ack")
        said = [found[name].take(at) for name in ("retry_after_ms", "reason", "error_type")]
        where = found["traceback"].take(at)
        columns = [receipts, outcome, *said, pa.repeat(run_id, n), self._keys(), where]
        return pa.table(columns, schema=schema.OUTCOME).filter(pc.not_equal(outcome, "release"))

    def failures(self, exceptions: dict[int, pa.Table]) -> list[MessageFailure]:
        """Return one failure of each kind that a part has, with its traceback."""
        shifted = [_shifted(t, self.bounds[part]) for part, t in sorted(exceptions.items())]
        first = [
            row
            for table in shifted
            if table["traceback"].null_count < table.num_rows
            for row in table.filter(pc.is_valid(table["traceback"])).to_pylist()
        ]
        ids = self.received["message_id"]
        return [
            MessageFailure(
                message_id=ids[row["row"]].as_py(),
                reason=row["reason"],
                error_type=row["error_type"],
                traceback=row["traceback"],
            )
            for row in first
        ]

    def _keys(self) -> pa.Array | pa.ChunkedArray:
        """Return the idempotency key of each message."""
        if IDEMPOTENCY_KEY.name in self.received.column_names:
            return self.received[IDEMPOTENCY_KEY.name]
        return pa.nulls(self.received.num_rows, pa.string())


def _shifted(exceptions: pa.Table, by: int) -> pa.Table:
    row = pc.add(exceptions["row"].cast(pa.int64()), by)
    return exceptions.set_column(0, "row", row)


def cut(received: pa.Table, *, number: int, batches: int, parts: int, ordered: bool) -> list[Batch]:
    """Sort received messages for the walk, and divide them into batches of whole message groups.

    Args:
        received: schema.RECEIVED, at least one row.
        number: number of the first batch.
        batches: maximum number of batches.
        parts: maximum number of parts of a batch.
        ordered: keep message groups together, each sorted by offset.
    """
    rows, starts = _sorted(received) if ordered else (received, np.arange(received.num_rows))
    bounds = _even(starts, rows.num_rows, pieces=batches * parts)
    made: list[Batch] = []
    for first in range(0, len(bounds) - 1, parts):
        mine = bounds[first : first + parts + 1]
        piece = rows.slice(mine[0], mine[-1] - mine[0])
        made.append(Batch(number + len(made), piece, [b - mine[0] for b in mine]))
    return made


def _sorted(received: pa.Table) -> tuple[pa.Table, Int64s]:
    received = received.combine_chunks()
    groups = received["message_group"].combine_chunks().dictionary_encode().indices
    codes = pc.fill_null(groups, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    # Messages without a message group are unordered, so they are distributed.
    alone = np.flatnonzero(codes < 0)
    codes[alone] = received.num_rows + alone
    keys = (received["queue_offset"].to_numpy(), received["queue_id"].to_numpy(), codes)
    order = np.lexsort(keys)
    if np.any(np.diff(order) != 1):
        received = received.take(pa.array(order)).combine_chunks()
    return received, group_starts(received["message_group"])


def _even(starts: Int64s, n: int, *, pieces: int) -> list[int]:
    """Return bounds of at most ``pieces`` similar pieces; each begins with a message group."""
    wanted = np.arange(1, pieces) * n // pieces
    at = np.searchsorted(starts, wanted)
    inner = starts[at[at < len(starts)]]
    return [int(b) for b in np.unique(np.concatenate(([0], inner, [n])))]
