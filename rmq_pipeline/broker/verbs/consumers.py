"""What consumers do that share queues among themselves, or read them by offset."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import arguments, queries
from rmq_pipeline.broker.committing import (
    CloneOffsets,
    CommitOffsets,
    Places,
    Resets,
    StartOffsets,
)
from rmq_pipeline.broker.members import membership
from rmq_pipeline.broker.members.locking import LockQueues, UnlockMember, UnlockQueues
from rmq_pipeline.broker.pulling import Pull, pull
from rmq_pipeline.broker.settling.each import Release
from rmq_pipeline.broker.settling.settling import receipts_of
from rmq_pipeline.broker.verbs.opened import Opened
from rmq_pipeline.errors import RequestError
from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.pulled import Pulled


class Consumers(Opened):
    """Membership, queue locks, reading by offset."""

    def heartbeat(
        self,
        group: str,
        client_id: str,
        *,
        topics: Sequence[str],
        details: Mapping[str, Any],
        known_version: int = -1,
        wait_ms: int = 0,
    ) -> dict[str, Any]:
        """Be a member of a consumer group, and learn who else is.

        Args:
            details: what the client says of itself, for people to see; plain JSON.
            known_version: wait while the group has this version; -1 never waits.

        Returns:
            version; members, by client_id: topics; resets, by topic and queue_id: how often the
            group was put elsewhere there. version changes when members or their topics do, and
            when the group is put elsewhere in a topic of theirs.
        """
        engine = self._engine
        engine.state.group(group)
        engine.members.heard(
            group,
            arguments.client(client_id),
            topics=membership.topics_in(topics),
            details=membership.details_in(details),
        )
        return self.await_change(
            group,
            client_id,
            topics=topics,
            details=details,
            known_version=known_version,
            wait_ms=wait_ms,
        )

    def await_change(
        self,
        group: str,
        client_id: str,
        *,
        topics: Sequence[str],
        details: Mapping[str, Any],
        known_version: int,
        wait_ms: int,
    ) -> dict[str, Any]:
        """The waiting of a heartbeat without its beat; for doors that wait in slices."""
        engine = self._engine
        until_ms = engine.clock.now_ms() + arguments.poll_ms(wait_ms)
        while True:
            engine.members.let_go(engine.submit, group=group)
            engine.state.group(group)
            version, members = engine.members.topics_of(group)
            if not engine.members.wait(
                group, client_id, known_version=known_version, at_ms=until_ms
            ):
                break
        resets = engine.submit(Resets(group, membership.topics_in(topics)))
        return {"version": version, "members": members, "resets": resets}

    def cut_off(self, group: str, client_id: str) -> None:
        """Tell that a waiting heartbeat has lost its caller; for doors that notice."""
        self._engine.members.cut_off(group, client_id)

    def leave(self, group: str, client_id: str) -> None:
        """Be a member no more: at once, and the queues that the client has locked are unlocked."""
        engine = self._engine
        engine.state.group(group)
        left = UnlockMember(group, arguments.client(client_id))
        try:
            engine.submit(left)
        finally:  # who learns of it finds the queues unlocked
            engine.members.leave(group, client_id)

    def lock_queues(
        self,
        group: str,
        topic: str,
        *,
        queue_ids: Sequence[int],
        client_id: str,
        duration_ms: int = limits.QUEUE_LOCK_MS,
    ) -> list[int]:
        """Have queues to oneself for a while; those that the client holds from now on.

        Whoever had a queue before has it no more: what was delivered of it is given back, no
        attempt counted, and the receipts are void. Who asks again in time keeps what it has.
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

    def unlock_queues(
        self, group: str, topic: str, *, queue_ids: Sequence[int], client_id: str
    ) -> list[int]:
        """Let queues go, and what was delivered of them; those that the client had locked."""
        request = UnlockQueues(
            group, topic, arguments.queues(queue_ids), arguments.client(client_id)
        )
        unlocked: list[int] = self._engine.submit(request)
        return unlocked

    def release(self, receipts: pa.Table | Sequence[str]) -> None:
        """Give deliveries back as if they had not been: all, or ReceiptHandleError and none.

        What is delivered behind them in their message groups is given back with them.
        """
        given = receipts_of(receipts)
        if len(given):
            self._engine.submit(Release(given))

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
    ) -> Pulled:
        """Read messages of several queues from offsets on, without a lease and without a group.

        Args:
            positions: queue_id -> the first offset to look at; one that has expired stands for
                the first that has not.
            limit: messages at most.
            max_bytes: of bodies; one message comes however large it is.
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

    def commit_offsets(
        self,
        group: str,
        topic: str,
        *,
        offsets: Mapping[int, tuple[int, int]],
        client_id: str = "",
        resets: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Say how far a group is that keeps its own offsets, unless somebody has moved it.

        Args:
            offsets: queue_id -> (the committed offset that the caller knows, the new one). Where
                the group is elsewhere it stays there; -1 for the first is any place.
            client_id: who says so; needed where a queue is locked.
            resets: queue_id -> how often the group was put elsewhere, as ``committed_offsets``
                said. Where it was once more, be it to where it is, nothing is changed.

        Returns:
            queue_id -> the committed offset now.

        Raises:
            QueueLockedError: another client has locked a queue; none was changed.
            IllegalOffsetError: there is no such queue, or it ends before the offset.
            InUseError: the broker has delivered messages of the queue that are not settled.
        """
        arguments.check_readable(topic)
        known = arguments.offsets(resets) if resets else {}
        who = arguments.text(client_id, "client_id")
        request = CommitOffsets(group, topic, arguments.changes(offsets), who, known)
        committed: dict[int, int] = self._engine.submit(request)
        return committed

    def committed_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """Where a group is in a topic, and how often somebody has put it there.

        Returns:
            queue_id -> the committed offset, -1 for none, and the number of resets; every queue.
        """
        arguments.check_readable(topic)
        places: dict[int, tuple[int, int]] = self._engine.submit(Places(group, topic))
        return places

    def start_offsets(
        self, group: str, topic: str, *, where: Literal["last", "first"] | int
    ) -> dict[int, int]:
        """Begin with a topic at its ``last`` or ``first`` message, or at a moment in ms.

        What the group has begun with stays as it is. Once that is any queue of the topic, others
        are begun with their first message: they were added since, and nothing of them is lost.

        Returns:
            queue_id -> the committed offset of every queue.
        """
        arguments.check_readable(topic)
        engine = self._engine
        start: Literal["last", "first"] | dict[int, int]
        if where in ("last", "first"):
            start = where
        elif isinstance(where, int) and not isinstance(where, bool):
            queues = range(engine.state.topic(topic).topic.queues)
            start = {
                queue_id: queries.offset_at(engine, topic, queue_id=queue_id, at_ms=where)
                for queue_id in queues
            }
        else:
            raise RequestError(f"where is last, first, or a moment in ms, not {where!r}.")
        committed: dict[int, int] = engine.submit(StartOffsets(group, topic, start))
        return committed

    def clone_offsets(self, from_group: str, to_group: str, *, topic: str) -> dict[int, int]:
        """Put a group where another one is; its leases and waiting message groups are gone.

        Returns:
            queue_id -> the offset, for each queue that the other group has begun with.
        """
        arguments.check_readable(topic)
        cloned: dict[int, int] = self._engine.submit(CloneOffsets(from_group, to_group, topic))
        return cloned
