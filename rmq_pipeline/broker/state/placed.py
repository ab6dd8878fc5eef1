"""Appended batches: messages with their offsets, as one section of the commit log."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state.event_rows import run_starts
from rmq_pipeline.broker.state.halves import Halves
from rmq_pipeline.broker.state.queue_index import IndexRows
from rmq_pipeline.broker.state.schedule import Scheduled
from rmq_pipeline.message import Int32s, Int64s, hash64

_FIRST_ROW: Final = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Placed:
    """Messages of one topic; their offsets are dense and ascending within each queue."""

    topic_id: int
    batch: pa.RecordBatch
    queue_id: Int32s
    queue_offset: Int64s
    message_group_hash: Int64s
    tag_hash: Int64s
    stored_at_ms: int
    #: Identities in a topic that suppresses repetitions; None: computed from the batch.
    identity: Int64s | None = None

    def index_rows(self, position: int) -> Iterator[tuple[int, IndexRows]]:
        """Yield each queue and the rows of its read-ahead."""
        if len(self.queue_id) == 1:
            yield int(self.queue_id[0]), self._only_row(position)
            return
        starts = run_starts(self.queue_id)
        queues = self.queue_id[starts].tolist()
        if len(set(queues)) < len(queues):
            for queue_id in set(queues):
                yield queue_id, self._rows(np.flatnonzero(self.queue_id == queue_id), position)
            return
        n = len(self.queue_id)
        positions, rows = np.full(n, position, dtype=np.int64), np.arange(n, dtype=np.int32)
        bases = self.queue_offset[starts].tolist()
        bounds = itertools.pairwise([*starts.tolist(), n])
        for queue_id, base, (start, stop) in zip(queues, bases, bounds, strict=True):
            yield (
                queue_id,
                IndexRows(
                    base,
                    positions[start:stop],
                    rows[start:stop],
                    self.message_group_hash[start:stop],
                    self.tag_hash[start:stop],
                ),
            )

    def _only_row(self, position: int) -> IndexRows:
        at = np.array([position], dtype=np.int64)
        base = int(self.queue_offset[0])
        return IndexRows(base, at, _FIRST_ROW, self.message_group_hash, self.tag_hash)

    def _rows(self, rows: Int64s, position: int) -> IndexRows:
        return IndexRows(
            int(self.queue_offset[rows[0]]),
            np.full(len(rows), position, dtype=np.int64),
            rows.astype(np.int32),
            self.message_group_hash[rows],
            self.tag_hash[rows],
        )

    def scheduled(self, position: int) -> Scheduled:
        """Return the rows as scheduled messages; only for the schedule topic."""
        n = len(self.queue_id)
        return Scheduled(
            self.batch.column("deliver_at_ms").to_numpy(),
            self.queue_id,
            self.queue_offset,
            np.full(n, position, dtype=np.int64),
            np.arange(n, dtype=np.int32),
            self.batch.column("target_topic_id").to_numpy(),
        )

    def add_to(self, halves: Halves, position: int) -> None:
        """Add the rows as half messages; only for the half topic."""
        target = self.batch.column("target_topic_id").to_numpy()
        rows = np.arange(len(self.queue_id), dtype=np.int32)
        halves.add(self.queue_offset, position=position, row=rows, target=target)


def from_batch(batch: pa.RecordBatch) -> Placed:
    """Return the batch of a message section of the log."""
    return Placed(
        batch.column("topic_id")[0].as_py(),
        batch,
        batch.column("queue_id").to_numpy(),
        batch.column("queue_offset").to_numpy(),
        batch.column("message_group_hash").to_numpy(),
        hash64(batch.column("tag")),
        batch.column("stored_at_ms")[batch.num_rows - 1].as_py(),
    )
