"""Looking at what is stored, and where consumer groups stand."""

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import arguments, queries
from rmq_pipeline.broker.progress import ResetOffset
from rmq_pipeline.broker.verbs.opened import Opened


class Reading(Opened):
    """Messages by offset, offsets by time, keyed state, SQL."""

    def read(
        self,
        topic: str,
        queue_id: int,
        *,
        offset: int,
        limit: int,
        filter: str = "*",
        filter_type: str = "tag",
    ) -> pa.Table:
        """Messages [offset, offset + limit) of a queue as schema.READ, without a group.

        Args:
            filter: which of these to give, as ``receive`` takes it.
            filter_type: tag or sql92.
        """
        return queries.read(
            self._engine,
            topic,
            queue_id=queue_id,
            offset=offset,
            limit=limit,
            filter=filter,
            filter_type=filter_type,
        )

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """The first offset stored at or after a moment; the end when there is none."""
        return queries.offset_at(self._engine, topic, queue_id=queue_id, at_ms=at_ms)

    def reset_offset(
        self,
        group: str,
        topic: str,
        *,
        to_offset: int | None = None,
        to_time_ms: int | None = None,
        to_latest: bool = False,
        to_earliest: bool = False,
        queue_id: int | None = None,
    ) -> pa.Table:
        """Put a group elsewhere: its leases and waiting message groups there are gone.

        Returns:
            queue_id, queue_offset of each queue that was reset.
        """
        offsets, clip = arguments.reset(
            self._engine,
            topic,
            to_offset=to_offset,
            to_time_ms=to_time_ms,
            to_latest=to_latest,
            to_earliest=to_earliest,
            queue_id=queue_id,
        )
        done: dict[int, int] = self._engine.submit(ResetOffset(group, topic, offsets, clip))
        return pa.table(
            {
                "queue_id": pa.array(list(done), pa.int32()),
                "queue_offset": pa.array(list(done.values()), pa.int64()),
            }
        )

    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None = None
    ) -> pa.Table | None:
        """A consumer's keyed state, of these message groups or of all; None when never written."""
        return queries.keyed_state(self._engine, group, topic=topic, message_groups=message_groups)

    def sink_files(self, group: str) -> pa.Table:
        """The files that the group's settles have named, in that order."""
        group_id = self._engine.state.group(group).group_id
        self._engine.dispatched()
        return self._engine.database.sink_files(group_id)

    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """One SELECT over the documented views; it sees everything answered before."""
        self._engine.dispatched()
        return self._engine.database.query(query, timeout_s=timeout_s)
