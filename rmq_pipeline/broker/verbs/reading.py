"""Looking at what is stored, and where consumer groups stand."""

from collections.abc import Mapping

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import arguments, queries
from rmq_pipeline.broker.progress import ResetOffset, UpdateOffsets
from rmq_pipeline.broker.stored import state_history
from rmq_pipeline.broker.verbs.opened import Opened
from rmq_pipeline.errors import QueryError


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
            filter=arguments.expression(filter),
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
        return _places(done)

    def update_offsets(self, group: str, topic: str, *, offsets: Mapping[int, int]) -> pa.Table:
        """Say how far a group is that keeps its own offsets; it never goes back.

        Args:
            offsets: queue_id -> the first offset that it is not done with.

        Returns:
            queue_id, queue_offset: where the group is now, a row an offset.
        """
        arguments.check_readable(topic)
        checked = arguments.offsets(offsets)
        done: dict[int, int] = self._engine.submit(UpdateOffsets(group, topic, checked))
        return _places(done)

    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None = None
    ) -> pa.Table | None:
        """A consumer's keyed state, of these message groups or of all; None when never written."""
        return queries.keyed_state(self._engine, group, topic=topic, message_groups=message_groups)

    def keyed_state_history(self, group: str, topic: str, *, places: pa.Table) -> pa.Table:
        """The keyed state of message groups before and after a stretch of each.

        Args:
            places: state_history.PLACES, a row a message group: its first and its last message.

        Returns:
            ``moment`` (before, after; begins where a group has no earlier state), state_history's
            HISTORY, and the consumer's own columns.
        """
        return state_history.keyed_state_history(self._engine, group, topic=topic, places=places)

    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """One SELECT over the documented views; it sees everything answered before."""
        select = arguments.text(query, "query", error=QueryError)
        timeout_s = arguments.query_s(timeout_s)
        self._engine.dispatched()
        return self._engine.database.query(select, timeout_s=timeout_s)


def _places(offsets: Mapping[int, int]) -> pa.Table:
    return pa.table(
        {
            "queue_id": pa.array(list(offsets), pa.int32()),
            "queue_offset": pa.array(list(offsets.values()), pa.int64()),
        }
    )
