"""Redriving dead letters and asking for effects carried out, from another process."""

import pyarrow as pa

from rmq_pipeline.flight.calls import Calls


class Redriving(Calls):
    """The verbs of what may happen to a message twice, and what must not."""

    def redrive(self, group: str, dead_letters: pa.Table, *, redrive_id: str) -> pa.Table:
        """Open the originals of dead letters again, for this group alone and each once.

        Args:
            dead_letters: schema.DEAD_LETTER, places in the group's dead letter topic.
            redrive_id: under which the view ``redrives`` lists them.

        Returns:
            schema.REDRIVEN, row for row. Asked again, what was redriven is ``already``.

        Raises:
            IllegalOffsetError: one is no dead letter of the group; nothing was changed.
        """
        return self._table("redrive", group=group, dead_letters=dead_letters, redrive_id=redrive_id)

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Which effects the group has recorded within its window, with the settle of an ack.

        Args:
            keys: schema.IDEMPOTENCY_KEY.

        Returns:
            schema.SEEN, row for row; seen_at_ms is null for a key that is not known.
        """
        return self._table("seen_before", group=group, keys=keys)
