"""Source of messages by lease: the broker tracks their receivers and attempts."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.errors import QueueLockedError
from rmq_pipeline.verbs import Verbs


class Leasing:
    """Source that receives messages of the queues that this member owns."""

    def __init__(
        self,
        verbs: Verbs,
        group: str,
        *,
        client_id: str,
        lease_ms: int,
        begin_anew: Callable[[ProcessQueue], None] | None,
    ) -> None:
        """Prepare to receive.

        Args:
            lease_ms: long if the queues are locked, because the end of a lock ends its leases;
                short if the settler renews the leases.
            begin_anew: replaces a ProcessQueue by a new one that is ``unsure``; None if queues are
                not locked.
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
        """Receive messages of these queues, schema.RECEIVED.

        Raises:
            QueueLockedError: another client has locked one of the queues.
        """
        self._make_sure(subscription.topic, [queue for queue in queues if queue.unsure])
        ids = [queue.queue.queue_id for queue in queues if not (queue.dropped or queue.unsure)]
        if not ids:
            return schema.RECEIVED.empty_table()
        return self._verbs.receive(
            self._group,
            subscription.topic,
            limit=limit,
            invisible_duration_ms=self._lease_ms,
            filter=subscription.filter,
            filter_type=subscription.filter_type,
            wait_ms=wait_ms,
            client_id=self._client_id,
            queue_ids=ids,
        )

    def handed_on(self, queues: Sequence[ProcessQueue]) -> None:
        """Do nothing: the broker tracks the leases."""

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """Replace locked queues after a pull whose reply was lost.

        The broker may have leased messages that never arrived. No other client gets messages of a
        locked queue, and later messages must not overtake the lost ones.
        """
        if self._begin_anew is not None:
            for queue in queues:
                self._begin_anew(queue)

    def _make_sure(self, topic: str, queues: Sequence[ProcessQueue]) -> None:
        """End all leases of locked queues by unlocking the queues and locking them again."""
        with ExitStack() as relocked:
            ours = [queue for queue in queues if relocked.enter_context(queue.relocking())]
            if not ours:
                return
            self._unlock(topic, ours)
            locked = self._verbs.lock_queues(
                self._group, topic, queue_ids=_ids(ours), client_id=self._client_id
            )
            # A queue dropped meanwhile may have been unlocked before this lock; unlock it again.
            self._unlock(topic, [queue for queue in ours if queue.dropped])
        for queue in ours:
            queue.unsure = queue.queue.queue_id not in locked
        theirs = [queue for queue in ours if queue.unsure and not queue.dropped]
        if theirs:
            # The error names one queue, so that the puller still pulls the others.
            error = QueueLockedError(f"Another client has locked {theirs[0].queue.key}.")
            error.queue_id = theirs[0].queue.queue_id
            raise error

    def _unlock(self, topic: str, queues: Sequence[ProcessQueue]) -> None:
        if queues:
            self._verbs.unlock_queues(
                self._group, topic, queue_ids=_ids(queues), client_id=self._client_id
            )


def _ids(queues: Sequence[ProcessQueue]) -> list[int]:
    return [queue.queue.queue_id for queue in queues]
