"""Verbs: parked messages."""

import pyarrow as pa

from rmq_pipeline.access.rights import on_group
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work.redrive import unpark


class Failures(Opened):
    """Verbs for parked messages."""

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
        return unpark(self._engine, group, topic=topic, message_groups=message_groups, skip=skip)
