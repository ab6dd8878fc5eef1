"""Verbs: reading by offset, lag, keyed state and SQL."""

from collections.abc import Mapping

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.access.rights import CONSUMES, Rights, on_group, on_topic
from rmq_pipeline.broker.decide.group_offsets import ResetOffset, UpdateOffsets
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import arguments, bodies, keyed_state, queries, waiting
from rmq_pipeline.errors import QueryError


class Reading(Opened):
    """Verbs for reading by offset, lag, keyed state and SQL."""

    @verb(rights=on_topic("sub"), repeatable=True, on_standby=True)
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
        """Read the messages [offset, offset + limit) of a queue without a group.

        Args:
            topic: topic to read.
            queue_id: queue to read.
            offset: first offset.
            limit: number of offsets to look at.
            filter: return only messages that it matches; see ``receive``.
            filter_type: tag or sql92.

        Returns:
            schema.READ.
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

    @verb(rights=on_topic("get"), repeatable=True, quick=True, on_standby=True)
    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """Return the first offset that was stored at or after a time, else the end of the queue."""
        at_ms = arguments.time_ms(at_ms, "at_ms")
        return queries.offset_at(self._engine, topic, queue_id=queue_id, at_ms=at_ms)

    @verb(rights=on_group("update"))
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
        """Move a group to other offsets; its leases and waiting message groups there end.

        Args:
            group: group to move.
            topic: topic of the offsets.
            to_offset: give this one,
            to_time_ms: or the first message stored at this time or later,
            to_latest: or the end,
            to_earliest: or the first stored message.
            queue_id: move this queue only.

        Returns:
            queue_id and queue_offset of each queue that was moved.
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

    @verb(rights=CONSUMES, repeatable=True, quick=True)
    def update_offsets(self, group: str, topic: str, *, offsets: Mapping[int, int]) -> pa.Table:
        """Move the offsets of a group that keeps its own forward; they never go back.

        Args:
            group: consumer group.
            topic: consumed topic.
            offsets: queue_id -> the first offset that the group has not consumed.

        Returns:
            queue_id and queue_offset: the group's offset now, one row per queue.

        Raises:
            IllegalOffsetError: there is no such queue, or it ends before the offset.
            InUseError: the broker has delivered messages of the queue that are not settled.
        """
        arguments.check_readable(topic)
        checked = arguments.offsets(offsets)
        done: dict[int, int] = self._engine.submit(UpdateOffsets(group, topic, checked))
        return _places(done)

    @verb(rights=Rights(group=("group", "get"), all_groups="get"), repeatable=True, on_standby=True)
    def lag(self, group: str | None = None) -> pa.Table:
        """Count messages that groups have not settled, and those that their filters match.

        Args:
            group: None: all groups.

        Returns:
            One row per queue that a group reads: consumer_group, topic, queue_id, lag,
            matching_lag, estimated, filters, in_flight, retrying, parked, committed_offset,
            max_offset, oldest_unread_at_ms. ``filters``: those that the group's clients receive
            with, or received with last. ``matching_lag``: messages that at least one filter
            matches; null where no filter is known since the broker started, or messages cannot be
            read. ``estimated``: matching_lag is computed from a sample, or counts messages behind
            the cursor that no filter has seen.
        """
        return queries.lag(self._engine, arguments.text_or_none(group, "group"))

    @verb(rights=on_group("sub"), repeatable=True, on_standby=True)
    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None = None
    ) -> pa.Table | None:
        """Return a consumer's keyed state, of the given message groups or of all.

        Args:
            group: consumer group.
            topic: consumed topic.
            message_groups: column message_group; None: all.

        Returns:
            message_group and the consumer's own columns; None if no state was ever settled.
        """
        return queries.keyed_state(self._engine, group, topic=topic, message_groups=message_groups)

    @verb(rights=on_group("sub"), repeatable=True, on_standby=True)
    def keyed_state_history(self, group: str, topic: str, *, places: pa.Table) -> pa.Table:
        """Return the keyed state of message groups before and after a range of their messages.

        Args:
            group: consumer group.
            topic: consumed topic.
            places: message_group; queue_id, queue_offset and stored_at_ms of its first message;
                last_queue_id and last_queue_offset; one row per message group.

        Returns:
            ``moment``: before or after, or begins where a message group has no earlier state;
            message_group, removed, position, at_ms, queue_id and queue_offset of the last message
            that the state includes (of the first message for begins), and the consumer's own
            columns.
        """
        return keyed_state.keyed_state_history(self._engine, group, topic=topic, places=places)

    @verb(rights=Rights(cluster="get"), repeatable=True, on_standby=True)
    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """Run one SELECT over the documented views; it sees everything that was answered before.

        Args:
            query: DuckDB's SQL.
            timeout_s: time limit of the query.

        Raises:
            QueryError: the query is no single SELECT, does not parse, or ran out of time or memory.
            ForbiddenError: it names bodies of messages, and the caller lacks get or sub on a topic.
        """
        select = arguments.text(query, "query", error=QueryError)
        timeout_s = arguments.query_s(timeout_s)
        self._engine.dispatched()  # a query may read any table
        return self._engine.database.query(
            select,
            timeout_s=timeout_s,
            is_abandoned=waiting.caller(),
            bodies=bodies.Bodies(self._engine),
        )

    def sql_schema(self, query: str) -> pa.Schema:
        """Return the columns that ``sql`` would answer a query with; names that repeat get numbers.

        Args:
            query: DuckDB's SQL, without a semicolon.

        Raises:
            QueryError: the query is no single SELECT, or does not parse.
        """
        select = arguments.text(query, "query", error=QueryError)
        return self._engine.database.columns(select, is_abandoned=waiting.caller())

    def sql_views(self) -> Mapping[str, pa.Schema]:
        """Return the views that ``sql`` may read, with their columns, in the order of their names.

        The macros of moments, such as ``lag_at``, are not listed.
        """
        return self._engine.database.views(is_abandoned=waiting.caller())


def _places(offsets: Mapping[int, int]) -> pa.Table:
    return pa.table(
        {
            "queue_id": pa.array(list(offsets), pa.int32()),
            "queue_offset": pa.array(list(offsets.values()), pa.int64()),
        }
    )
