"""Messages by lease: the broker knows who has them, and how often they were tried."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.consumer.verbs import Verbs
from rmq_pipeline.errors import QueueLockedError


class Leasing:
    """Receives messages of the queues that this member owns."""

    def __init__(
        self,
        verbs: Verbs,
        group: str,
        *,
        client_id: str,
        lease_ms: int,
        begin_anew: Callable[[ProcessQueue], None] | None,
    ) -> None:
        """Lease nothing yet.

        Args:
            lease_ms: long where the queues are locked, as a lock that ends ends its leases; short
                where somebody renews them.
            begin_anew: puts another ProcessQueue, an unsure one, in the place of one; None where
                queues are not locked.
        """
        self._verbs, self._group = verbs, group
        self._client_id, self._lease_ms = client_id, lease_ms
        self._begin_anew = begin_anew

    def pull(
        self,
        subscription: Subscription,
        queues: Sequence[ProcessQueue],
        *,
        limit: int,
        max_bytes: int,  # noqa: ARG002 - the broker counts messages here, not bytes
        wait_ms: int,
    ) -> pa.Table:
        """Messages of these queues, schema.RECEIVED.

        Raises:
            QueueLockedError: somebody else has locked one of them meanwhile.
        """
        self._make_sure(subscription.topic, [queue for queue in queues if queue.unsure])
        ids = [queue.queue.queue_id for queue in queues if not (queue.dropped or queue.unsure)]
        if not ids:
            return schema.RECEIVED.empty_table()
        return self._verbs.receive(
            subscription.topic,
            self._group,
            limit=limit,
            invisible_duration_ms=self._lease_ms,
            filter=subscription.filter,
            filter_type=subscription.filter_type,
            wait_ms=wait_ms,
            client_id=self._client_id,
            queue_ids=ids,
        )

    def handed_on(self, queues: Sequence[ProcessQueue]) -> None:
        """Nothing is to be noted: the broker knows."""

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """Messages may be leased to this client that it never got.

        Where the queue is locked nobody else would, and what follows must not overtake them.
        """
        if self._begin_anew is not None:
            for queue in queues:
                self._begin_anew(queue)

    def _make_sure(self, topic: str, queues: Sequence[ProcessQueue]) -> None:
        """Let all leases of locked queues end: unlocking does that, and locking them again."""
        with ExitStack() as relocked:
            ours = [queue for queue in queues if relocked.enter_context(queue.relocking())]
            if not ours:
                return
            self._unlock(topic, ours)
            locked = self._verbs.lock_queues(
                self._group, topic, queue_ids=_ids(ours), client_id=self._client_id
            )
            # Whoever dropped one may have grown tired of waiting, and unlocked it before.
            self._unlock(topic, [queue for queue in ours if queue.dropped])
        for queue in ours:
            queue.unsure = queue.queue.queue_id not in locked
        theirs = [queue for queue in ours if queue.unsure and not queue.dropped]
        if theirs:
            # Of this queue only: the others are to be pulled all the same.
            error = QueueLockedError(f"{theirs[0].queue.key} has another owner now.")
            error.queue_id = theirs[0].queue.queue_id
            raise error

    def _unlock(self, topic: str, queues: Sequence[ProcessQueue]) -> None:
        if queues:
            self._verbs.unlock_queues(
                self._group, topic, queue_ids=_ids(queues), client_id=self._client_id
            )


def _ids(queues: Sequence[ProcessQueue]) -> list[int]:
    return [queue.queue.queue_id for queue in queues]
