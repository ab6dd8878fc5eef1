"""Queues of a pull consumer: fetched, returned, processed and committed offsets of each."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.consumer.message_queue import MessageQueue, Subscription, by_topic
from rmq_pipeline.consumer.offset_store import OffsetStore, Place
from rmq_pipeline.consumer.process_queue import ProcessQueue, Thresholds
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of
from rmq_pipeline.errors import (
    BusyError,
    ConsumerUsageError,
    QueueLockedError,
    RocketMQError,
)
from rmq_pipeline.verb import PullResult

log = logging.getLogger(__name__)

#: Schema of the table that ``poll`` returns.
POLLED: Final = pa.schema([("topic", pa.string()), *schema.READ])


def by_queue(messages: pa.Table) -> dict[int, pa.Table]:
    """Split rows by queue; the rows of each queue must be contiguous."""
    counts = pc.value_counts(messages["queue_id"].combine_chunks())
    parts: dict[int, pa.Table] = {}
    start = 0
    for each in counts.to_pylist():
        parts[each["values"]] = messages.slice(start, each["counts"])
        start += each["counts"]
    return parts


def polled(topic: str, rows: pa.Table) -> pa.Table:
    """Add the topic to rows of schema.READ; the result has the schema POLLED."""
    topics = pa.repeat(pa.scalar(topic, pa.string()), rows.num_rows)
    return rows.add_column(0, POLLED.field("topic"), topics)


def one_by_one(table: pa.Table, *, broker_name: str) -> Iterator[ReceivedMessage]:
    """Yield the rows of a POLLED table as messages."""
    for topic in table["topic"].unique().to_pylist():
        rows = table.filter(pc.equal(table["topic"], topic)).drop_columns("topic")
        queues = {
            queue_id: ProcessQueue(MessageQueue(topic, broker_name, queue_id), now_ms=0)
            for queue_id in rows["queue_id"].unique().to_pylist()
        }
        yield from chain.from_iterable(messages_of(rows, topic, queues=queues).values())


@dataclass(slots=True)
class Position:
    """Queue that is read by offset. ``done`` <= ``at`` <= ``fetch_at``, except after a seek."""

    queue: MessageQueue
    subscription: Subscription
    #: Last known committed offset.
    known: Place
    #: Next offset to fetch, next offset to return, and first offset that is not processed.
    fetch_at: int = field(init=False)
    at: int = field(init=False)
    done: int = field(init=False)
    is_paused: bool = False
    #: The queue is moving to another member; polls return no more of it.
    is_dropping: bool = False
    #: The running fetch does not know the current fetch offset.
    is_moved: bool = True
    #: Fetched tables, each with the offset that follows it.
    _chunks: deque[tuple[pa.Table, int]] = field(default_factory=deque)
    _rows: int = 0
    _bytes: int = 0

    def __post_init__(self) -> None:
        self.fetch_at = self.at = self.done = self.known.offset

    @property
    def waiting(self) -> int:
        """Number of fetched messages that no poll has returned."""
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the fetched messages that no poll has returned."""
        return self._bytes

    @property
    def is_left(self) -> bool:
        """True if the queue is moving to another member and no returned message is unprocessed."""
        return self.is_dropping and self.done == self.at

    @property
    def is_committed(self) -> bool:
        """True if all returned messages are processed and committed."""
        return self.done == self.at == self.known.offset

    def has_room(self, thresholds: Thresholds) -> bool:
        """Return True if more messages may be fetched."""
        return (
            self._rows < thresholds.messages
            and self._bytes < thresholds.bytes
            and self.fetch_at - self.at < thresholds.span
        )

    def add(self, rows: pa.Table, *, start: int, stop: int) -> bool:
        """Add the messages of [start, stop); return False if the position has moved meanwhile."""
        if start != self.fetch_at or self.is_dropping:
            return False
        self.fetch_at = stop
        self._chunks.append((rows, stop))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        self._pass_empty()
        return True

    def take(self, limit: int) -> list[pa.Table]:
        """Remove and return up to ``limit`` messages, in order."""
        taken: list[pa.Table] = []
        while limit > 0 and self._chunks:
            rows, stop = self._chunks.popleft()
            self._rows -= rows.num_rows
            self._bytes -= rows.nbytes
            if rows.num_rows > limit:
                rest = rows.slice(limit)
                self._chunks.appendleft((rest, stop))
                self._rows += rest.num_rows
                self._bytes += rest.nbytes
                rows, stop = rows.slice(0, limit), rest["queue_offset"][0].as_py()
            taken.append(rows)
            limit -= rows.num_rows
            self.at = stop
        self._pass_empty()
        return taken

    def settle(self) -> None:
        """Mark all returned messages as processed."""
        self.done = self.at

    def seek(self, offset: int) -> None:
        """Move to an offset; the next commit commits it."""
        self.clear()
        self.fetch_at = self.at = self.done = offset
        self.is_moved = True

    def release(self, offset: int) -> None:
        """Return messages from an offset on again; processed messages stay processed."""
        self.at = offset
        self.clear()
        self.is_moved = True

    def clear(self) -> None:
        """Drop the messages fetched ahead."""
        self._chunks.clear()
        self._rows = self._bytes = 0
        self.fetch_at = self.at

    def _pass_empty(self) -> None:
        """Skip ranges in which the filter selected no message."""
        while self._chunks and not self._chunks[0][0].num_rows:
            settled = self.done == self.at
            self.at = self._chunks.popleft()[1]
            if settled:
                self.done = self.at


#: Request of a commit: given offsets, or all returned messages of some queues or (None) of all.
Asked = Mapping[MessageQueue, int] | Iterable[MessageQueue] | None


class Reading:
    """Queues of a pull consumer and their owner for the Rebalancer; thread-safe."""

    def __init__(
        self,
        kept: OffsetStore,
        *,
        of_group: OffsetStore,
        thresholds: Thresholds,
        describe: Callable[[dict[str, list[Position]]], dict[str, Any]],
    ) -> None:
        """Start without queues.

        Args:
            kept: the store of this consumer's offsets.
            of_group: the group's offsets at the broker, which a reset changes.
            describe: builds the details of the heartbeat from the positions of each topic.
        """
        self._kept, self._of_group = kept, of_group
        self._thresholds, self._describe = thresholds, describe
        self._positions: dict[MessageQueue, Position] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._turn = 0
        #: Held during a commit: of two at once, one would see the other as a foreign reset.
        self._committing = threading.Lock()
        #: Notified when messages arrive or space becomes free.
        self.changed = threading.Condition()
        #: Returns True if a queue may be read now.
        self.holds: Callable[[MessageQueue], bool] = lambda _: True
        self._troubles: dict[str, RocketMQError | None] = {}
        #: Permanent error of the last automatic commit; None after a success.
        self.commit_trouble: RocketMQError | None = None

    def subscribe(self, subscription: Subscription) -> None:
        """Set the filter of a topic."""
        self._subscriptions[subscription.topic] = subscription

    @contextmanager
    def subscribing(self, subscription: Subscription) -> Iterator[None]:
        """Set the filter of a topic, and undo it if the block raises."""
        before, holds = self._subscriptions.copy(), self.holds
        self.subscribe(subscription)
        try:
            yield
        except BaseException:
            self._subscriptions, self.holds = before, holds
            raise

    # ------------------------------------------------------------------- as the owner of its queues

    def take(self, queue: MessageQueue) -> None:
        """Start a queue at its committed offset."""
        with self._committing:
            position = Position(queue, self._subscriptions[queue.topic], self._kept.start(queue))
            with self.changed:
                self._positions[queue] = position
                self.changed.notify_all()

    def drop(self, queue: MessageQueue) -> bool:
        """Stop a queue; return True once its returned messages are processed and committed."""
        with self.changed:
            position = self._positions.get(queue)
            if position is None:
                return True
            position.is_dropping = True
            position.clear()
            if position.done != position.at:
                return False
        try:
            self.commit([queue])
        except RocketMQError as error:
            if isinstance(error, BusyError) and self.holds(queue):
                raise
            log.warning("%s is handed over without a commit: %s", queue.key, error)
        with self.changed:
            self._positions.pop(queue, None)
        return True

    def reset(self, queue: MessageQueue) -> None:
        """Move to the offset of a reset, unless a commit has already done so."""
        with self._committing:
            if self._of_group is not self._kept:
                there = self._of_group.committed(queue)
                if there is not None:
                    self._kept.commit({queue: (Place(-1), there)})
            self._go_to(queue, self._kept.start(queue))

    def report(self) -> dict[str, Any]:
        """Return the details of this member for the heartbeat."""
        with self.changed:
            found: dict[str, list[Position]] = {topic: [] for topic in self._subscriptions}
            for position in self._positions.values():
                found.setdefault(position.queue.topic, []).append(position)
            return self._describe(found)

    # ------------------------------------------------------------------------------------- fetching

    def wanted(self, topic: str, *, only_moved: bool = False) -> dict[int, int]:
        """Return the next offset to fetch by queue_id, for readable queues with free space.

        Args:
            topic: the topic.
            only_moved: only queues whose offset no fetch has requested yet.
        """
        with self.changed:
            found = [
                position
                for position in self._positions.values()
                if position.queue.topic == topic
                and (position.is_moved or not only_moved)
                and position.has_room(self._thresholds)
                and self._may_read(position)
            ]
            for position in found:
                position.is_moved = False
            return {position.queue.queue_id: position.fetch_at for position in found}

    def is_held_back(self, topic: str) -> bool:
        """Return True if some queue is full; polls will free space."""
        with self.changed:
            return any(
                queue.topic == topic and not position.has_room(self._thresholds)
                for queue, position in self._positions.items()
            )

    def add(self, topic: str, asked: Mapping[int, int], *, pulled: PullResult) -> None:
        """Add fetched messages to queues that have not moved since the request."""
        parts = by_queue(pulled.messages)
        with self.changed:
            self._troubles[topic] = None
            for queue, position in self._positions.items():
                start = asked.get(queue.queue_id)
                if queue.topic == topic and start is not None:
                    rows = parts.get(queue.queue_id, pulled.messages.slice(0, 0))
                    position.add(rows, start=start, stop=pulled.next_offsets[queue.queue_id])
            self.changed.notify_all()

    def correct(self, topic: str, bounds: Mapping[int, tuple[int, int]]) -> None:
        """Move offsets past the end of their queue back into it, as RocketMQ does."""
        with self.changed:
            for queue, position in self._positions.items():
                low, high = bounds.get(queue.queue_id, (0, position.fetch_at))
                if queue.topic == topic and position.fetch_at > high:
                    there = low if low == 0 else high
                    log.warning("%s ends at %d: reading continues at %d", queue.key, high, there)
                    position.seek(there)

    def in_trouble(self, topic: str, error: RocketMQError) -> None:
        """Record the error of a fetch, for ``poll`` to raise."""
        with self.changed:
            self._troubles[topic] = error
            self.changed.notify_all()

    @property
    def trouble(self) -> RocketMQError | None:
        """Error of the last fetch of some topic, or None."""
        return next((error for error in self._troubles.values() if error is not None), None)

    # ------------------------------------------------------------------------------------- polling

    def settle(self) -> None:
        """Mark all returned messages as processed."""
        with self.changed:
            for position in self._positions.values():
                position.settle()
            self._forget_let_go(list(self._positions))

    def forgo(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Discard returned messages that are not processed: they are read again."""
        with self.changed:
            for queue in list(self._positions if queues is None else queues):
                self._of(queue).seek(self._of(queue).done)

    def release(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Return unused messages from these offsets on to the queues, for the next poll."""
        with self.changed:
            for queue, offset in offsets.items():
                position = self._positions.get(queue)
                if position is not None and position.done <= offset < position.at:
                    position.release(offset)

    def wait_for_messages(self, timeout_s: float) -> None:
        """Wait until messages are available or another change is notified."""
        with self.changed:
            if not any(map(self._may_give_out, self._positions.values())):
                self.changed.wait(timeout_s)

    def give_out(self, limit: int) -> pa.Table:
        """Return up to ``limit`` fetched messages, schema POLLED, in order within a queue."""
        if limit < 1:
            raise ConsumerUsageError(f"The limit is {limit}.", remedy="Give 1 or more.")
        parts: list[pa.Table] = []
        with self.changed:
            order = list(self._positions.values())
            # Start at another queue each time, so that no queue starves.
            self._turn += 1
            start = self._turn % max(1, len(order))
            for position in chain(order[start:], order[:start]):
                if limit <= 0:
                    break
                if self._may_give_out(position):
                    for rows in position.take(limit):
                        limit -= rows.num_rows
                        parts.append(polled(position.queue.topic, rows))
            if parts:
                self.changed.notify_all()
        return pa.concat_tables(parts) if parts else POLLED.empty_table()

    def _may_read(self, position: Position) -> bool:
        stays = not position.is_paused and not position.is_dropping
        return stays and self.holds(position.queue)

    def _may_give_out(self, position: Position) -> bool:
        return position.waiting > 0 and self._may_read(position)

    # ------------------------------------------------------------------------------------ positions

    def queues(self) -> list[MessageQueue]:
        """Return the queues that are read, sorted."""
        with self.changed:
            return sorted(self._positions)

    def pause(self, queues: Iterable[MessageQueue], *, is_paused: bool) -> None:
        """Pause or resume queues."""
        with self.changed:
            for position in [self._of(queue) for queue in queues]:
                position.is_paused, position.is_moved = is_paused, True
            self.changed.notify_all()

    def paused(self) -> list[MessageQueue]:
        """Return the paused queues, sorted."""
        with self.changed:
            return sorted(q for q, position in self._positions.items() if position.is_paused)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Move a queue to an offset."""
        with self.changed:
            self._of(queue).seek(offset)
            self.changed.notify_all()

    def position(self, queue: MessageQueue) -> int:
        """Return the next offset that a poll returns."""
        with self.changed:
            return self._of(queue).at

    def check(self, queue: MessageQueue) -> None:
        """Raise ConsumerUsageError for a queue that this consumer does not read."""
        with self.changed:
            self._of(queue)

    # ----------------------------------------------------------------------------------- committing

    def commit(self, queues: Iterable[MessageQueue] | None = None) -> dict[MessageQueue, int]:
        """Commit processed messages, follow resets, and return the committed offsets.

        Raises:
            BusyError: some queues may belong to another member; the others were committed.
        """
        return self._commit(lambda: self._unfinished() if queues is None else list(queues))

    def commit_given(self, asked: Asked = None) -> dict[MessageQueue, int]:
        """Mark all or the requested messages as processed, then commit as ``commit`` does."""

        def count_as_done() -> list[MessageQueue]:
            queues = self._unfinished() if asked is None else list(asked)
            told = asked if isinstance(asked, Mapping) else {}
            for position in [self._of(queue) for queue in queues]:
                position.done = told.get(position.queue, position.at)
            return queues

        return self._commit(count_as_done)

    def _commit(self, choose: Callable[[], list[MessageQueue]]) -> dict[MessageQueue, int]:
        with self._committing:
            with self.changed:  # one consistent view: queues come and go meanwhile
                chosen = choose()
                moves = {q: (self._of(q).known, self._of(q).done) for q in chosen if self.holds(q)}
            found: dict[MessageQueue, int] = {}
            failure: RocketMQError | None = None
            for of_topic in by_topic(moves).values():
                try:
                    found.update(self._kept.commit({queue: moves[queue] for queue in of_topic}))
                except RocketMQError as error:
                    failure = error  # still commit the other topics
            for queue, offset in found.items():
                before, wanted = moves[queue]
                if offset == wanted:
                    self._has_committed(queue, before._replace(offset=offset))
                else:
                    found[queue] = self._was_moved(queue, before._replace(offset=offset))
        if failure is not None:
            raise failure
        if doubted := [queue for queue in chosen if queue not in moves]:
            self._forget_let_go(doubted)
            keys = ", ".join(queue.key for queue in doubted)
            raise BusyError(
                f"Nothing is committed of {keys}: its lock was not renewed in time, and another"
                " member may have it. The owner gets the uncommitted messages again."
            )
        return found

    def commit_by_itself(self) -> None:
        """Commit processed messages; ``poll`` raises a permanent error."""
        try:
            self.commit()
            self.commit_trouble = None
        except (BusyError, QueueLockedError) as error:
            log.info("cannot commit yet: %s", error)
        except RocketMQError as error:
            self.commit_trouble = error

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset from the store; None if it has none."""
        return self._kept.committed(queue)

    def close(self) -> None:
        """Stop reading and close the store."""
        with self.changed:
            self._positions.clear()
        self._kept.close()

    def _unfinished(self) -> list[MessageQueue]:
        """Return the queues that need a commit, without finished ones that await handover."""
        finished = {q for q, at in self._positions.items() if at.is_left and at.is_committed}
        self._forget_let_go(finished)
        return [queue for queue in self._positions if queue not in finished]

    def _forget_let_go(self, queues: Iterable[MessageQueue]) -> None:
        """Delete queues that were handed over unprocessed, once their work has ended."""
        with self.changed:
            for position in [self._positions[q] for q in queues if q in self._positions]:
                if position.is_left and not self.holds(position.queue):
                    del self._positions[position.queue]

    def _has_committed(self, queue: MessageQueue, place: Place) -> None:
        with self.changed:
            position = self._positions.get(queue)
            if position is not None:
                position.known = place

    def _was_moved(self, queue: MessageQueue, place: Place) -> int:
        """Follow a reset of the group; return its offset."""
        try:
            place = self._kept.start(queue)
        except RocketMQError as error:  # the next commit detects the reset again
            log.info("the number of resets of %s is unknown: %s", queue.key, error)
        self._go_to(queue, place)
        return place.offset

    def _go_to(self, queue: MessageQueue, place: Place) -> None:
        with self.changed:
            position = self._positions.get(queue)
            if position is None or (place.resets is not None and place == position.known):
                return
            log.info("%s continues at offset %d", queue.key, place.offset)
            position.known = place
            position.seek(place.offset)
            self.changed.notify_all()

    def _of(self, queue: MessageQueue) -> Position:
        if queue not in self._positions:
            raise ConsumerUsageError(
                f"This consumer does not read {queue.key}: it reads"
                f" {', '.join(each.key for each in sorted(self._positions)) or 'none'}."
            )
        return self._positions[queue]
