"""A micro-batch: received messages in the order of the walk, cut into parts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.handling.group_walk import group_starts
from rmq_pipeline.handling.handler import MESSAGES
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, SEEN_BEFORE

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of whole message groups, and where the parts begin and end."""

    number: int
    #: schema.RECEIVED; with order, groups adjacent and each by offset. Marked, where the consumer
    #: has an idempotency key.
    received: pa.Table
    #: len(parts) + 1 rows; no message group is in two parts.
    bounds: list[int]

    @property
    def parts(self) -> int:
        """How many tasks it makes."""
        return len(self.bounds) - 1

    def halves(self, *, number: int, ordered: bool) -> list["Batch"]:
        """Two batches of one part, the first to be settled before the second is begun.

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
        """Whether the last message group of this batch is the first one of the other."""
        last, first = self.received["message_group"][-1], following.received["message_group"][0]
        return bool(last.is_valid and last.equals(first))

    def message_groups(self) -> pa.Table:
        """Each message group once, in the column message_group."""
        found = pc.drop_null(pc.unique(self.received["message_group"]))
        return pa.table({"message_group": found})

    def given(self, state: pa.Table | None) -> list[tuple[pa.Table, pa.Table | None]]:
        """The messages of each part, and the state of their groups where there is any."""
        marked = [SEEN_BEFORE.name] if SEEN_BEFORE.name in self.received.column_names else []
        messages = self.received.select([*MESSAGES.names, *marked])
        spans = list(zip(self.bounds[:-1], self.bounds[1:], strict=True))
        mine = [messages.slice(start, stop - start) for start, stop in spans]
        if state is None:
            return [(each, None) for each in mine]
        # Where each state's group begins among the messages: parts are stretches of it.
        begins = pc.index_in(state["message_group"], messages["message_group"]).to_numpy()
        order = np.argsort(begins, kind="stable")
        state = state.take(pa.array(order))
        at = np.searchsorted(begins[order], self.bounds)
        return [
            (each, state.slice(start, stop - start))
            for each, start, stop in zip(mine, at[:-1], at[1:], strict=True)
        ]

    def outcomes(self, exceptions: dict[int, pa.Table], *, run_id: str) -> pa.Table:
        """What to settle: every message that is not to be given back untried.

        Args:
            exceptions: part -> harvest.EXCEPTION, rows counted from the part's beginning.
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
            ]
            return pa.table(columns, schema=schema.OUTCOME)
        # The place of a row's exception, null where there is none.
        place = np.full(n, -1, dtype=np.int64)
        place[found["row"].to_numpy()] = np.arange(found.num_rows)
        at = pa.array(place, mask=place < 0)
        outcome = found["outcome"].take(at).fill_null("ack")
        said = [found[name].take(at) for name in ("retry_after_ms", "reason", "error_type")]
        columns = [receipts, outcome, *said, pa.repeat(run_id, n), self._keys()]
        return pa.table(columns, schema=schema.OUTCOME).filter(pc.not_equal(outcome, "release"))

    def _keys(self) -> pa.Array | pa.ChunkedArray:
        """The idempotency key of each message."""
        if IDEMPOTENCY_KEY.name in self.received.column_names:
            return self.received[IDEMPOTENCY_KEY.name]
        return pa.nulls(self.received.num_rows, pa.string())


def _shifted(exceptions: pa.Table, by: int) -> pa.Table:
    row = pc.add(exceptions["row"].cast(pa.int64()), by)
    return exceptions.set_column(0, "row", row)


def cut(received: pa.Table, *, number: int, batches: int, parts: int, ordered: bool) -> list[Batch]:
    """Sort received messages for the walk and cut them into batches of whole message groups.

    Args:
        received: schema.RECEIVED, at least one row.
        number: of the first batch.
        batches: into how many, at most.
        parts: tasks of a batch, at most.
        ordered: keep message groups together, each by offset.
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
    # Messages without a group have no order among each other, and are spread.
    alone = np.flatnonzero(codes < 0)
    codes[alone] = received.num_rows + alone
    keys = (received["queue_offset"].to_numpy(), received["queue_id"].to_numpy(), codes)
    order = np.lexsort(keys)
    if np.any(np.diff(order) != 1):
        received = received.take(pa.array(order)).combine_chunks()
    return received, group_starts(received["message_group"])


def _even(starts: Int64s, n: int, *, pieces: int) -> list[int]:
    """Bounds of at most ``pieces`` pieces of about the same size, each of which begins a group."""
    wanted = np.arange(1, pieces) * n // pieces
    at = np.searchsorted(starts, wanted)
    inner = starts[at[at < len(starts)]]
    return [int(b) for b in np.unique(np.concatenate(([0], inner, [n])))]
