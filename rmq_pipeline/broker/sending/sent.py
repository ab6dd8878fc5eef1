"""What a send is answered: where its messages went."""

import functools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import recall_handle, schema
from rmq_pipeline.message import Int32s, Int64s, hash64
from rmq_pipeline.recall_handle import RecallHandles
from rmq_pipeline.tables import nulls, numbers

Mask = npt.NDArray[np.bool_]

#: Columns up to this length that say no are made once.
_KEPT_ROWS: Final = 1024


@dataclass(frozen=True, slots=True)
class Sent:
    """Where messages went, in the order they were given."""

    message_id: pa.Array
    queue_id: Int32s
    queue_offset: Int64s
    #: Which wait for their time in SCHEDULE_TOPIC_XXXX, and the topic that they are for.
    later: Mask | None = None
    topic_id: int = 0
    #: Which were not stored, because they repeat another one, whose place it is; None: none.
    duplicate: Mask | None = None
    #: Which of those have an id that is not that of the one they repeat.
    unnamed: Mask | None = None

    def table(self) -> pa.Table:
        """As schema.SENT."""
        n = len(self.queue_id)
        columns = [
            self.message_id,
            numbers(self.queue_id),
            numbers(self.queue_offset),
            self._recall_handles(),
            _false(n) if self.duplicate is None else pa.array(self.duplicate),
        ]
        return pa.Table.from_arrays(columns, schema=schema.SENT)

    def named(self, message_id: pa.Array) -> "Sent":
        """With these ids in place of those that are not of the messages stored."""
        assert self.unnamed is not None
        ids = pc.replace_with_mask(self.message_id, pa.array(self.unnamed), message_id)
        return replace(self, message_id=ids, unnamed=None)

    def _recall_handles(self) -> pa.Array:
        n = len(self.queue_id)
        if self.later is None or not self.later.any():
            return nulls(n, pa.string())
        handles = recall_handle.encode(
            RecallHandles(
                np.full(n, self.topic_id, dtype=np.int32),
                self.queue_id,
                self.queue_offset,
                hash64(self.message_id),
            )
        )
        return pc.if_else(pa.array(self.later), handles, pa.scalar(None, pa.string()))


def _false(n: int) -> pa.Array:
    return _kept_false(n) if n <= _KEPT_ROWS else pa.array(np.zeros(n, dtype=np.bool_))


@functools.lru_cache(maxsize=64)
def _kept_false(n: int) -> pa.Array:
    return pa.array(np.zeros(n, dtype=np.bool_))
