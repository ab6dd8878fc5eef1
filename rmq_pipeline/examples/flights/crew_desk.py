"""The crew desk: a producer of transactions that crashes now and then, as real ones do.

For a batch of changes it sends half messages, notes the changes in its ledger, and ends the
transactions as noted. A crash in between leaves the half messages open: before the note they tell
of nothing that has happened, after it they tell of something that has. Nobody comes back to them;
the checker of the pipeline decides.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import BusyError
from rmq_pipeline.examples.flights import crews
from rmq_pipeline.examples.flights.ledger import ABANDONED, NOTE, Ledger
from rmq_pipeline.flight.client import Client

PRODUCER_GROUP: Final = "crew_desk"
BATCH_ROWS: Final = 200
#: The checker is asked this much after a crash, not after the broker's usual 6 s.
IMMUNITY_MS: Final = 2_000
#: Of four batches, the second meets a crash before its note, and the third one after it.
_BEFORE_NOTE: Final = 1
_AFTER_NOTE: Final = 2
_PAUSE_S: Final = 0.2


@dataclass
class CrewDesk:
    """Makes changes of crews, each until it stands in the ledger as confirmed or cancelled."""

    client: Client
    ledger: Ledger
    #: Ids of the changes whose transactions it did not end.
    left_open: list[str] = field(default_factory=list)

    def work(self, changes: pa.Table, *, on_noted: Callable[[int], None] = lambda _: None) -> None:
        """Make the changes.

        Args:
            changes: ledger.NOTE, without ids.
            on_noted: told how many are noted, after each batch.
        """
        left, round_, noted = changes, 0, 0
        while left.num_rows:
            round_ += 1
            again = []
            for start in range(0, left.num_rows, BATCH_ROWS):
                batch = left.slice(start, BATCH_ROWS)
                # Only its first attempt meets a crash.
                crash = start // BATCH_ROWS % 4 if round_ == 1 else None
                again.append(self._make(batch, round_=round_, crash=crash))
                noted += batch.num_rows - again[-1].num_rows
                on_noted(noted)
            left = pa.concat_tables(again)

    def _make(self, batch: pa.Table, *, round_: int, crash: int | None) -> pa.Table:
        """Make a batch of changes; those that are to be made again, under other ids."""
        named = batch.set_column(0, NOTE.field(0), _ids(batch, round_=round_))
        try:
            sent = self.client.send_half(
                crews.TOPIC,
                crews.halves(named),
                producer_group=PRODUCER_GROUP,
                immunity_ms=IMMUNITY_MS,
            )
        except BusyError:
            # Stored or not: nobody will note these.
            threading.Event().wait(_PAUSE_S)
            return batch
        if crash == _BEFORE_NOTE:
            self.left_open += named["change_id"].to_pylist()
            return batch
        states = self.ledger.note(named)
        stands = pc.not_equal(states, ABANDONED)
        ids = named["change_id"].filter(stands)
        if crash == _AFTER_NOTE or not self._end(sent.filter(stands), states.filter(stands)):
            self.left_open += ids.to_pylist()
        return batch.filter(pc.invert(stands))

    def _end(self, sent: pa.Table, states: pa.ChunkedArray) -> bool:
        """End the transactions as noted; whether the broker was there."""
        ends = {"transaction_id": sent["transaction_id"], "resolution": crews.resolutions(states)}
        try:
            self.client.end_transactions(pa.table(ends), producer_group=PRODUCER_GROUP)
        except BusyError:
            return False
        return True


def _ids(changes: pa.Table, *, round_: int) -> pa.ChunkedArray:
    """A crew makes one change; and an attempt that came to nothing is never taken up again."""
    return pc.binary_join_element_wise(changes["crew"], str(round_), "/")
