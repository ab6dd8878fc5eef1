"""Sending, receiving, settling and reading messages, from another process."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.flight.calls import Calls, Receipts, Window


class Messaging(Calls):
    """The verbs that producers, consumers and readers use."""

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store messages, all or none.

        Args:
            messages: schema.SEND; nullable columns may be left out.

        Returns:
            schema.SENT, row for row.
        """
        return self._table("send", topic=topic, messages=messages)

    def recall(self, topic: str, handles: pa.Table) -> pa.Table:
        """Call back scheduled messages before they are delivered, all or none.

        Args:
            handles: schema.RECALL, as ``send`` answered them.

        Returns:
            schema.RECALLED, row for row.

        Raises:
            RecallError: one was delivered or called back before, is of another topic, or unknown.
        """
        return self._table("recall", topic=topic, handles=handles)

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        invisible_duration_ms: int = 60_000,
        filter: str = "*",
        filter_type: str = "tag",
        wait_ms: int = 0,
        client_id: str = "",
        window: Window | None = None,
        queue_ids: Sequence[int] | None = None,
        attempt_id: str = "",
    ) -> pa.Table:
        """Lease messages of a topic to this caller.

        Args:
            filter: * or tags joined by ||; or a condition on properties.
            filter_type: tag or sql92.
            wait_ms: how long to wait while there is none.
            queue_ids: look in these queues only; without it, in all that no other client of the
                group has locked.
            attempt_id: in a group of order queue a receive that is repeated under the id of one
                whose answer got lost is given the same batch again, with new receipts.

        Returns:
            schema.RECEIVED, ordered by queue_id and within a message group by offset.

        Raises:
            QueueLockedError: another client has locked one of ``queue_ids``.
        """
        return self._table(
            "receive",
            topic=topic,
            group=group,
            limit=limit,
            invisible_duration_ms=invisible_duration_ms,
            filter=filter,
            filter_type=filter_type,
            wait_ms=wait_ms,
            client_id=client_id,
            window=window,
            queue_ids=None if queue_ids is None else list(queue_ids),
            attempt_id=attempt_id,
        )

    def ack(self, receipts: Receipts) -> None:
        """Settle deliveries as done, all or none.

        Raises:
            ReceiptHandleError: one of them has ended.
        """
        self._connection.call("ack", {"receipts": receipts})

    def change_invisible_duration(self, receipts: Receipts, duration_ms: int) -> pa.Table:
        """Let leases end ``duration_ms`` from now; the new receipts, row for row.

        Raises:
            ReceiptHandleError: one of them has ended; none was changed.
        """
        return self._table("change_invisible_duration", receipts=receipts, duration_ms=duration_ms)

    def forward_to_dead_letter_queue(self, receipts: Receipts, *, reason: str = "") -> None:
        """Give deliveries up, all or none.

        Raises:
            ReceiptHandleError: one of them has ended.
        """
        args = {"receipts": receipts, "reason": reason}
        self._connection.call("forward_to_dead_letter_queue", args)

    def settle(
        self,
        group: str,
        outcomes: pa.Table,
        *,
        settle_id: str = "",
        window: Window | None = None,
        publish: Mapping[str, pa.Table] | None = None,
        sink_files: pa.Table | None = None,
        state: pa.Table | None = None,
        topic: str = "",
    ) -> dict[str, Any]:
        """Settle deliveries and what came of them at once, all or none.

        Args:
            outcomes: schema.OUTCOME.
            settle_id: repeating the window's last one is answered the same and does nothing.
            publish: schema.SEND per topic.
            sink_files: schema.SINK_FILE, the files that count from now on.
            state: message_group and the consumer's own columns, a row per changed key.
            topic: the consumed topic, for ``state``.

        Returns:
            {"acked", "retried", "dead_lettered", "published"}.

        Raises:
            FencedError: a newer window has taken over.
            ReceiptHandleError: a delivery has ended.
        """
        return self._facts(
            "settle",
            group=group,
            outcomes=outcomes,
            settle_id=settle_id,
            window=window,
            publish=publish,
            sink_files=sink_files,
            state=state,
            topic=topic,
        )

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
        """What a filter wants of the messages [offset, offset + limit) of a queue; schema.READ."""
        return self._table(
            "read",
            topic=topic,
            queue_id=queue_id,
            offset=offset,
            limit=limit,
            filter=filter,
            filter_type=filter_type,
        )

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """The first offset stored at or after a time; max_offset when there is none."""
        args = {"topic": topic, "queue_id": queue_id, "at_ms": at_ms}
        return int(self._connection.call("offset_at", args))

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
        """Let the group go on from elsewhere; its leases end.

        Returns:
            queue_id and queue_offset, a row per queue.
        """
        return self._table(
            "reset_offset",
            group=group,
            topic=topic,
            to_offset=to_offset,
            to_time_ms=to_time_ms,
            to_latest=to_latest,
            to_earliest=to_earliest,
            queue_id=queue_id,
        )

    def update_offsets(self, group: str, topic: str, *, offsets: Mapping[int, int]) -> pa.Table:
        """Say how far a group is that keeps its own offsets; it never goes back.

        Args:
            offsets: queue_id -> the first offset that it is not done with.

        Returns:
            queue_id and queue_offset, where the group is now.

        Raises:
            IllegalOffsetError: there is no such queue, or it ends before the offset.
            InUseError: the broker has delivered messages of the queue that are not settled.
        """
        return self._table("update_offsets", group=group, topic=topic, offsets=dict(offsets))

    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None = None
    ) -> pa.Table | None:
        """The state of these message groups, or of all; None when none was ever settled."""
        return self._table("keyed_state", group=group, topic=topic, message_groups=message_groups)

    def keyed_state_history(self, group: str, topic: str, *, places: pa.Table) -> pa.Table:
        """The keyed state of message groups before and after a stretch of each.

        Args:
            places: message_group, queue_id, queue_offset, stored_at_ms of its first message,
                last_queue_id, last_queue_offset; a row a message group.

        Returns:
            moment: before, after, or begins where a group has no earlier state; message_group,
            removed, position, at_ms, queue_id and queue_offset of the last message that the state
            knows (of the first message where it begins), and the consumer's own columns.
        """
        return self._table("keyed_state_history", group=group, topic=topic, places=places)

    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """The rows of one SELECT over the documented views.

        Raises:
            QueryError: it is something else, does not parse, or ran out of time.
        """
        return self._table("sql", query=query, timeout_s=timeout_s)
