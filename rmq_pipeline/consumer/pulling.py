"""Pulling messages of a topic's owned queues, while there is room for them (semantics §6.6)."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.flow_control import Sizes, Thresholds, room
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of
from rmq_pipeline.consumer.settler import Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.errors import (
    BrokerUnavailableError,
    BusyError,
    OperatorError,
    QueueLockedError,
    RocketMQError,
)

log = logging.getLogger(__name__)

#: When a queue is looked at again that has no room.
FULL_S: Final = 0.05
#: After an error; and before a queue is pulled again that somebody else has locked.
ERROR_S: Final = 1.0
#: After the broker could not be reached.
AWAY_S: Final = 0.2


class Source(Protocol):
    """Where messages come from: by lease, or by offset."""

    def pull(
        self,
        subscription: Subscription,
        queues: Sequence[ProcessQueue],
        *,
        limit: int,
        max_bytes: int,
        wait_ms: int,
    ) -> pa.Table:
        """Up to ``limit`` messages of these queues, schema.RECEIVED or schema.READ."""
        ...

    def handed_on(self, queues: Sequence[ProcessQueue]) -> None:
        """What the last pull brought is held now."""
        ...

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        """A pull had no answer, or others have these queues: what is held may not be ours."""
        ...


class Service(Protocol):
    """Gives messages to the listener, in one of three orders."""

    @property
    def spans(self) -> bool:
        """Whether the distance of the offsets held is bounded."""
        ...

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Messages were pulled."""
        ...

    def is_starving(self) -> bool:
        """Whether workers idle although messages are held."""
        ...

    def expire(self) -> None:
        """Look for calls that take too long."""
        ...


class Puller:
    """A thread that pulls one topic: all queues that have room, in one call that waits."""

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
        """Pull nothing yet.

        Args:
            queues: what is owned of a topic now.
            holds: whether this client may work on a queue.
            batch: the most of one pull.
            poll_ms: how long a pull waits at the broker for a first message.
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
        #: Queues that others have locked, and until when they are let be.
        self._locked: dict[MessageQueue, float] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"rmq-pull-{subscription.topic}", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """There may be room, or another queue."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    def hold(self, held: bool) -> None:
        """Pull nothing until told otherwise; a pull that waits at the broker still ends."""
        self._held = held
        self.wake()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Pull nothing more; what a pull under way brings is given back."""
        self._stopped = True
        self.wake()
        # What finds the key of a message is called in that thread, and may have asked for this.
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
        """Log an error, once as long as it is the same."""
        if str(error) != self._said and not self._stopped:
            log.log(level, "nothing is pulled of %s: %s", self._subscription.topic, error)
        self._said = str(error)

    def _wait(self, pause_s: float) -> None:
        with self._changed:
            if not self._awake and not self._stopped:
                self._changed.wait(pause_s)
            self._awake = False

    def _step(self) -> float:
        """One pull; how long to wait before the next."""
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
        """The queues that have room, and how much all of them have."""
        if self._held:
            return [], 0, 0
        thresholds = self._thresholds.of_queue(len(owned))
        chosen: list[ProcessQueue] = []
        limit, max_bytes = limits.RECEIVE_ROWS, thresholds.bytes
        now_s = time.monotonic()
        for queue in owned:
            if queue.dropped or not queue.may_begin or not self._may_pull(queue, now_s):
                continue
            # First this: what is done with meanwhile tells of it.
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
        """Somebody else has one of these queues: pull the others for a while."""
        log.info("not pulled for now: %s", error)
        theirs = [q for q in chosen if error.queue_id in (q.queue.queue_id, -1)]
        for queue in theirs:
            self._locked[queue.queue] = time.monotonic() + ERROR_S
        # What is held of it is theirs, too.
        self._source.lost(theirs)

    def _hand_on(self, table: pa.Table, chosen: Sequence[ProcessQueue]) -> None:
        queues = {queue.queue.queue_id: queue for queue in chosen}
        by_queue = messages_of(table, self._subscription.topic, queues=queues)
        for queue_id, messages in by_queue.items():
            queue = queues[queue_id]
            self._sizes.saw(len(messages), sum(message.size for message in messages))
            if self._stopped or queue.dropped:
                # Another thread may pull it by now, and is not to go on behind these.
                self._source.lost([queue])
                # Its lock may have ended before they were leased: then nothing ends that lease.
                self._settling.give_back(messages)
                continue
            self._service.arrived(queue, messages)
            self._settling.give_back(queue.late())


def _may_have_leased(error: Exception) -> bool:
    """Whether a pull that failed may have leased messages all the same: a refusal has not."""
    if isinstance(error, RocketMQError) and type(error) is not RocketMQError:
        return isinstance(error, BrokerUnavailableError | OperatorError)
    return True
