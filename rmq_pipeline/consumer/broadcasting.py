"""Messages by offset: every member reads everything, and remembers itself how far it is.

What fails is logged, and not tried again: nobody keeps it for this member (semantics §6.8).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from rmq_pipeline.consumer.kept_offsets import KeptOffsets, Place
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.consumer.verbs import OffsetVerbs
from rmq_pipeline.errors import IllegalOffsetError

log = logging.getLogger(__name__)

#: A file has one owner: where it is believed to be does not matter.
ANYWHERE: Final = Place(-1)

#: How often offsets are kept (semantics §6.10).
KEEP_MS: Final = 5_000


class Reading:
    """Reads on in each queue from where it is."""

    def __init__(self, verbs: OffsetVerbs, *, misplaced: Callable[[ProcessQueue], None]) -> None:
        """Read nothing yet.

        Args:
            misplaced: told of a queue that ends before the offset it was to be read at.
        """
        self._verbs, self._misplaced = verbs, misplaced

    def pull(
        self,
        subscription: Subscription,
        queues: Sequence[ProcessQueue],
        *,
        limit: int,
        max_bytes: int,
        wait_ms: int,
    ) -> pa.Table:
        """Messages of these queues, schema.READ."""
        positions = {queue.queue.queue_id: queue.next_offset for queue in queues}
        try:
            pulled = self._verbs.pull(
                subscription.topic,
                positions,
                limit=limit,
                max_bytes=max_bytes,
                filter=subscription.filter,
                filter_type=subscription.filter_type,
                wait_ms=wait_ms,
            )
        except IllegalOffsetError:
            for queue in queues:
                self._misplaced(queue)
            raise
        for queue in queues:
            queue.read_to = pulled.next_offsets[queue.queue.queue_id]
        return pulled.messages

    def handed_on(self, queues: Sequence[ProcessQueue]) -> None:
        """Read on behind it the next time."""
        for queue in queues:
            if not queue.dropped:
                queue.next_offset = queue.read_to

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """It is read again."""


class KeptPlaces:
    """Where each queue is read on: in a file of this machine."""

    def __init__(self, offsets: KeptOffsets, of_group: KeptOffsets) -> None:
        """Begin no queue yet.

        Args:
            of_group: what the broker has of the group, which a reset changes.
        """
        self._offsets, self._of_group = offsets, of_group
        #: Where queues are to begin anew.
        self._moved: dict[MessageQueue, int] = {}

    def begin(self, queue: ProcessQueue) -> None:
        """Read on where the group was put, where this member was, or where it is to start."""
        to = self._moved.get(queue.queue)
        if to is None:
            queue.next_offset = self._offsets.start(queue.queue).offset
            return
        # How far it was may have been kept once more since, and may be again while this is done.
        self._offsets.commit({queue.queue: (ANYWHERE, to)})
        self._moved.pop(queue.queue, None)
        queue.next_offset = to

    def end(self, queue: ProcessQueue) -> None:
        """Keep how far it was."""
        self._offsets.commit({queue.queue: (ANYWHERE, queue.done_before())})

    def moved(self, queue: MessageQueue) -> None:
        """The group was reset: this member goes there, too."""
        to = self._of_group.committed(queue)
        if to is not None:
            self._offsets.commit({queue: (ANYWHERE, to)})
            self._moved[queue] = to


class Keeper:
    """Where results go that no broker waits for: the offset before which all is done is kept."""

    def __init__(self, offsets: KeptOffsets, *, group: str) -> None:
        self._offsets, self._group = offsets, group

    def settle(self, *parts: Part) -> None:
        """Be done with messages, with those that failed as well."""
        for part in parts:
            if part.outcome != "ack":
                first = part.messages[0]
                log.warning(
                    "group %s is broadcasting and goes on without %d messages from %r: %s",
                    self._group,
                    len(part.messages),
                    first,
                    part.reason,
                )
            for message in part.messages:
                message.queue.remove([message])

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """They are read again: the offset that is kept lies before them."""

    def hurry(self) -> None:
        """Nobody waits: what is read does not depend on what is done."""

    def keep(self, queues: Sequence[ProcessQueue]) -> None:
        """Write down how far each queue is, but not where it is left for another place."""
        moves = {q.queue: (ANYWHERE, q.done_before()) for q in queues if not q.dropped}
        if moves:
            self._offsets.commit(moves)
