"""Answering messages that repeat another one with the place of the first."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.sending.duplicates import Known, Repetitions
from rmq_pipeline.broker.sending.sent import Sent
from rmq_pipeline.message import Int64s

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which messages of a send repeat another one."""

    #: That was stored before, and which it was.
    stored: Mask
    known: Known
    #: That stands in this send, and in which row it does; of others their own.
    first: Int64s
    #: Whether what repeats another one may have another id.
    by_key: bool

    def all(self) -> Mask:
        """Which are not to be stored."""
        repeated: Mask = self.stored | (self.first != np.arange(len(self.first)))
        return repeated

    def completed(self, sent: Sent, *, message_id: pa.Array) -> Sent:
        """The answer for the whole send, from that for what is not repeated of it.

        Args:
            message_id: of the whole send.
        """
        repeated = self.all()
        n = len(repeated)
        rank = np.cumsum(~repeated) - 1
        source = rank[self.first]  # of a stored one's repetition: any, it is overwritten
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
    """Which of these messages repeat another one; None when none does."""
    stored, rows = known.find(identity, now_ms)
    n = len(identity)
    own = np.arange(n)
    first = own
    if n > 1:
        _, firsts, inverse = np.unique(identity, return_index=True, return_inverse=True)
        first = np.where(identity == 0, own, firsts[inverse])
    # What repeats a message of this send that repeats a stored one repeats that one as well.
    repeats = Repeats(stored, rows, first, known.deduplicate == "key")
    return repeats if repeats.all().any() else None
