"""What a pull consumer has read of each queue: fetched, given out, done with, committed."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa

from rmq_pipeline.consumer.flow_control import Thresholds
from rmq_pipeline.consumer.kept_offsets import KeptOffsets, Place
from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.consumer.polled import POLLED, by_queue, polled
from rmq_pipeline.consumer.positions import Position
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.errors import (
    BusyError,
    ConsumerUsageError,
    QueueLockedError,
    RocketMQError,
)
from rmq_pipeline.pulled import Pulled

log = logging.getLogger(__name__)

#: To be committed: up to these offsets, or all that was given out of some queues, or of all queues.
Asked = Mapping[MessageQueue, int] | Iterable[MessageQueue] | None


class Reading:
    """The queues of a pull consumer, for any number of threads; it owns them for a Rebalancer."""

    def __init__(
        self,
        kept: KeptOffsets,
        *,
        of_group: KeptOffsets,
        thresholds: Thresholds,
        describe: Callable[[dict[str, list[Position]]], dict[str, Any]],
    ) -> None:
        """Read nothing yet.

        Args:
            of_group: what the broker has of the group; a reset changes it, wherever ours are kept.
            describe: what is reported of positions, by topic.
        """
        self._kept, self._of_group = kept, of_group
        self._thresholds, self._describe = thresholds, describe
        self._positions: dict[MessageQueue, Position] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._turn = 0
        #: Held while offsets are committed: two at once would take each other for strangers.
        self._committing = threading.Lock()
        #: Notified when there is something to give out, or room for more.
        self.changed = threading.Condition()
        #: Whether a queue may be read now.
        self.holds: Callable[[MessageQueue], bool] = lambda _: True
        self._troubles: dict[str, RocketMQError | None] = {}
        #: Why nothing is committed; None when it is, or will be by and by.
        self.commit_trouble: RocketMQError | None = None

    def subscribe(self, subscription: Subscription) -> None:
        """How a topic is read."""
        self._subscriptions[subscription.topic] = subscription

    @contextmanager
    def subscribing(self, subscription: Subscription) -> Iterator[None]:
        """How a topic is read from now on; as before, if what follows fails."""
        before, holds = self._subscriptions.copy(), self.holds
        self.subscribe(subscription)
        try:
            yield
        except BaseException:
            self._subscriptions, self.holds = before, holds
            raise

    # ------------------------------------------------------------------- as the owner of its queues

    def take(self, queue: MessageQueue) -> None:
        """Read a queue from its committed offset on."""
        with self._committing:
            position = Position(queue, self._subscriptions[queue.topic], self._kept.start(queue))
            with self.changed:
                self._positions[queue] = position
                self.changed.notify_all()

    def drop(self, queue: MessageQueue) -> bool:
        """Give out no more; it may go once what was given out is done with and committed."""
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
            log.warning("%s goes to others without a commit: %s", queue.key, error)
        with self.changed:
            self._positions.pop(queue, None)
        return True

    def reset(self, queue: MessageQueue) -> None:
        """Go where the group was put, unless a commit has told already."""
        with self._committing:
            if self._of_group is not self._kept:
                there = self._of_group.committed(queue)
                if there is not None:
                    self._kept.commit({queue: (Place(-1), there)})
            self._go_to(queue, self._kept.start(queue))

    def report(self) -> dict[str, Any]:
        """What the heartbeat tells."""
        with self.changed:
            found: dict[str, list[Position]] = {topic: [] for topic in self._subscriptions}
            for position in self._positions.values():
                found.setdefault(position.queue.topic, []).append(position)
            return self._describe(found)

    # ------------------------------------------------------------------------------------- fetching

    def wanted(self, topic: str, *, only_moved: bool = False) -> dict[int, int]:
        """By queue_id where to fetch: queues that may be read, and have room.

        Args:
            only_moved: those that no fetch was made of where they are now.
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
        """Whether some queue has no room: it will, once somebody polls."""
        with self.changed:
            return any(
                queue.topic == topic and not position.has_room(self._thresholds)
                for queue, position in self._positions.items()
            )

    def add(self, topic: str, asked: Mapping[int, int], *, pulled: Pulled) -> None:
        """Keep what was fetched from the offsets asked for, where they still are those wanted."""
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
        """Leave offsets that lie behind the end of their queue, as RocketMQ does."""
        with self.changed:
            for queue, position in self._positions.items():
                low, high = bounds.get(queue.queue_id, (0, position.fetch_at))
                if queue.topic == topic and position.fetch_at > high:
                    there = low if low == 0 else high
                    log.warning("%s ends at %d: read from %d on", queue.key, high, there)
                    position.seek(there)

    def in_trouble(self, topic: str, error: RocketMQError) -> None:
        """Nothing can be fetched: who polls is told."""
        with self.changed:
            self._troubles[topic] = error
            self.changed.notify_all()

    @property
    def trouble(self) -> RocketMQError | None:
        """Why the last fetch of some topic has failed."""
        return next((error for error in self._troubles.values() if error is not None), None)

    # ----------------------------------------------------------------------------------- giving out

    def settle(self) -> None:
        """All that was given out is done with."""
        with self.changed:
            for position in self._positions.values():
                position.settle()
            self._forget_let_go(list(self._positions))

    def forgo(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """What was given out and is not done with is for others: it comes again."""
        with self.changed:
            for queue in list(self._positions if queues is None else queues):
                self._of(queue).seek(self._of(queue).done)

    def give_back(self, offsets: Mapping[MessageQueue, int]) -> None:
        """What was given out from these offsets on, and nobody has looked at, comes again."""
        with self.changed:
            for queue, offset in offsets.items():
                position = self._positions.get(queue)
                if position is not None and position.done <= offset < position.at:
                    position.give_back(offset)

    def wait_for_messages(self, timeout_s: float) -> None:
        """Wait until something may be given out, or something else has changed."""
        with self.changed:
            if not any(map(self._may_give_out, self._positions.values())):
                self.changed.wait(timeout_s)

    def give_out(self, limit: int) -> pa.Table:
        """Up to ``limit`` messages that were fetched, as POLLED: in order within a queue."""
        if limit < 1:
            raise ConsumerUsageError(f"limit is 1 or more, not {limit}.")
        parts: list[pa.Table] = []
        with self.changed:
            order = list(self._positions.values())
            # Each time from another queue on, so that none is always last.
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
        """Those that are read."""
        with self.changed:
            return sorted(self._positions)

    def pause(self, queues: Iterable[MessageQueue], *, is_paused: bool) -> None:
        """Give nothing out of queues, or go on."""
        with self.changed:
            for position in [self._of(queue) for queue in queues]:
                position.is_paused, position.is_moved = is_paused, True
            self.changed.notify_all()

    def paused(self) -> list[MessageQueue]:
        """Queues that are paused."""
        with self.changed:
            return sorted(q for q, position in self._positions.items() if position.is_paused)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on from an offset."""
        with self.changed:
            self._of(queue).seek(offset)
            self.changed.notify_all()

    def position(self, queue: MessageQueue) -> int:
        """The next offset that is given out."""
        with self.changed:
            return self._of(queue).at

    def check(self, queue: MessageQueue) -> None:
        """Refuse a queue that is not read here."""
        with self.changed:
            self._of(queue)

    # ----------------------------------------------------------------------------------- committing

    def commit(self, queues: Iterable[MessageQueue] | None = None) -> dict[MessageQueue, int]:
        """Commit what is done with, and go where others have put the group; the offsets then.

        Raises:
            BusyError: queues may have gone to another member; what could be committed was.
        """
        return self._commit(lambda: self._unfinished() if queues is None else list(queues))

    def commit_given(self, asked: Asked = None) -> dict[MessageQueue, int]:
        """The same, as all that was given out is done with, or that of some, or up to offsets."""

        def count_as_done() -> list[MessageQueue]:
            queues = self._unfinished() if asked is None else list(asked)
            told = asked if isinstance(asked, Mapping) else {}
            for position in [self._of(queue) for queue in queues]:
                position.done = told.get(position.queue, position.at)
            return queues

        return self._commit(count_as_done)

    def _commit(self, choose: Callable[[], list[MessageQueue]]) -> dict[MessageQueue, int]:
        with self._committing:
            with self.changed:  # all at once: meanwhile queues come and go
                chosen = choose()
                moves = {q: (self._of(q).known, self._of(q).done) for q in chosen if self.holds(q)}
            found: dict[MessageQueue, int] = {}
            failure: RocketMQError | None = None
            for of_topic in by_topic(moves).values():
                try:
                    found.update(self._kept.commit({queue: moves[queue] for queue in of_topic}))
                except RocketMQError as error:
                    failure = error  # the other topics are not at fault
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
                f"Nothing is committed of {keys}: the lock of it was not renewed in"
                " time, and another member may have it. What is not committed comes again there."
            )
        return found

    def commit_by_itself(self) -> None:
        """Commit what is done with; who polls is told why it cannot be."""
        try:
            self.commit()
            self.commit_trouble = None
        except (BusyError, QueueLockedError) as error:
            log.info("nothing is committed yet: %s", error)
        except RocketMQError as error:
            self.commit_trouble = error

    def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset as it is kept."""
        return self._kept.committed(queue)

    def close(self) -> None:
        """Read no more."""
        with self.changed:
            self._positions.clear()
        self._kept.close()

    def _unfinished(self) -> list[MessageQueue]:
        """All but those that only wait to change hands: others may have them at any moment."""
        finished = {q for q, at in self._positions.items() if at.is_left and at.is_committed}
        self._forget_let_go(finished)
        return [queue for queue in self._positions if queue not in finished]

    def _forget_let_go(self, queues: Iterable[MessageQueue]) -> None:
        """Read no more what had to go to others while it was worked on, once that is over."""
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
        """Somebody has put the group elsewhere; where it is."""
        try:
            place = self._kept.start(queue)
        except RocketMQError as error:  # then the next commit tells, too
            log.info("how often %s was reset is not known: %s", queue.key, error)
        self._go_to(queue, place)
        return place.offset

    def _go_to(self, queue: MessageQueue, place: Place) -> None:
        with self.changed:
            position = self._positions.get(queue)
            if position is None or (place.resets is not None and place == position.known):
                return
            log.info("%s goes on at offset %d", queue.key, place.offset)
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
