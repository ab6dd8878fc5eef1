"""Answering repetitions with the place of the message that they repeat."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.state.duplicates import Known, Repetitions
from rmq_pipeline.message import Int64s

Mask = npt.NDArray[np.bool_]


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
