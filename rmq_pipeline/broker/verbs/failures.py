"""What becomes of messages that failed for good."""

import pyarrow as pa

from rmq_pipeline.broker.failures.unparking import unpark
from rmq_pipeline.broker.verbs.opened import Opened


class Failures(Opened):
    """Ending the hold on parked messages and given-up message groups."""

    def unpark(
        self,
        group: str,
        *,
        topic: str | None = None,
        message_groups: pa.Table | None = None,
        skip: bool = False,
    ) -> dict[str, int]:
        """Let parked messages come again, from their first attempt on, then what follows them.

        Message groups that were given up are pardoned: what comes from now on is delivered.

        Args:
            topic: of this topic only.
            message_groups: column message_group; None: all of them, and messages without one.
            skip: send the parked messages to the dead letters instead, and go on behind them.

        Returns:
            unparked, skipped (messages), pardoned (message groups).
        """
        return unpark(self._engine, group, topic=topic, message_groups=message_groups, skip=skip)
