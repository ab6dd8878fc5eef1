"""Broadcasting: every member reads all messages by offset and stores its own offsets.

A message that fails is logged and not retried: the broker keeps no retries for single members
(semantics §6.8).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from rmq_pipeline.consumer.message_queue import MessageQueue, Subscription
from rmq_pipeline.consumer.offset_store import OffsetStore, Place
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Part
from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Expected offset of a commit to the file, which has one owner: any offset.
ANYWHERE: Final = Place(-1)

#: Interval between two writes of the offsets (semantics §6.10).
KEEP_MS: Final = 5_000


class Reading:
    """Source that pulls each queue from its next offset."""

    def __init__(self, verbs: Verbs, *, misplaced: Callable[[ProcessQueue], None]) -> None:
        """Prepare to read.

        Args:
            misplaced: called with a queue whose next offset may be past the end of the queue.
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
        """Pull messages of these queues, schema.READ; the limits are those of ``Source``."""
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
        """Advance the next offsets past the pulled messages."""
        for queue in queues:
            if not queue.dropped:
                queue.next_offset = queue.read_to

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """Keep the next offsets, so that the next pull reads the messages again."""


class KeptPlaces:
    """Start and end offsets of each queue, stored in a file of this machine."""

    def __init__(self, offsets: OffsetStore, of_group: OffsetStore) -> None:
        """Use the given stores.

        Args:
            offsets: this member's offsets.
            of_group: the group's offsets at the broker, which a reset changes.
        """
        self._offsets, self._of_group = offsets, of_group
        #: Offsets of resets, by queue, that ``begin`` has not applied yet.
        self._moved: dict[MessageQueue, int] = {}

    def begin(self, queue: ProcessQueue) -> None:
        """Set the next offset: of a reset, else this member's stored one, else its start."""
        to = self._moved.get(queue.queue)
        if to is None:
            queue.next_offset = self._offsets.start(queue.queue).offset
            return
        # A periodic write may have stored the old offset again after the reset, so store the new.
        self._offsets.commit({queue.queue: (ANYWHERE, to)})
        self._moved.pop(queue.queue, None)
        queue.next_offset = to

    def end(self, queue: ProcessQueue) -> None:
        """Store the offset before which all messages are done."""
        self._offsets.commit({queue.queue: (ANYWHERE, queue.done_before())})

    def moved(self, queue: MessageQueue) -> None:
        """Apply a reset of the group to this member's offset."""
        to = self._of_group.committed(queue)
        if to is not None:
            self._offsets.commit({queue: (ANYWHERE, to)})
            self._moved[queue] = to


class Keeper:
    """Results of a broadcasting member: it stores offsets and settles nothing at the broker."""

    def __init__(self, offsets: OffsetStore, *, group: str) -> None:
        self._offsets, self._group = offsets, group

    def settle(self, *parts: Part) -> None:
        """Remove messages from their queues, also those that failed; log the failures."""
        for part in parts:
            if part.outcome != "ack":
                first = part.messages[0]
                log.warning(
                    "group %s is broadcasting and skips %d failed messages from %r: %s",
                    self._group,
                    len(part.messages),
                    first,
                    part.reason,
                )
            for message in part.messages:
                message.queue.remove([message])

    def count(self, part: Part) -> None:
        """Do nothing: the held message counts its own failures."""

    def release(self, messages: Sequence[ReceivedMessage]) -> None:
        """Do nothing: the stored offset precedes these messages, so they are read again."""

    def hurry(self) -> None:
        """Do nothing: reading does not depend on settled messages."""

    def keep(self, queues: Sequence[ProcessQueue]) -> None:
        """Store the offsets of the queues, except dropped ones, which a reset may have moved."""
        moves = {q.queue: (ANYWHERE, q.done_before()) for q in queues if not q.dropped}
        if moves:
            self._offsets.commit(moves)
