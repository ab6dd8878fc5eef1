"""Verbs: members, queue locks, offsets and lite topics of consumers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.access.rights import CONSUMES, SETTLES, Rights, on_group, on_topic
from rmq_pipeline.broker.decide.group_offsets import (
    CloneOffsets,
    CommitOffsets,
    Places,
    Resets,
    StartOffsets,
)
from rmq_pipeline.broker.decide.members import (
    LockQueues,
    SyncLiteSubscription,
    UnlockMember,
    UnlockQueues,
    lite_topic,
)
from rmq_pipeline.broker.decide.settle_each import Release
from rmq_pipeline.broker.state.members import check_client, check_names
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import arguments, membership, queries, waiting
from rmq_pipeline.broker.work.lookup import Pull, pull
from rmq_pipeline.broker.work.settle import receipts_of
from rmq_pipeline.errors import RequestError
from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.group import GroupMembers
from rmq_pipeline.verb import PullResult, Receipts


class Consumers(Opened):
    """Verbs for members, queue locks, offsets and lite topics of consumers."""

    @verb(rights=Rights(topic=("topics", "sub"), group=("group", "sub")), repeatable=True)
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
        engine = self._engine
        engine.state.group(group)
        known_by, said = arguments.client(client_id), membership.details_in(details)
        subscribed = membership.topics_in(topics)
        waits = arguments.poll_ms(wait_ms) > 0
        engine.members.replaced(engine.submit, group=group, client_id=known_by, details=said)
        engine.members.heard(group, known_by, topics=subscribed, details=said, waits=waits)
        until_ms = engine.clock.now_ms() + arguments.poll_ms(wait_ms)
        while True:
            engine.members.let_go(engine.submit, group=group)
            engine.state.group(group)
            version, members = engine.members.topics_of(group)
            if waiting.waits_no_more() or not engine.members.wait(
                group, client_id, known_version=known_version, at_ms=until_ms
            ):
                break
        if waits and waiting.is_gone():
            engine.members.cut_off(group, client_id)
        resets = engine.submit(Resets(group, subscribed))
        answer: GroupMembers = {"version": version, "members": members, "resets": resets}
        if suspects := engine.members.suspects_of(group, subscribed):
            answer["suspects"] = suspects
        mixed = engine.filters.mixed(group)
        if told := {topic: mixed[topic] for topic in subscribed if topic in mixed}:
            answer["mixed_filters"] = told
        return answer

    @verb(rights=on_group("sub"), repeatable=True)
    def leave(self, group: str, client_id: str) -> None:
        """Leave a consumer group at once; the client's queue locks end."""
        engine = self._engine
        engine.state.group(group)
        left = UnlockMember(group, arguments.client(client_id))
        try:
            engine.submit(left)
        finally:  # members that see the change find the queues unlocked
            engine.members.leave(group, client_id)

    @verb(rights=CONSUMES, repeatable=True, quick=True)
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
        arguments.check_readable(topic)
        request = LockQueues(
            group,
            topic,
            arguments.queues(queue_ids),
            arguments.client(client_id),
            arguments.lock_ms(duration_ms),
        )
        locked: list[int] = self._engine.submit(request)
        return locked

    @verb(rights=CONSUMES, repeatable=True, quick=True)
    def unlock_queues(
        self, group: str, topic: str, *, queue_ids: Sequence[int], client_id: str
    ) -> list[int]:
        """Unlock queues and release their deliveries.

        Returns:
            The queues that the client had locked.
        """
        request = UnlockQueues(
            group, topic, arguments.queues(queue_ids), arguments.client(client_id)
        )
        unlocked: list[int] = self._engine.submit(request)
        return unlocked

    @verb(rights=SETTLES, quick=True)
    def release(self, receipts: Receipts) -> None:
        """Release deliveries uncounted, all or none: the messages can be received again at once.

        Later deliveries of the same message groups are released with them.

        Args:
            receipts: a table with the column receipt_handle, or the handles.

        Raises:
            ReceiptHandleError: a receipt has ended.
        """
        given = receipts_of(receipts)
        if len(given):
            self._engine.submit(Release(given))

    @verb(rights=on_topic("sub"), repeatable=True)
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
        arguments.check_readable(topic)
        asked = Pull(
            topic,
            arguments.offsets(positions),
            arguments.count(limit, high=limits.RECEIVE_ROWS),
            arguments.max_bytes(max_bytes),
            compile_filter(arguments.expression(filter), filter_type),
        )
        return pull(self._engine, asked, wait_ms=arguments.poll_ms(wait_ms))

    @verb(rights=CONSUMES, repeatable=True, quick=True)
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
        arguments.check_readable(topic)
        known = arguments.offsets(resets) if resets else {}
        who = arguments.text(client_id, "client_id")
        request = CommitOffsets(group, topic, arguments.changes(offsets), who, known)
        committed: dict[int, int] = self._engine.submit(request)
        return committed

    @verb(rights=CONSUMES, repeatable=True, quick=True)
    def committed_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """Return the committed offset of each queue, and how often somebody has reset it.

        Returns:
            queue_id -> (offset, -1 if none; number of resets), for every queue.
        """
        arguments.check_readable(topic)
        places: dict[int, tuple[int, int]] = self._engine.submit(Places(group, topic))
        return places

    @verb(rights=CONSUMES, repeatable=True)
    def start_offsets(
        self, group: str, topic: str, *, where: Literal["last", "first"] | int
    ) -> dict[int, int]:
        """Begin a topic at its ``last`` or ``first`` message, or at a time in ms since 1970.

        Queues that have a committed offset keep it. If any queue of the topic has one, the others
        begin with their first message: they were added later, and none of their messages is lost.

        Returns:
            queue_id -> the committed offset, for every queue.
        """
        arguments.check_readable(topic)
        engine = self._engine
        start: Literal["last", "first"] | dict[int, int]
        if where in ("last", "first"):
            start = where
        elif isinstance(where, int) and not isinstance(where, bool):
            at_ms = arguments.time_ms(where, "where")
            queues = range(engine.state.topic(topic).topic.queues)
            start = {
                queue_id: queries.offset_at(engine, topic, queue_id=queue_id, at_ms=at_ms)
                for queue_id in queues
            }
        else:
            raise RequestError(f"where must be last, first, or a time in ms, not {where!r}.")
        committed: dict[int, int] = engine.submit(StartOffsets(group, topic, start))
        return committed

    @verb(rights=Rights(group=("to_group", "update"), reads="from_group"))
    def clone_offsets(self, from_group: str, to_group: str, *, topic: str) -> dict[int, int]:
        """Copy the offsets of one group to another, whose leases and waiting message groups end.

        Returns:
            queue_id -> the offset, for each queue that ``from_group`` has begun.
        """
        arguments.check_readable(topic)
        cloned: dict[int, int] = self._engine.submit(CloneOffsets(from_group, to_group, topic))
        return cloned

    @verb(rights=CONSUMES, repeatable=True)
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
        request = SyncLiteSubscription(
            group,
            topic,
            check_client(client_id),
            action,
            check_names(lite_topics),
        )
        after: tuple[str, ...] = self._engine.submit(request)
        return list(after)

    @verb(rights=CONSUMES, repeatable=True)
    def lite_subscriptions(self, group: str, topic: str) -> pa.Table:
        """Return client_id and lite_topic of all subscriptions, in this order."""
        state = self._engine.state
        found = lite_topic(state, topic)
        clients = state.subscriptions.clients(state.group(group).group_id, found.topic.topic_id)
        rows = [(client, name) for client in sorted(clients) for name in clients[client].names]
        return pa.table(
            {
                "client_id": pa.array([client for client, _ in rows], pa.string()),
                "lite_topic": pa.array([name for _, name in rows], pa.string()),
            }
        )
