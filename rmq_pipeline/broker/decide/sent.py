"""Answer of a send: the places of its messages."""

import functools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import receipt, schema
from rmq_pipeline.message import Int32s, Int64s, hash64
from rmq_pipeline.receipt import RecallHandles
from rmq_pipeline.tables import nulls, numbers

Mask = npt.NDArray[np.bool_]

#: Longest column of False values that is cached.
_KEPT_ROWS: Final = 1024


@dataclass(frozen=True, slots=True)
class Sent:
    """Places of messages, in the order of the send."""

    message_id: pa.Array
    queue_id: Int32s
    queue_offset: Int64s
    #: Mask of messages that wait in SCHEDULE_TOPIC_XXXX; and the topic they are sent to.
    later: Mask | None = None
    topic_id: int = 0
    #: Mask of repetitions, which were not stored and have their original's place; None: there are
    #: none.
    duplicate: Mask | None = None
    #: Mask of repetitions whose message id differs from their original's.
    unnamed: Mask | None = None

    def table(self) -> pa.Table:
        """Return the answer as schema.SENT."""
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
        """Return the answer with these ids for the ``unnamed`` rows."""
        assert self.unnamed is not None
        ids = pc.replace_with_mask(self.message_id, pa.array(self.unnamed), message_id)
        return replace(self, message_id=ids, unnamed=None)

    def _recall_handles(self) -> pa.Array:
        n = len(self.queue_id)
        if self.later is None or not self.later.any():
            return nulls(n, pa.string())
        handles = receipt.encode_recall(
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
