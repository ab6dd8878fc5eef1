"""Dead letters opened again, and effects that were carried out before."""

import pyarrow as pa

from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.failures import redrive
from rmq_pipeline.broker.settling import effects
from rmq_pipeline.broker.verbs.opened import Opened


class Redriving(Opened):
    """What may happen to a message twice, and what must not."""

    def redrive(self, group: str, dead_letters: pa.Table, *, redrive_id: str) -> pa.Table:
        """Open the originals of dead letters again, for this group alone and each once.

        A message comes again where it lies: in order, before what follows it in its message group,
        its deliveries counted from the first. Nothing is copied, and the dead letter stays.

        Args:
            dead_letters: schema.DEAD_LETTER, places in the group's dead letter topic.
            redrive_id: under which the view ``redrives`` lists them.

        Returns:
            schema.REDRIVEN, row for row.

        Raises:
            IllegalOffsetError: one is no dead letter of the group; nothing was changed.
        """
        return redrive.redrive(
            self._engine, group, dead_letters=dead_letters, redrive_id=redrive_id
        )

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Which effects the group has recorded within its window, with the settle of an ack.

        Args:
            keys: schema.IDEMPOTENCY_KEY.

        Returns:
            schema.SEEN, row for row; seen_at_ms is null for a key that is not known.
        """
        asked = arguments.sound(keys, "keys")
        return effects.seen_before(self._engine, group, keys=asked)
