"""The broker's verbs: one typed method each, which ``Client`` and ``Broker`` both have.

Generated from the declarations in ``rmq_pipeline/broker/verbs`` by ``make verbs``; do not edit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.group import GroupMembers
from rmq_pipeline.topic import PARTITION_TIME
from rmq_pipeline.verb import PullResult, Receipts, Verb, Window, restored


class Verbs(Protocol):
    """All verbs of a broker, wherever it is.

    Every method is a ``call`` of the verb with its arguments. A call that raises an error of
    ``rmq_pipeline.errors`` has changed nothing, unless it is a StorageError or
    BrokerUnavailableError.
    """

    def call(self, verb: str, args: Mapping[str, Any]) -> Any:
        """Call a verb by its name.

        Raises:
            RequestError: there is no such verb, or an argument has a wrong type.
        """
        ...

    # ------------------------------------------------------------------- Topics and consumer groups

    def create_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str = PARTITION_TIME,
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic.

        Args:
            name: 1 to 127 of the characters A-Z a-z 0-9 _ - % |.
            type: normal, fifo, delay, transaction, priority, lite or mixed.
            queues: number of queues; ``alter_topic`` can add more.
            partition_time: time that sinks partition by: born, stored, or the name of a property
                that holds ms since 1970.
            deduplicate: none, message_id or key; a message that repeats one of the window is not
                stored.
            deduplicate_window_ms: length of that window.
            retention_ms: sealed messages older than this are deleted; None keeps all.
            retention_bytes: the oldest segments are deleted while the topic has more bytes of them;
                None keeps all.

        Returns:
            The topic's fields.

        Raises:
            AlreadyExistsError: a topic of this name exists.
        """
        answer: dict[str, Any] = self.call(
            "create_topic",
            {
                "name": name,
                "type": type,
                "queues": queues,
                "partition_time": partition_time,
                "deduplicate": deduplicate,
                "deduplicate_window_ms": deduplicate_window_ms,
                "retention_ms": retention_ms,
                "retention_bytes": retention_bytes,
            },
        )
        return answer

    def ensure_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str | None = None,
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic unless it exists; the arguments are those of ``create_topic``.

        Returns:
            The topic's fields.

        Raises:
            AlreadyExistsError: the topic exists with other settings.
        """
        answer: dict[str, Any] = self.call(
            "ensure_topic",
            {
                "name": name,
                "type": type,
                "queues": queues,
                "partition_time": partition_time,
                "deduplicate": deduplicate,
                "deduplicate_window_ms": deduplicate_window_ms,
                "retention_ms": retention_ms,
                "retention_bytes": retention_bytes,
            },
        )
        return answer

    def alter_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        partition_time: str | None = None,
        deduplicate: str | None = None,
        deduplicate_window_ms: int | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Change the given settings of a topic; None leaves a setting as it is.

        Args:
            name: topic to change.
            queues: new number of queues; a topic never loses one.
            partition_time: see ``create_topic``, as for the rest.
            deduplicate: none, message_id or key.
            deduplicate_window_ms: messages stored before the change do not count for a longer
                window.
            retention_ms: 0 keeps all messages.
            retention_bytes: 0 keeps all segments.

        Returns:
            The topic's fields.
        """
        answer: dict[str, Any] = self.call(
            "alter_topic",
            {
                "name": name,
                "queues": queues,
                "partition_time": partition_time,
                "deduplicate": deduplicate,
                "deduplicate_window_ms": deduplicate_window_ms,
                "retention_ms": retention_ms,
                "retention_bytes": retention_bytes,
            },
        )
        return answer

    def delete_topic(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a topic and all that is stored of it.

        Args:
            name: topic to delete.
            force: delete it even while messages are in flight or scheduled.

        Returns:
            The fields that the topic had.

        Raises:
            InUseError: messages are in flight or scheduled.
        """
        answer: dict[str, Any] = self.call("delete_topic", {"name": name, "force": force})
        return answer

    def list_topics(self) -> pa.Table:
        """Return all topics that clients see: name, topic_id and settings, one row each."""
        answer: pa.Table = self.call("list_topics", {})
        return answer

    def describe_topic(self, name: str) -> dict[str, Any]:
        """Return a topic's fields, and min_offset and max_offset of each queue in ``offsets``.

        ``growths`` has a list for each time that queues were added: where the older queues ended.
        """
        answer: dict[str, Any] = self.call("describe_topic", {"name": name})
        return answer

    def create_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS,
    ) -> dict[str, Any]:
        """Create a consumer group and its dead letter topic.

        Args:
            name: 1 to 120 of the characters A-Z a-z 0-9 _ - % |.
            order: none, message_group or queue.
            max_attempts: deliveries of one message, the first one counted.
            backoff_ms: delay after the first, second, … failure; the last one repeats.
            on_failure: what follows the last attempt: dead_letter, park or dead_letter_group.
            max_rate_per_s: deliveries per second over all topics; None is unlimited.
            backoff: customized (``backoff_ms``), exponential, or a mapping with initial_ms,
                max_ms and multiplier.
            idempotency_window_ms: how long the broker remembers idempotency keys of the group.

        Returns:
            The group's fields.

        Raises:
            AlreadyExistsError: a group of this name exists.
        """
        answer: dict[str, Any] = self.call(
            "create_group",
            {
                "name": name,
                "order": order,
                "max_attempts": max_attempts,
                "backoff_ms": backoff_ms,
                "on_failure": on_failure,
                "max_rate_per_s": max_rate_per_s,
                "backoff": backoff,
                "idempotency_window_ms": idempotency_window_ms,
            },
        )
        return answer

    def ensure_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS,
    ) -> dict[str, Any]:
        """Create a consumer group unless it exists; the arguments are those of ``create_group``.

        Returns:
            The group's fields.

        Raises:
            AlreadyExistsError: the group exists with other settings.
        """
        answer: dict[str, Any] = self.call(
            "ensure_group",
            {
                "name": name,
                "order": order,
                "max_attempts": max_attempts,
                "backoff_ms": backoff_ms,
                "on_failure": on_failure,
                "max_rate_per_s": max_rate_per_s,
                "backoff": backoff,
                "idempotency_window_ms": idempotency_window_ms,
            },
        )
        return answer

    def alter_group(
        self,
        name: str,
        *,
        order: str | None = None,
        max_attempts: int | None = None,
        backoff_ms: Sequence[int] | None = None,
        on_failure: str | None = None,
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int | None = None,
    ) -> dict[str, Any]:
        """Change the given settings of a consumer group; its order cannot be changed.

        Returns:
            The group's fields.
        """
        answer: dict[str, Any] = self.call(
            "alter_group",
            {
                "name": name,
                "order": order,
                "max_attempts": max_attempts,
                "backoff_ms": backoff_ms,
                "on_failure": on_failure,
                "max_rate_per_s": max_rate_per_s,
                "backoff": backoff,
                "idempotency_window_ms": idempotency_window_ms,
            },
        )
        return answer

    def delete_group(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a consumer group and its progress.

        Args:
            name: group to delete.
            force: delete it even while messages are in flight.

        Returns:
            The fields that the group had.

        Raises:
            InUseError: messages are in flight for the group.
        """
        answer: dict[str, Any] = self.call("delete_group", {"name": name, "force": force})
        return answer

    def list_groups(self) -> pa.Table:
        """Return all consumer groups: name, group_id and settings, one row each."""
        answer: pa.Table = self.call("list_groups", {})
        return answer

    def describe_group(self, name: str) -> dict[str, Any]:
        """Return a group's fields, its members by client_id, and the locks of its queues.

        ``members`` has topics, joined_at_ms, seen_at_ms and details of each member that sends
        heartbeats. ``filters`` has, by topic and filter, the clients that receive with it;
        ``mixed_filters`` the topics whose clients use several filters, which loses messages.
        """
        answer: dict[str, Any] = self.call("describe_group", {"name": name})
        return answer

    def subscribe(self, group: str, topic: str) -> None:
        """Count all messages of a topic as lag of a group from now on."""
        self.call("subscribe", {"group": group, "topic": topic})

    # --------------------------------------------------------------------- Segments and the archive

    def compact(
        self,
        topic: str | None = None,
        *,
        limit_bytes: int = limits.COMPACT_SPARK_BYTES,
        window: Window | None = None,
    ) -> dict[str, int]:
        """Merge small neighbouring segments in the broker's process.

        Args:
            topic: merge segments of this topic only.
            limit_bytes: stop after the merge that reaches this many input bytes.
            window: refuse the call when this window has been taken over.

        Returns:
            {"compactions", "inputs", "rows", "bytes_before", "bytes"}.
        """
        answer: dict[str, int] = restored(
            self.call("compact", {"topic": topic, "limit_bytes": limit_bytes, "window": window}),
            dict[str, int],
        )
        return answer

    def plan_compaction(
        self, topic: str | None = None, *, limit_bytes: int = limits.COMPACT_SPARK_BYTES
    ) -> list[dict[str, Any]]:
        """Return the merges that are due: {"root", "inputs", "bytes"} of each.

        Another process does them with archive.segment_file.Merger, then calls ``replace_segments``.
        """
        answer: list[dict[str, Any]] = restored(
            self.call("plan_compaction", {"topic": topic, "limit_bytes": limit_bytes}),
            list[dict[str, Any]],
        )
        return answer

    def replace_segments(
        self, removed: Sequence[str], *, added: str, window: Window | None = None
    ) -> dict[str, int]:
        """Register a merged segment in place of its inputs.

        Args:
            removed: paths of the inputs.
            added: path of the merged segment, which exists.
            window: refuse the call when this window has been taken over.

        Returns:
            The same as ``compact``.

        Raises:
            RequestError: the inputs are not registered any more; the merged file is deleted.
            StorageError: the file does not hold what its name says; it is deleted.
            FencedError: a newer window has taken over.
        """
        answer: dict[str, int] = restored(
            self.call("replace_segments", {"removed": removed, "added": added, "window": window}),
            dict[str, int],
        )
        return answer

    def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        message_id: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        limit: int = 100,
        with_body: bool = False,
    ) -> pa.Table:
        """Return the first messages with a key, an id or a time, in the order of storing.

        Args:
            topic: topic to search.
            key: one of the message's keys.
            message_id: the message's id.
            from_ms: stored at this time or later.
            to_ms: stored before this time.
            limit: number of messages at most.
            with_body: read bodies, too; otherwise they are null. The answer then has fewer
                messages if their bodies exceed 64 MiB, but at least one.

        Returns:
            schema.READ.

        Raises:
            RequestError: neither a key, nor an id, nor a time is given.
        """
        answer: pa.Table = self.call(
            "find",
            {
                "topic": topic,
                "key": key,
                "message_id": message_id,
                "from_ms": from_ms,
                "to_ms": to_ms,
                "limit": limit,
                "with_body": with_body,
            },
        )
        return answer

    def archive(self) -> dict[str, Any]:
        """Return the size of the archive.

        Returns:
            {"root", "files", "rows", "bytes", "topics": [{"topic", "files", "rows", "bytes",
            "min_stored_at_ms", "max_stored_at_ms", "replaced_files"}]}.
        """
        answer: dict[str, Any] = self.call("archive", {})
        return answer

    def expire(self, *, window: Window | None = None) -> dict[str, int]:
        """Delete messages that their topics no longer retain, and files whose grace period is over.

        Returns:
            {"segments", "rows", "bytes", "held_back", "deleted_files"}.
        """
        answer: dict[str, int] = restored(self.call("expire", {"window": window}), dict[str, int])
        return answer

    def copy_state(self) -> dict[str, Any]:
        """Copy the database to a folder of the home, for `rmq backup`.

        Dispatch waits meanwhile; sends, receives and settles go on. One copy at a time, which
        replaces the copy before.

        Returns:
            {"folder", "position", "bytes", "waited_ms"}: the name of the folder in ``.state-copy``,
            the log position of the copy, and how long dispatch waited.

        Raises:
            BusyError: another copy is under way.
            StoreFullError: the disk has no space for it.
        """
        answer: dict[str, Any] = self.call("copy_state", {})
        return answer

    # -------------------------------------------------------------- Sending, receiving and settling

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store messages, all or none.

        Args:
            topic: topic to send to.
            messages: schema.SEND; nullable columns may be left out.

        Returns:
            schema.SENT, row for row.
        """
        answer: pa.Table = self.call("send", {"topic": topic, "messages": messages})
        return answer

    def recall(self, topic: str, handles: pa.Table) -> pa.Table:
        """Recall scheduled messages before they are delivered, all or none.

        Args:
            topic: topic that the messages were sent to.
            handles: schema.RECALL, as ``send`` returned them.

        Returns:
            schema.RECALLED, row for row.

        Raises:
            RecallError: a message was delivered or recalled before, is of another topic, or
                unknown.
        """
        answer: pa.Table = self.call("recall", {"topic": topic, "handles": handles})
        return answer

    def receive(
        self,
        group: str,
        topic: str,
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
        ack: Receipts | None = None,
    ) -> pa.Table:
        """Lease messages of a topic to the caller.

        Args:
            group: consumer group that receives.
            topic: topic to receive from.
            limit: number of messages at most.
            invisible_duration_ms: length of the leases.
            filter: ``*``, tags joined by ||, or an SQL92 condition on properties.
            filter_type: tag or sql92.
            wait_ms: how long to wait for the first message.
            client_id: client that the messages are leased to.
            window: name and epoch of the consumer's window that the leases belong to.
            queue_ids: receive from these queues only; None: from all queues that no other client of
                the group has locked.
            attempt_id: in a group of order queue, repeating a receive under the id of one whose
                answer was lost returns the same batch, with new receipts.
            ack: receipts of deliveries to ack before, all or none, also if no message comes.
                After any error but ReceiptHandleError, receive again without them.

        Returns:
            schema.RECEIVED, sorted by queue_id, and by queue_offset within a message group.

        Raises:
            QueueLockedError: another client has locked one of ``queue_ids``.
            ReceiptHandleError: a receipt of ``ack`` has ended; nothing was leased.
        """
        answer: pa.Table = self.call(
            "receive",
            {
                "group": group,
                "topic": topic,
                "limit": limit,
                "invisible_duration_ms": invisible_duration_ms,
                "filter": filter,
                "filter_type": filter_type,
                "wait_ms": wait_ms,
                "client_id": client_id,
                "window": window,
                "queue_ids": queue_ids,
                "attempt_id": attempt_id,
                "ack": ack,
            },
        )
        return answer

    def ack(self, receipts: Receipts) -> None:
        """Settle deliveries as consumed, all or none.

        Args:
            receipts: a table with the column receipt_handle, or the handles.

        Raises:
            ReceiptHandleError: a receipt has ended.
        """
        self.call("ack", {"receipts": receipts})

    def change_invisible_duration(self, receipts: Receipts, duration_ms: int) -> pa.Table:
        """Let leases end ``duration_ms`` from now, all or none.

        Returns:
            The receipts that are valid from now on, row for row.

        Raises:
            ReceiptHandleError: a receipt has ended; no lease was changed.
        """
        answer: pa.Table = self.call(
            "change_invisible_duration", {"receipts": receipts, "duration_ms": duration_ms}
        )
        return answer

    def forward_to_dead_letter_queue(self, receipts: Receipts, *, reason: str = "") -> None:
        """Settle deliveries by moving their messages to %DLQ%group, all or none.

        Args:
            receipts: a table with the column receipt_handle, or the handles.
            reason: text that the dead letters carry.

        Raises:
            ReceiptHandleError: a receipt has ended; no message was moved.
            OperatorError, LookupError: the deliveries are settled, but a message cannot be read
                or copied now. The broker moves it to %DLQ%group when it can.
        """
        self.call("forward_to_dead_letter_queue", {"receipts": receipts, "reason": reason})

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
        """Settle deliveries and commit what came of them in one step, all or none.

        Args:
            group: consumer group of the deliveries.
            outcomes: schema.OUTCOME.
            settle_id: repeating the window's last settle returns the same answer and does nothing.
            window: name and epoch of the window that settles.
            publish: schema.SEND for each topic.
            sink_files: schema.SINK_FILE, files that belong to the sink from now on.
            state: message_group, an optional column ``removed``, and the consumer's own columns;
                one row per changed key.
            topic: consumed topic that ``state`` belongs to.

        Returns:
            {"acked", "retried", "dead_lettered", "published"}.

        Raises:
            FencedError: a newer window has taken over.
            ReceiptHandleError: a receipt has ended.
        """
        answer: dict[str, Any] = self.call(
            "settle",
            {
                "group": group,
                "outcomes": outcomes,
                "settle_id": settle_id,
                "window": window,
                "publish": publish,
                "sink_files": sink_files,
                "state": state,
                "topic": topic,
            },
        )
        return answer

    # ----------------------------------- Members, queue locks, offsets and lite topics of consumers

    def heartbeat(
        self,
        group: str,
        client_id: str,
        *,
        topics: Sequence[str],
        details: Mapping[str, Any],
        known_version: int = -1,
        wait_ms: int = 0,
    ) -> GroupMembers:
        """Become or stay a member of a consumer group, and learn of the other members.

        A member is removed 120 s after its last heartbeat, and 2 s after the connection of a
        waiting heartbeat is lost.

        Args:
            group: consumer group to be a member of.
            client_id: identifies the member.
            topics: topics that the member consumes.
            details: facts about the client for people to see; plain JSON.
            known_version: wait while the group has this version; -1 never waits.
            wait_ms: how long to wait at most.

        Returns:
            ``version`` changes when members or their topics change, and when somebody resets the
            group's offsets of one of the topics. ``members`` has the topics by client_id.
            ``resets`` has, by topic and queue_id, the number of offset resets. ``suspects``, if
            any: (topic, queue_id, queue_offset) of messages that may have ended the processes of
            members. ``mixed_filters``, if any: the filters, by topic, of topics that members
            receive with several filters.
        """
        answer: GroupMembers = restored(
            self.call(
                "heartbeat",
                {
                    "group": group,
                    "client_id": client_id,
                    "topics": topics,
                    "details": details,
                    "known_version": known_version,
                    "wait_ms": wait_ms,
                },
            ),
            GroupMembers,
        )
        return answer

    def leave(self, group: str, client_id: str) -> None:
        """Leave a consumer group at once; the client's queue locks end."""
        self.call("leave", {"group": group, "client_id": client_id})

    def lock_queues(
        self,
        group: str,
        topic: str,
        *,
        queue_ids: Sequence[int],
        client_id: str,
        duration_ms: int = limits.QUEUE_LOCK_MS,
    ) -> list[int]:
        """Lock queues for a client.

        A queue that another client has locked is not locked. When a lock passes to another
        client, the broker releases deliveries of the queue, does not count the attempts, and ends
        the receipts. A client that locks again in time keeps its deliveries.

        Args:
            group: consumer group of the client.
            topic: topic of the queues.
            queue_ids: queues to lock.
            client_id: client that holds the locks.
            duration_ms: length of the locks.

        Returns:
            The queues that the client holds now.
        """
        answer: list[int] = restored(
            self.call(
                "lock_queues",
                {
                    "group": group,
                    "topic": topic,
                    "queue_ids": queue_ids,
                    "client_id": client_id,
                    "duration_ms": duration_ms,
                },
            ),
            list[int],
        )
        return answer

    def unlock_queues(
        self, group: str, topic: str, *, queue_ids: Sequence[int], client_id: str
    ) -> list[int]:
        """Unlock queues and release their deliveries.

        Returns:
            The queues that the client had locked.
        """
        answer: list[int] = restored(
            self.call(
                "unlock_queues",
                {"group": group, "topic": topic, "queue_ids": queue_ids, "client_id": client_id},
            ),
            list[int],
        )
        return answer

    def release(self, receipts: Receipts) -> None:
        """Release deliveries uncounted, all or none: the messages can be received again at once.

        Later deliveries of the same message groups are released with them.

        Args:
            receipts: a table with the column receipt_handle, or the handles.

        Raises:
            ReceiptHandleError: a receipt has ended.
        """
        self.call("release", {"receipts": receipts})

    def pull(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        limit: int = 32,
        max_bytes: int = limits.PULL_BYTES,
        filter: str = "*",
        filter_type: str = "tag",
        wait_ms: int = 0,
    ) -> PullResult:
        """Read messages of several queues by offset, without a lease and without a group.

        Args:
            topic: topic to read.
            positions: queue_id -> the first offset to look at; an expired offset stands for the
                first one that is stored.
            limit: number of messages at most.
            max_bytes: of bodies; one message is returned however large it is.
            filter: ``*``, tags joined by ||, or an SQL92 condition on properties.
            filter_type: tag or sql92.
            wait_ms: how long to wait for the first message.

        Raises:
            IllegalOffsetError: there is no such queue, or it ends before the position.
        """
        answer: PullResult = restored(
            self.call(
                "pull",
                {
                    "topic": topic,
                    "positions": positions,
                    "limit": limit,
                    "max_bytes": max_bytes,
                    "filter": filter,
                    "filter_type": filter_type,
                    "wait_ms": wait_ms,
                },
            ),
            PullResult,
        )
        return answer

    def commit_offsets(
        self,
        group: str,
        topic: str,
        *,
        offsets: Mapping[int, tuple[int, int]],
        client_id: str = "",
        resets: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Commit offsets of a group that keeps its own, unless somebody else has moved them.

        Args:
            group: consumer group.
            topic: consumed topic.
            offsets: queue_id -> (the committed offset that the caller knows, the new one). If the
                group's offset is another one it stays; -1 stands for any offset.
            client_id: client that commits; required where a queue is locked.
            resets: queue_id -> number of resets, as ``committed_offsets`` returned it. After a
                further reset the queue's offset stays.

        Returns:
            queue_id -> the committed offset now.

        Raises:
            QueueLockedError: another client has locked a queue; no offset was changed.
            IllegalOffsetError: there is no such queue, or it ends before the offset.
            InUseError: the broker has delivered messages of the queue that are not settled.
        """
        answer: dict[int, int] = restored(
            self.call(
                "commit_offsets",
                {
                    "group": group,
                    "topic": topic,
                    "offsets": offsets,
                    "client_id": client_id,
                    "resets": resets,
                },
            ),
            dict[int, int],
        )
        return answer

    def committed_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """Return the committed offset of each queue, and how often somebody has reset it.

        Returns:
            queue_id -> (offset, -1 if none; number of resets), for every queue.
        """
        answer: dict[int, tuple[int, int]] = restored(
            self.call("committed_offsets", {"group": group, "topic": topic}),
            dict[int, tuple[int, int]],
        )
        return answer

    def start_offsets(
        self, group: str, topic: str, *, where: Literal["last", "first"] | int
    ) -> dict[int, int]:
        """Begin a topic at its ``last`` or ``first`` message, or at a time in ms since 1970.

        Queues that have a committed offset keep it. If any queue of the topic has one, the others
        begin with their first message: they were added later, and none of their messages is lost.

        Returns:
            queue_id -> the committed offset, for every queue.
        """
        answer: dict[int, int] = restored(
            self.call("start_offsets", {"group": group, "topic": topic, "where": where}),
            dict[int, int],
        )
        return answer

    def clone_offsets(self, from_group: str, to_group: str, *, topic: str) -> dict[int, int]:
        """Copy the offsets of one group to another, whose leases and waiting message groups end.

        Returns:
            queue_id -> the offset, for each queue that ``from_group`` has begun.
        """
        answer: dict[int, int] = restored(
            self.call(
                "clone_offsets", {"from_group": from_group, "to_group": to_group, "topic": topic}
            ),
            dict[int, int],
        )
        return answer

    def sync_lite_subscription(
        self,
        group: str,
        topic: str,
        *,
        client_id: str,
        action: str,
        lite_topics: Sequence[str] = (),
    ) -> list[str]:
        """Change the lite topics that a client subscribes to.

        Messages that wait in them are delivered from the group's offset on. The subscription
        lasts until the client ends it, across restarts of the client and of the broker.

        Args:
            group: consumer group of the client.
            topic: topic of type lite.
            client_id: client that subscribes.
            action: add or remove these lite topics, replace all by these, or clear.
            lite_topics: names of message groups.

        Returns:
            All lite topics of the client from now on.

        Raises:
            MessageTypeError: the topic is not of type lite.
            IllegalLiteTopicError: a name is not a valid message group.
            LiteSubscriptionQuotaError: the client would have too many.
        """
        answer: list[str] = restored(
            self.call(
                "sync_lite_subscription",
                {
                    "group": group,
                    "topic": topic,
                    "client_id": client_id,
                    "action": action,
                    "lite_topics": lite_topics,
                },
            ),
            list[str],
        )
        return answer

    def lite_subscriptions(self, group: str, topic: str) -> pa.Table:
        """Return client_id and lite_topic of all subscriptions, in this order."""
        answer: pa.Table = self.call("lite_subscriptions", {"group": group, "topic": topic})
        return answer

    # -------------------------------------------------- Reading by offset, lag, keyed state and SQL

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
        answer: pa.Table = self.call(
            "read",
            {
                "topic": topic,
                "queue_id": queue_id,
                "offset": offset,
                "limit": limit,
                "filter": filter,
                "filter_type": filter_type,
            },
        )
        return answer

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """Return the first offset that was stored at or after a time, else the end of the queue."""
        answer: int = self.call("offset_at", {"topic": topic, "queue_id": queue_id, "at_ms": at_ms})
        return answer

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
        answer: pa.Table = self.call(
            "reset_offset",
            {
                "group": group,
                "topic": topic,
                "to_offset": to_offset,
                "to_time_ms": to_time_ms,
                "to_latest": to_latest,
                "to_earliest": to_earliest,
                "queue_id": queue_id,
            },
        )
        return answer

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
        answer: pa.Table = self.call(
            "update_offsets", {"group": group, "topic": topic, "offsets": offsets}
        )
        return answer

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
        answer: pa.Table = self.call("lag", {"group": group})
        return answer

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
        answer: pa.Table | None = self.call(
            "keyed_state", {"group": group, "topic": topic, "message_groups": message_groups}
        )
        return answer

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
        answer: pa.Table = self.call(
            "keyed_state_history", {"group": group, "topic": topic, "places": places}
        )
        return answer

    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """Run one SELECT over the documented views; it sees everything that was answered before.

        Args:
            query: DuckDB's SQL.
            timeout_s: time limit of the query.

        Raises:
            QueryError: the query is no single SELECT, does not parse, or ran out of time or memory.
            ForbiddenError: it names bodies of messages, and the caller lacks get or sub on a topic.
        """
        answer: pa.Table = self.call("sql", {"query": query, "timeout_s": timeout_s})
        return answer

    # ------------------------------------------------------------------ Background work and windows

    def due(self) -> dict[str, Any]:
        """Return the due work of each upkeep job, and what each group can receive of each topic."""
        answer: dict[str, Any] = self.call("due", {})
        return answer

    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool = False
    ) -> dict[str, Any]:
        """Open the only window of this name (``upkeep/<job>`` or ``consumer/<group>``).

        Args:
            name: name of the window.
            owner: identifies the caller; its own window is opened again.
            duration_ms: the window ends then unless it is renewed.
            takeover: end another owner's window; its leases end at once.

        Returns:
            {"epoch"}, or {"yielded_to", "epoch", "expires_at_ms"} if another owner has it.
        """
        answer: dict[str, Any] = self.call(
            "open_window",
            {"name": name, "owner": owner, "duration_ms": duration_ms, "takeover": takeover},
        )
        return answer

    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Let the window end ``duration_ms`` from now.

        Raises:
            FencedError: a newer window has taken over.
        """
        answer: dict[str, Any] = self.call(
            "renew_window", {"name": name, "epoch": epoch, "duration_ms": duration_ms}
        )
        return answer

    def close_window(self, name: str, *, epoch: int) -> None:
        """End a window, so that the next one can open."""
        self.call("close_window", {"name": name, "epoch": epoch})

    def deliver_scheduled(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Move due scheduled messages to their topics, each at its millisecond.

        Args:
            wait_ms: deliver messages that come due within this time, too.
            limit: number of messages at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"delivered", "dropped", "per_level", "lateness_ms": {"p50", "p99", "max"},
            "next_due_ms"}; the keys of per_level are text.
        """
        answer: dict[str, Any] = self.call(
            "deliver_scheduled", {"wait_ms": wait_ms, "limit": limit, "window": window}
        )
        return answer

    def revive(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Record ended leases, and dead-letter or park messages without attempts left.

        Args:
            wait_ms: wait this long for the first lease to end.
            limit: number of leases at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"revived", "parked", "dead_lettered", "next_visible_ms", "dead_letter_failures"}. The
            last one counts exhausted messages that cannot be read or copied now.
        """
        answer: dict[str, Any] = self.call(
            "revive", {"wait_ms": wait_ms, "limit": limit, "window": window}
        )
        return answer

    def seal(
        self, *, limit_bytes: int = limits.LOG_FILE_BYTES, window: Window | None = None
    ) -> dict[str, Any]:
        """Write old log files into Parquet segments and delete log files that are not needed.

        Args:
            limit_bytes: of log to write.
            window: refuse the call when this window has been taken over.

        Returns:
            {"segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files"}.
        """
        answer: dict[str, Any] = self.call("seal", {"limit_bytes": limit_bytes, "window": window})
        return answer

    # ------------------------------------------------------------------------------- Files of sinks

    def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
        """Return the files that belong to a group's sink, in the order they were added.

        Files whose paths are not below the sink are left out and reported in the log.

        Args:
            group: consumer group of the sink.
            removed: return the files that were replaced in the last 30 days instead.

        Returns:
            schema.SINK_FILE, epoch, at_ms, version; of removed files removed_version and
            removed_at_ms, too. The schema's metadata has the ``version`` of the sink and the
            broker's time, ``at_ms``.
        """
        answer: pa.Table = self.call("sink_files", {"group": group, "removed": removed})
        return answer

    def replace_sink_files(
        self,
        group: str,
        *,
        replacement_id: str,
        add: pa.Table,
        remove: Sequence[str],
        partitions: Sequence[str] = (),
        window: Window | None = None,
        reason: str = "",
    ) -> dict[str, Any]:
        """Replace files of a group's sink by others, all or none.

        The call may run while a window of the group is open; the window goes on to settle.

        Args:
            group: consumer group of the sink.
            replacement_id: repeating a replacement under its id returns the same answer and does
                nothing.
            add: schema.SINK_FILE, files that exist; may be empty.
            remove: paths of files that belong to the sink; may be empty.
            partitions: partitions that are replaced as a whole: the call is refused if they have
                other files.
            window: name and epoch of the window that does the work.
            reason: text for the view ``sink_replacements``.

        Returns:
            {"version", "added", "removed"}: of the sink, and the paths.

        Raises:
            SinkChangedError: the sink does not have these files; nothing was changed.
            FencedError: a newer window of that name has taken over.
        """
        answer: dict[str, Any] = self.call(
            "replace_sink_files",
            {
                "group": group,
                "replacement_id": replacement_id,
                "add": add,
                "remove": remove,
                "partitions": partitions,
                "window": window,
                "reason": reason,
            },
        )
        return answer

    # --------------------------------------------------------------------------------- Transactions

    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        """Store half messages, all or none: no consumer sees one before it is committed.

        Args:
            topic: topic of the messages.
            messages: schema.SEND, without message groups and delays.
            producer_group: producers that the broker asks about open transactions.
            immunity_ms: time before the first check; None: the broker's setting, 6 s.

        Returns:
            schema.SENT_HALF, row for row.
        """
        answer: pa.Table = self.call(
            "send_half",
            {
                "topic": topic,
                "messages": messages,
                "producer_group": producer_group,
                "immunity_ms": immunity_ms,
            },
        )
        return answer

    def end_transactions(
        self,
        resolutions: pa.Table,
        *,
        producer_group: str | None = None,
        window: Window | None = None,
    ) -> pa.Table:
        """End transactions, all or none. Repeating the same resolution does nothing.

        Args:
            resolutions: schema.RESOLUTION; unknown leaves a transaction open.
            producer_group: group that began them; None is not compared.
            window: name and epoch of the window that decides.

        Returns:
            schema.ENDED, row for row.

        Raises:
            TransactionNotFoundError: the broker never returned such an id.
            TransactionEndedError: the transaction was ended otherwise before.
            TransactionError: the transaction is of another producer group.
            FencedError: a newer window has taken over.
        """
        answer: pa.Table = self.call(
            "end_transactions",
            {"resolutions": resolutions, "producer_group": producer_group, "window": window},
        )
        return answer

    def fetch_checks(
        self,
        *,
        topics: Sequence[str] | None = None,
        producer_group: str | None = None,
        client_id: str = "",
        limit: int = 1_000,
        wait_ms: int = 0,
        window: Window | None = None,
        holder: str = "",
    ) -> pa.Table:
        """Take half messages whose outcome the broker asks for; each is given to one caller.

        Args:
            topics: only half messages for these topics.
            producer_group: only those of this group, as one of its producers. None: those of groups
                without a producer that has asked within a minute.
            client_id: caller, for the log.
            limit: number of rows at most.
            wait_ms: how long to wait for the first.
            window: refuse the call when this window has been taken over.
            holder: id of the caller, for ``keep_checks``.

        Returns:
            schema.CHECK.
        """
        answer: pa.Table = self.call(
            "fetch_checks",
            {
                "topics": topics,
                "producer_group": producer_group,
                "client_id": client_id,
                "limit": limit,
                "wait_ms": wait_ms,
                "window": window,
                "holder": holder,
            },
        )
        return answer

    def keep_checks(self, holder: str, checks: pa.Table | None = None) -> int:
        """Keep checks for a caller that is still working on them.

        For a minute the broker gives them to no other caller and counts no check.

        Args:
            holder: the id under which they were fetched. It has these checks and no others from
                now on.
            checks: schema.CHECK_ID. A broker that has forgotten them, after a restart or a minute
                without a call, keeps them again. An empty table releases all. None: what the
                holder fetched last.

        Returns:
            The number of checks that the holder has. Where it named more, the others have ended,
            or another holder has them.

        Raises:
            TransactionNotFoundError: the broker never returned such an id.
        """
        answer: int = self.call("keep_checks", {"holder": holder, "checks": checks})
        return answer

    def check_transactions(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Count and offer the checks that are due.

        Args:
            wait_ms: wait this long for the first.
            limit: number of checks at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"checked", "given_up", "dropped", "next_due_ms"}.
        """
        answer: dict[str, Any] = self.call(
            "check_transactions", {"wait_ms": wait_ms, "limit": limit, "window": window}
        )
        return answer

    # ------------------------------------------------ Parked messages, redrive and idempotency keys

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
        answer: dict[str, int] = restored(
            self.call(
                "unpark",
                {"group": group, "topic": topic, "message_groups": message_groups, "skip": skip},
            ),
            dict[str, int],
        )
        return answer

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
        answer: pa.Table = self.call(
            "redrive", {"group": group, "dead_letters": dead_letters, "redrive_id": redrive_id}
        )
        return answer

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Return which idempotency keys the group has recorded within its window.

        Args:
            group: consumer group.
            keys: schema.IDEMPOTENCY_KEY.

        Returns:
            schema.SEEN, row for row; seen_at_ms is null for an unknown key.
        """
        answer: pa.Table = self.call("seen_before", {"group": group, "keys": keys})
        return answer

    # --------------------------------------------------------------------------- Users and policies

    def create_user(
        self, name: str, *, password: str | None = None, type: str = "normal"
    ) -> dict[str, Any]:
        """Create a user; with the first user access control is on.

        Args:
            name: name of the user.
            password: None: the broker makes one and returns it this once.
            type: normal (policies allow things), or super (allowed everything).

        Returns:
            The user's fields, and ``password`` if the broker made it.

        Raises:
            AlreadyExistsError: a user of this name exists.
        """
        answer: dict[str, Any] = self.call(
            "create_user", {"name": name, "password": password, "type": type}
        )
        return answer

    def alter_user(
        self,
        name: str,
        *,
        password: str | None = None,
        renew_password: bool = False,
        type: str | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        """Change the given fields of a user; tokens issued for an older password end.

        Args:
            name: name of the user.
            password: new password.
            renew_password: let the broker make a password and return it this once.
            type: normal or super.
            disabled: True refuses the user.

        Returns:
            The user's fields, and ``password`` if the broker made it.

        Raises:
            NotFoundError: there is no such user.
        """
        answer: dict[str, Any] = self.call(
            "alter_user",
            {
                "name": name,
                "password": password,
                "renew_password": renew_password,
                "type": type,
                "disabled": disabled,
            },
        )
        return answer

    def delete_user(self, name: str) -> dict[str, Any]:
        """Delete a user and its policies; without users everything is allowed.

        Returns:
            {"policies": number of deleted policies}.

        Raises:
            NotFoundError: there is no such user.
            InUseError: it is the last user, and an endpoint listens beyond loopback.
        """
        answer: dict[str, Any] = self.call("delete_user", {"name": name})
        return answer

    def list_users(self) -> pa.Table:
        """Return name, type, disabled, created_at_ms and altered_at_ms of all users."""
        answer: pa.Table = self.call("list_users", {})
        return answer

    def put_policy(
        self,
        user: str,
        *,
        resource: str,
        actions: str | Sequence[str],
        effect: str = "allow",
        sources: str | Sequence[str] = (),
        tier: str = "custom",
    ) -> dict[str, Any]:
        """Allow or deny a user something; replaces its policy of this resource, effect and tier.

        Args:
            user: name of the user.
            resource: topic:NAME, group:NAME, namespace:NAME or cluster:NAME; NAME may end with a
                star or be one; * alone is everything.
            actions: some of pub, sub, create, update, delete, get, list; or all.
            effect: allow or deny.
            sources: addresses and CIDR blocks of callers that the policy applies to; none: all
                callers.
            tier: custom, or default, which applies only where no custom policy matches.

        Returns:
            The policy's fields.

        Raises:
            NotFoundError: there is no such user.
        """
        answer: dict[str, Any] = self.call(
            "put_policy",
            {
                "user": user,
                "resource": resource,
                "actions": actions,
                "effect": effect,
                "sources": sources,
                "tier": tier,
            },
        )
        return answer

    def delete_policy(
        self, user: str, *, resource: str, effect: str | None = None, tier: str | None = None
    ) -> dict[str, Any]:
        """Delete a user's policies of a resource, all or those of one effect or tier.

        Returns:
            {"deleted": number of policies}.

        Raises:
            NotFoundError: there is no such policy, or no such user.
        """
        answer: dict[str, Any] = self.call(
            "delete_policy", {"user": user, "resource": resource, "effect": effect, "tier": tier}
        )
        return answer

    def list_policies(self, user: str | None = None) -> pa.Table:
        """Return policies (user, resource, effect, actions, sources, tier) of a user, or all."""
        answer: pa.Table = self.call("list_policies", {"user": user})
        return answer

    def explain_access(
        self, user: str, *, resource: str, action: str, source: str = ""
    ) -> dict[str, Any]:
        """Explain which policy allows or denies an action.

        Args:
            user: name of the user.
            resource: TYPE:NAME of one thing.
            action: the action that the user would do.
            source: IP address of the call.

        Returns:
            {"allowed", "because", "policy"}: the policy's fields, or None.

        Raises:
            NotFoundError: there is no such user.
        """
        answer: dict[str, Any] = self.call(
            "explain_access",
            {"user": user, "resource": resource, "action": action, "source": source},
        )
        return answer

    # ------------------------------------------------------------------------------------ Operators

    def promote(self, *, force: bool = False) -> dict[str, Any]:
        """Let a standby begin to lead; return {"role", "epoch"} once it does.

        Args:
            force: begin also while another broker leads. That one ends, and has answered nothing
                that is not stored, if its setting replication is sync. With async, its last
                answers may be lost.

        Raises:
            ConflictError: this broker is no standby.
            LogHeldError: another broker leads.
            LogStoreError: the store does not answer in time; the standby goes on trying.
        """
        answer: dict[str, Any] = self.call("promote", {"force": force})
        return answer

    def ping(self) -> dict[str, Any]:
        """Return {"pid"} of the broker's process; every authenticated caller may ask."""
        answer: dict[str, Any] = self.call("ping", {})
        return answer

    def status(self) -> dict[str, Any]:
        """Return versions, home, process, log positions, memory, counts and flags of the broker."""
        answer: dict[str, Any] = self.call("status", {})
        return answer

    def metrics(self) -> pa.Table:
        """Return samples of all metrics, as docs/metrics.md lists them; cheap enough for scrapes.

        Counters begin at 0 when the broker starts.

        Returns:
            name; type (counter, gauge or histogram); part (of a histogram: bucket, sum or count;
            else empty); labels; value; unit; help.
        """
        answer: pa.Table = self.call("metrics", {})
        return answer


#: By name.
VERBS: Final[Mapping[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb("create_topic"),
        Verb("ensure_topic", repeatable=True),
        Verb("alter_topic"),
        Verb("delete_topic"),
        Verb("list_topics", repeatable=True),
        Verb("describe_topic", repeatable=True),
        Verb("create_group"),
        Verb("ensure_group", repeatable=True),
        Verb("alter_group"),
        Verb("delete_group"),
        Verb("list_groups", repeatable=True),
        Verb("describe_group", repeatable=True),
        Verb("subscribe", repeatable=True),
        Verb("compact", repeatable=True),
        Verb("plan_compaction", repeatable=True),
        Verb("replace_segments", repeatable=True),
        Verb("find", repeatable=True),
        Verb("archive", repeatable=True),
        Verb("expire", repeatable=True),
        Verb("copy_state", repeatable=True),
        Verb("send", tables=("messages",), quick=True),
        Verb("recall", tables=("handles",), quick=True),
        Verb("receive", tables=("ack",)),
        Verb("ack", tables=("receipts",), quick=True),
        Verb("change_invisible_duration", tables=("receipts",), quick=True),
        Verb("forward_to_dead_letter_queue", tables=("receipts",), quick=True),
        Verb(
            "settle",
            tables=("outcomes", "sink_files", "state"),
            table_maps=("publish",),
            repeatable_with=("settle_id", "window"),
            quick=True,
        ),
        Verb("heartbeat", repeatable=True),
        Verb("leave", repeatable=True),
        Verb("lock_queues", repeatable=True, quick=True),
        Verb("unlock_queues", repeatable=True, quick=True),
        Verb("release", tables=("receipts",), quick=True),
        Verb("pull", repeatable=True),
        Verb("commit_offsets", repeatable=True, quick=True),
        Verb("committed_offsets", repeatable=True, quick=True),
        Verb("start_offsets", repeatable=True),
        Verb("clone_offsets"),
        Verb("sync_lite_subscription", repeatable=True),
        Verb("lite_subscriptions", repeatable=True),
        Verb("read", repeatable=True),
        Verb("offset_at", repeatable=True, quick=True),
        Verb("reset_offset"),
        Verb("update_offsets", repeatable=True, quick=True),
        Verb("lag", repeatable=True),
        Verb("keyed_state", tables=("message_groups",), repeatable=True),
        Verb("keyed_state_history", tables=("places",), repeatable=True),
        Verb("sql", repeatable=True),
        Verb("due", repeatable=True),
        Verb("open_window", repeatable=True),
        Verb("renew_window", repeatable=True),
        Verb("close_window", repeatable=True),
        Verb("deliver_scheduled", repeatable=True),
        Verb("revive", repeatable=True),
        Verb("seal", repeatable=True),
        Verb("sink_files", repeatable=True),
        Verb("replace_sink_files", tables=("add",), repeatable=True),
        Verb("send_half", tables=("messages",), quick=True),
        Verb("end_transactions", tables=("resolutions",), repeatable=True, quick=True),
        Verb("fetch_checks"),
        Verb("keep_checks", tables=("checks",), repeatable=True),
        Verb("check_transactions", repeatable=True),
        Verb("unpark", tables=("message_groups",)),
        Verb("redrive", tables=("dead_letters",), repeatable=True),
        Verb("seen_before", tables=("keys",), repeatable=True, quick=True),
        Verb("create_user"),
        Verb("alter_user"),
        Verb("delete_user"),
        Verb("list_users", repeatable=True),
        Verb("put_policy", repeatable=True),
        Verb("delete_policy"),
        Verb("list_policies", repeatable=True),
        Verb("explain_access", repeatable=True),
        Verb("promote"),
        Verb("ping", repeatable=True, quick=True),
        Verb("status", repeatable=True),
        Verb("metrics", repeatable=True),
    )
}
