"""Answer of a send: the places of its messages, and of those that repetitions repeat."""

import functools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.state.duplicates import Known, Repetitions
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


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repetitions in a send."""

    #: Messages that repeat one stored before, and those stored ones.
    stored: Mask
    known: Known
    #: Row in this send that each message repeats; its own row if it repeats none.
    first: Int64s
    #: True if a repetition may have another message id than its original.
    by_key: bool

    def all(self) -> Mask:
        """Return the mask of messages that must not be stored."""
        repeated: Mask = self.stored | (self.first != np.arange(len(self.first)))
        return repeated

    def completed(self, sent: Sent, *, message_id: pa.Array) -> Sent:
        """Return the answer for the whole send, given that of its stored messages.

        Args:
            message_id: column of the whole send.
        """
        repeated = self.all()
        n = len(repeated)
        rank = np.cumsum(~repeated) - 1
        source = rank[self.first]  # arbitrary for a repetition of a stored one: overwritten below
        queue_id, offset = self.known.queue_id(), self.known.queue_offset()
        later = self.known.scheduled()
        new = ~self.stored
        if new.any():
            queue_id[new] = sent.queue_id[source[new]]
            offset[new] = sent.queue_offset[source[new]]
            later[new] = sent.later[source[new]] if sent.later is not None else False
            rows = np.where(new, self.first, np.arange(n))
            message_id = message_id.take(pa.array(rows))
        return Sent(
            message_id,
            queue_id,
            offset,
            later,
            sent.topic_id,
            repeated,
            self.stored if self.by_key and self.stored.any() else None,
        )


def repeats_of(known: Repetitions, identity: Int64s, *, now_ms: int) -> Repeats | None:
    """Return the repetitions among these messages; None if there are none."""
    stored, rows = known.find(identity, now_ms)
    n = len(identity)
    own = np.arange(n)
    first = own
    if n > 1:
        _, firsts, inverse = np.unique(identity, return_index=True, return_inverse=True)
        first = np.where(identity == 0, own, firsts[inverse])
    # A message that repeats an earlier row also repeats the stored message of that row.
    repeats = Repeats(stored, rows, first, known.deduplicate == "key")
    return repeats if repeats.all().any() else None
