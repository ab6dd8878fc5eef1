"""Pulls of owned queues by lease, limited by flow control (semantics §6.6)."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.message_queue import MessageQueue, Subscription
from rmq_pipeline.consumer.process_queue import ProcessQueue, Sizes, Thresholds, room
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of
from rmq_pipeline.consumer.settler import Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.errors import (
    BrokerUnavailableError,
    BusyError,
    OperatorError,
    QueueLockedError,
    RocketMQError,
)
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Interval of checks while a queue is full.
FULL_S: Final = 0.05
#: Pause after an error, and for a queue that another client has locked.
ERROR_S: Final = 1.0
#: Pause while the broker is unreachable or busy.
AWAY_S: Final = 0.2


class Source(Protocol):
    """Source of messages: by lease or by offset."""

    def pull(
        self,
        subscription: Subscription,
        queues: Sequence[ProcessQueue],
        *,
        limit: int,
        max_bytes: int,
        wait_ms: int,
    ) -> pa.Table:
        """Return up to ``limit`` messages of these queues, schema.RECEIVED or schema.READ."""
        ...

    def handed_on(self, queues: Sequence[ProcessQueue]) -> None:
        """Note that the messages of the last pull are held."""
        ...

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """Recover queues after a lost reply or a lost lock: messages may be leased elsewhere."""
        ...


class Service(Protocol):
    """Consumer of held messages, which calls the listener in one of three orders."""

    @property
    def spans(self) -> bool:
        """True if the span of held offsets is bounded."""
        ...

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Accept pulled messages."""
        ...

    def is_starving(self) -> bool:
        """Return True if workers idle although messages are held."""
        ...

    def expire(self) -> None:
        """Time out calls that take too long."""
        ...


class Puller:
    """Thread that pulls one topic: one long poll for all queues with free space."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        source: Source,
        service: Service,
        settling: Settling,
        queues: Callable[[str], list[ProcessQueue]],
        holds: Callable[[MessageQueue], bool],
        thresholds: Thresholds,
        statistics: Statistics,
        clock: Clock,
        batch: int,
        poll_ms: int,
    ) -> None:
        """Prepare the thread; ``start`` starts it.

        Args:
            queues: returns the owned queues of a topic.
            holds: returns True if this client may work on a queue.
            batch: the maximum number of messages of a pull.
            poll_ms: how long a pull waits at the broker for the first message.
        """
        self._subscription, self._source, self._service = subscription, source, service
        self._settling, self._queues, self._holds = settling, queues, holds
        self._thresholds, self._statistics, self._clock = thresholds, statistics, clock
        self._batch, self._poll_ms = batch, poll_ms
        self._sizes = Sizes()
        self._changed = threading.Condition()
        self._awake = False
        self._held = False
        self._stopped = False
        self._said = ""
        #: Queues locked by other clients, with the time of the next try.
        self._locked: dict[MessageQueue, float] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"rmq-pull-{subscription.topic}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Check again for free space and new queues."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    def hold(self, held: bool) -> None:
        """Pause or resume pulls; a running pull ends normally."""
        self._held = held
        self.wake()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Stop the thread; the messages of a running pull are released."""
        self._stopped = True
        self.wake()
        # A user's key function runs in this thread and may close the consumer.
        is_own = self._thread is threading.current_thread()
        if timeout_s and self._thread.ident is not None and not is_own:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped:
            try:
                pause_s = self._step()
            except BusyError as error:
                pause_s = AWAY_S
                self._say(logging.INFO, error)
            except RocketMQError as error:
                pause_s = ERROR_S
                self._say(logging.WARNING, error)
            except Exception:
                pause_s = ERROR_S
                log.exception("a pull of %s failed", self._subscription.topic)
            if pause_s:
                self._wait(pause_s)

    def _say(self, level: int, error: RocketMQError) -> None:
        """Log an error, unless it repeats the last one."""
        if str(error) != self._said and not self._stopped:
            log.log(level, "cannot pull from %s: %s", self._subscription.topic, error)
        self._said = str(error)

    def _wait(self, pause_s: float) -> None:
        with self._changed:
            if not self._awake and not self._stopped:
                self._changed.wait(pause_s)
            self._awake = False

    def _step(self) -> float:
        """Pull once; return the pause in seconds before the next pull."""
        owned = self._queues(self._subscription.topic)
        now_ms = self._clock.now_ms()
        for queue in owned:
            queue.pulled_at_ms = now_ms
        chosen, limit, max_bytes = self._choose(owned)
        if not chosen:
            return FULL_S if owned and not self._held else ERROR_S
        wait_ms = self._poll_ms if len(chosen) == len(owned) else int(FULL_S * 1000)
        began = time.perf_counter()
        try:
            table = self._source.pull(
                self._subscription, chosen, limit=limit, max_bytes=max_bytes, wait_ms=wait_ms
            )
        except QueueLockedError as error:
            self._let_be(chosen, error)
            return 0.0
        except Exception as error:
            if _may_have_leased(error):
                self._source.lost(chosen)
            raise
        self._said = ""
        if table.num_rows:
            took_ms = (time.perf_counter() - began) * 1000
            self._statistics.pulled(
                self._subscription.topic, messages=table.num_rows, took_ms=took_ms
            )
            try:
                self._hand_on(table, chosen)
            except Exception:
                self._source.lost(chosen)
                raise
        self._source.handed_on(chosen)
        return 0.0

    def _choose(self, owned: Sequence[ProcessQueue]) -> tuple[list[ProcessQueue], int, int]:
        """Return the queues with free space, the messages to pull, and the bytes that fit."""
        if self._held:
            return [], 0, 0
        thresholds = self._thresholds.of_queue(len(owned))
        chosen: list[ProcessQueue] = []
        limit, max_bytes = limits.RECEIVE_ROWS, thresholds.bytes
        now_s = time.monotonic()
        for queue in owned:
            if queue.dropped or not queue.may_begin or not self._may_pull(queue, now_s):
                continue
            # Set ``room`` before the check, so that space freed meanwhile wakes this thread.
            queue.room = room_of = partial(self._room, queue, thresholds)
            free = room_of()
            if free:
                queue.room = None
                chosen.append(queue)
                limit = min(limit, free)
                max_bytes = min(max_bytes, thresholds.bytes - queue.bytes)
        return chosen, min(limit, self._sizes.fit(max_bytes)), max_bytes

    def _room(self, queue: ProcessQueue, thresholds: Thresholds) -> int:
        return room(
            queue,
            thresholds,
            spans=self._service.spans,
            starving=self._service.is_starving(),
            pull=self._batch,
        )

    def _may_pull(self, queue: ProcessQueue, now_s: float) -> bool:
        if self._locked and self._locked.get(queue.queue, 0.0) > now_s:
            return False
        return self._holds(queue.queue)

    def _let_be(self, chosen: Sequence[ProcessQueue], error: QueueLockedError) -> None:
        """Skip a queue that another client has locked, for a second."""
        log.info("skipping a locked queue for now: %s", error)
        theirs = [q for q in chosen if error.queue_id in (q.queue.queue_id, -1)]
        for queue in theirs:
            self._locked[queue.queue] = time.monotonic() + ERROR_S
        # The other client also gets the messages that are held here.
        self._source.lost(theirs)

    def _hand_on(self, table: pa.Table, chosen: Sequence[ProcessQueue]) -> None:
        queues = {queue.queue.queue_id: queue for queue in chosen}
        by_queue = messages_of(table, self._subscription.topic, queues=queues)
        for queue_id, messages in by_queue.items():
            queue = queues[queue_id]
            self._sizes.saw(len(messages), sum(message.size for message in messages))
            if self._stopped or queue.dropped:
                # Another thread may already pull the queue; it must not continue after these.
                self._source.lost([queue])
                # The lock may have ended before the lease, so the lease must be ended explicitly.
                self._settling.release(messages)
                continue
            self._service.arrived(queue, messages)
            self._settling.release(queue.late())


def _may_have_leased(error: Exception) -> bool:
    """Return True if a failed pull may have leased messages; a refused one has not."""
    if isinstance(error, RocketMQError) and type(error) is not RocketMQError:
        return isinstance(error, BrokerUnavailableError | OperatorError)
    return True


class Leasing:
    """Source that receives messages of the queues that this member owns."""

    def __init__(
        self,
        verbs: Verbs,
        group: str,
        *,
        client_id: str,
        lease_ms: int,
        restart: Callable[[ProcessQueue], None] | None,
    ) -> None:
        """Prepare to receive.

        Args:
            lease_ms: long if the queues are locked, because the end of a lock ends its leases;
                short if the settler renews the leases.
            restart: replaces a ProcessQueue by a new one that is ``unsure``; None if queues are
                not locked.
        """
        self._verbs, self._group = verbs, group
        self._client_id, self._lease_ms = client_id, lease_ms
        self._restart = restart

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
        if self._restart is not None:
            for queue in queues:
                self._restart(queue)

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
