"""Verbs: parked messages, redrive and idempotency keys."""

import pyarrow as pa

from rmq_pipeline.access.rights import on_group
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import redelivery, settle
from rmq_pipeline.tables import sound


class Failures(Opened):
    """Verbs for parked messages, redrive and idempotency keys."""

    @verb(rights=on_group("update"))
    def unpark(
        self,
        group: str,
        *,
        topic: str | None = None,
        message_groups: pa.Table | None = None,
        skip: bool = False,
    ) -> dict[str, int]:
        """Deliver parked messages again from their first attempt on, then the messages behind them.

        Dead-lettered message groups are no longer quarantined: their next messages are delivered.

        Args:
            group: consumer group.
            topic: of this topic only.
            message_groups: column message_group; None: all, and messages without one.
            skip: dead-letter the parked messages instead, and go on with the messages behind them.

        Returns:
            {"unparked", "skipped"} (messages), {"lifted"} (quarantines of message groups).
        """
        return redelivery.unpark(
            self._engine, group, topic=topic, message_groups=message_groups, skip=skip
        )

    @verb(rights=on_group("update"), repeatable=True)
    def redrive(self, group: str, dead_letters: pa.Table, *, redrive_id: str) -> pa.Table:
        """Redrive dead letters: deliver their originals to this group again, each once.

        A redriven message keeps its place: it comes before later messages of its message group,
        and its attempts count from one. No message is copied, and the dead letter stays.

        Args:
            group: consumer group of the dead letters.
            dead_letters: schema.DEAD_LETTER, places in the group's dead letter topic.
            redrive_id: id under which the view ``redrives`` lists them.

        Returns:
            schema.REDRIVEN, row for row; ``already`` for what was redriven before.

        Raises:
            IllegalOffsetError: a place is no dead letter of the group; nothing was changed.
        """
        return redelivery.redrive(
            self._engine, group, dead_letters=dead_letters, redrive_id=redrive_id
        )

    @verb(rights=on_group("sub"), repeatable=True, quick=True)
    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Return which idempotency keys the group has recorded within its window.

        Args:
            group: consumer group.
            keys: schema.IDEMPOTENCY_KEY.

        Returns:
            schema.SEEN, row for row; seen_at_ms is null for an unknown key.
        """
        asked = sound(keys, "keys")
        return settle.seen_before(self._engine, group, keys=asked)
