"""Membership, queue locks and reading by offset, from another process."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rmq_pipeline import limits
from rmq_pipeline.flight.calls import Calls, Receipts
from rmq_pipeline.pulled import Pulled


class Consumers(Calls):
    """The verbs of consumers that share queues among themselves, or read them by offset."""

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

        A member is gone 120 s after its last heartbeat, and 2 s after one that waited was cut off.

        Args:
            details: what the client says of itself, for people to see; plain JSON.
            known_version: wait while the group has this version; -1 never waits.

        Returns:
            version; members, by client_id: topics; resets, by topic and queue_id: how often the
            group was put elsewhere there. version changes when members or their topics do, and
            when the group is put elsewhere in a topic of theirs.
        """
        answer = self._facts(
            "heartbeat",
            group=group,
            client_id=client_id,
            topics=topics if isinstance(topics, str) else list(topics),
            details=dict(details),
            known_version=known_version,
            wait_ms=wait_ms,
        )
        resets = answer["resets"].items()
        return {**answer, "resets": {topic: _by_queue(counts) for topic, counts in resets}}

    def leave(self, group: str, client_id: str) -> None:
        """Be a member no more: at once, and the queues that the client has locked are unlocked."""
        self._connection.call("leave", {"group": group, "client_id": client_id})

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
        args = {
            "group": group,
            "topic": topic,
            "queue_ids": list(queue_ids),
            "client_id": client_id,
            "duration_ms": duration_ms,
        }
        return list(self._connection.call("lock_queues", args))

    def unlock_queues(
        self, group: str, topic: str, *, queue_ids: Sequence[int], client_id: str
    ) -> list[int]:
        """Let queues go, and what was delivered of them; those that the client had locked."""
        args = {
            "group": group,
            "topic": topic,
            "queue_ids": list(queue_ids),
            "client_id": client_id,
        }
        return list(self._connection.call("unlock_queues", args))

    def release(self, receipts: Receipts) -> None:
        """Give deliveries back as if they had not been, all or none.

        What is delivered behind them in their message groups is given back with them.

        Raises:
            ReceiptHandleError: one of them has ended.
        """
        self._connection.call("release", {"receipts": receipts})

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
        table = self._table(
            "pull",
            topic=topic,
            positions=dict(positions),
            limit=limit,
            max_bytes=max_bytes,
            filter=filter,
            filter_type=filter_type,
            wait_ms=wait_ms,
        )
        return Pulled.from_table(table)

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
        facts = self._facts(
            "commit_offsets",
            group=group,
            topic=topic,
            offsets=dict(offsets),
            client_id=client_id,
            resets=None if resets is None else dict(resets),
        )
        return _by_queue(facts)

    def committed_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """Where a group is in a topic, and how often somebody has put it there.

        Returns:
            queue_id -> the committed offset, -1 for none, and the number of resets; every queue.
        """
        facts = self._facts("committed_offsets", group=group, topic=topic)
        return {int(queue_id): (offset, resets) for queue_id, (offset, resets) in facts.items()}

    def start_offsets(
        self, group: str, topic: str, *, where: Literal["last", "first"] | int
    ) -> dict[int, int]:
        """Begin with a topic at its ``last`` or ``first`` message, or at a moment in ms.

        What the group has begun with stays as it is. Once that is any queue of the topic, others
        are begun with their first message: they were added since, and nothing of them is lost.

        Returns:
            queue_id -> the committed offset of every queue.
        """
        return _by_queue(self._facts("start_offsets", group=group, topic=topic, where=where))

    def clone_offsets(self, from_group: str, to_group: str, *, topic: str) -> dict[int, int]:
        """Put a group where another one is; its leases and waiting message groups are gone.

        Returns:
            queue_id -> the offset, for each queue that the other group has begun with.
        """
        facts = self._facts("clone_offsets", from_group=from_group, to_group=to_group, topic=topic)
        return _by_queue(facts)


def _by_queue(facts: Mapping[str, int]) -> dict[int, int]:
    """JSON has no numbers for names."""
    return {int(queue_id): number for queue_id, number in facts.items()}
