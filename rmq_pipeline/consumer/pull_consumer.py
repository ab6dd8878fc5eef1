"""Pull consumer: polls messages and commits offsets itself."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import pyarrow as pa

from rmq_pipeline.clock import Deadline, SteadyClock
from rmq_pipeline.consumer.allocation import Strategy, strategy_of
from rmq_pipeline.consumer.assigned_queues import Asked, Position, Reading, one_by_one
from rmq_pipeline.consumer.membership import new_client_id, steady_client_id
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue, Subscription, queues_of
from rmq_pipeline.consumer.offset_store import (
    BrokerOffsets,
    FileOffsets,
    OffsetFile,
    OffsetStore,
    StartFrom,
    checked_interval,
)
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.rebalancing import Model, QueueListener, Rebalancer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable
from rmq_pipeline.errors import BusyError, ConsumerUsageError, IllegalOffsetError, RocketMQError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Wait at the broker while a full queue is left out of the fetch, in ms.
HELD_BACK_MS: Final = 50
#: Pause after an error.
_PAUSE_S: Final = 1.0
#: Time that ``close`` waits for a fetch, beyond the fetch's own wait.
_FETCH_PATIENCE_S: Final = 2.0
#: Maximum number of messages of a fetch.
_FETCH_ROWS: Final = 1_000


class Fetcher:
    """Thread that fetches messages for a Reading."""

    def __init__(
        self,
        verbs: Verbs,
        subscription: Subscription,
        *,
        reading: Reading,
        statistics: Statistics,
        wait_ms: int,
    ) -> None:
        """Start the thread.

        Args:
            wait_ms: how long a fetch waits at the broker.
        """
        self._wait_ms = wait_ms
        self._verbs, self._subscription = verbs, subscription
        self._reading, self._statistics = reading, statistics
        self._closed = threading.Event()
        name = f"rmq-fetch-{subscription.topic}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def fetch_moved(self) -> None:
        """Fetch, without waiting, the queues whose offset the running fetch does not know."""
        moved = self._reading.wanted(self._subscription.topic, only_moved=True)
        try:
            if moved:
                self._fetch(moved, wait_ms=0)
        except RocketMQError as error:
            # The thread will get the same error and handle it.
            log.debug("%s: %s", self._subscription.topic, error)

    def close(self) -> None:
        """Stop the thread; wait for a running fetch, for a bounded time."""
        self._closed.set()
        with self._reading.changed:
            self._reading.changed.notify_all()
        self._thread.join(_FETCH_PATIENCE_S + self._wait_ms / 1000)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._fetch_once()
            except IllegalOffsetError:
                self._correct()
            except BusyError as error:
                log.info("cannot fetch from %s now: %s", self._subscription.topic, error)
                self._closed.wait(_PAUSE_S)
            except RocketMQError as error:
                self._reading.in_trouble(self._subscription.topic, error)
                self._closed.wait(_PAUSE_S)
            except Exception:
                if self._closed.is_set():
                    return  # the client may be closed too
                log.exception("a fetch of %s failed", self._subscription.topic)
                self._closed.wait(_PAUSE_S)

    def _fetch_once(self) -> None:
        topic = self._subscription.topic
        with self._reading.changed:  # so that no notification is lost between check and wait
            wanted = self._reading.wanted(topic)
            if not wanted and not self._closed.is_set():
                # The wait is bounded, because a lock becomes live without a notification.
                self._reading.changed.wait(self._wait_ms / 1000)
        if wanted:
            held_back = self._reading.is_held_back(topic)
            self._fetch(wanted, wait_ms=HELD_BACK_MS if held_back else self._wait_ms)

    def _fetch(self, wanted: dict[int, int], *, wait_ms: int) -> None:
        began = time.perf_counter()
        pulled = self._verbs.pull(
            self._subscription.topic,
            wanted,
            limit=_FETCH_ROWS,
            filter=self._subscription.filter,
            filter_type=self._subscription.filter_type,
            wait_ms=wait_ms,
        )
        took_ms = (time.perf_counter() - began) * 1000
        rows = pulled.messages.num_rows
        if rows:
            self._statistics.pulled(self._subscription.topic, messages=rows, took_ms=took_ms)
        self._reading.add(self._subscription.topic, wanted, pulled=pulled)

    def _correct(self) -> None:
        """Correct offsets past the end of their queue: the topic was deleted and recreated."""
        topic = self._subscription.topic
        try:
            rows = self._verbs.describe_topic(topic)["offsets"]
        except RocketMQError as error:
            self._reading.in_trouble(topic, error)
            self._closed.wait(_PAUSE_S)
            return
        bounds = {row["queue_id"]: (row["min_offset"], row["max_offset"]) for row in rows}
        self._reading.correct(topic, bounds)


def described(
    positions: Mapping[str, list[Position]], *, model: Model, statistics: Statistics
) -> dict[str, Any]:
    """Return the details of a pull consumer for the heartbeat: queues, rates, cached messages."""
    return {
        "model": model,
        "order": "pull",
        "queues": {
            topic: sorted(position.queue.queue_id for position in own)
            for topic, own in positions.items()
        },
        "statistics": {
            topic: {
                **statistics.report(topic),
                "cached": sum(position.waiting for position in own),
                "cached_bytes": sum(position.waiting_bytes for position in own),
            }
            for topic, own in positions.items()
        },
    }


AUTO_COMMIT_MS: Final = 5_000
POLL_S: Final = 5.0
POLL_ROWS: Final = 1_000
#: Interval of checks during a poll: a lock becomes live without a notification.
_LOOK_S: Final = 1.0
#: Time that ``close`` tries to commit while no broker answers.
_PATIENCE_S: Final = 5.0
_EITHER: Final = "Subscribe or assign, not both."
_FIRST: Final = "Call subscribe or assign first."


class PullConsumer:
    """Consumer that reads by offset: ``subscribe`` shares topics, ``assign`` takes given queues.

    The next poll marks the messages of the last one as processed; if ``auto_commit_ms`` is None,
    only ``commit`` does. So a crash causes redeliveries and skips no message. (RocketMQ marks a
    message as processed when it is polled.) One thread polls; other methods are thread-safe.

    The end of a ``with`` marks the last poll as processed too, unless it ends by an exception.
    """

    def __init__(
        self,
        client: Verbs,
        group: str,
        *,
        model: Model = "clustering",
        strategy: str | Strategy = "AVG",
        start_from: StartFrom = "first",
        auto_commit_ms: int | None = AUTO_COMMIT_MS,
        thresholds: Thresholds | None = None,
        client_id: str | None = None,
        offsets_folder: Path | str | None = None,
        broker_name: str = BROKER_NAME,
        pace: Pace | None = None,
    ) -> None:
        """Create a consumer of an existing group; it reads nothing yet.

        Args:
            client: must stay open as long as the consumer.
            model: "broadcasting" reads all queues and stores offsets in a file of this machine.
            strategy: AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, or an object of consumer.allocation.
            start_from: start of queues without a committed offset: "last", "first", or ms since
                1970.
            auto_commit_ms: interval between commits; None: only ``commit`` commits.
            thresholds: limits on the messages fetched ahead, per queue.
            client_id: id of this member; ``room@name`` for strategies that use machine rooms. A
                broadcasting consumer's offset file has this id in its path.
            offsets_folder: folder of offset files; ``~/.rocketmq_offsets`` by default.
            broker_name: broker name of all queues; ``room@name`` likewise.
        """
        if model not in ("clustering", "broadcasting"):
            raise ConsumerUsageError(f"The model is {model!r}, not clustering or broadcasting.")
        self._client, self.group, self._model = client, group, model
        self._strategy = strategy_of(strategy)
        default_id = new_client_id() if model == "clustering" else steady_client_id()
        self.client_id = client_id or default_id
        self._broker_name, self._pace = broker_name, pace or Pace()
        self._auto_commit_ms = checked_interval(auto_commit_ms)
        self._statistics = Statistics(SteadyClock().now_ms)
        of_group = BrokerOffsets(
            client, group=group, client_id=self.client_id, start_from=start_from
        )
        self._reading = Reading(
            self._own_offsets(start_from, offsets_folder) or of_group,
            of_group=of_group,
            thresholds=thresholds or Thresholds(),
            describe=partial(described, model=model, statistics=self._statistics),
        )
        self._rebalancer: Rebalancer | None = None
        self._subscribing = threading.Lock()
        self._listeners: dict[str, QueueListener] = {}
        self._listened: dict[str, list[MessageQueue]] = {}
        self._fetchers: dict[str, Fetcher] = {}
        self._is_assigned = self._is_closed = False
        self._timetable = Timetable(SteadyClock(), name="rmq-pull-upkeep")
        if auto_commit_ms is not None:
            self._timetable.every(auto_commit_ms, self._reading.commit_by_itself)
        self._timetable.every(int(self._pace.look_s * 1000), self._look_at_topics)

    # ----------------------------------------------------------------------------- subscriptions

    def subscribe(self, topic: str, filter: str = "*", *, filter_type: str = "tag") -> Self:
        """Read this member's share of a topic; call it once per topic.

        Raises:
            ConsumerUsageError: queues are assigned, or the consumer is closed.
            TopicNotFoundError, ConsumerGroupNotFoundError: it must be created first.
        """
        self._check_open()
        subscription = Subscription(topic, filter, filter_type)
        with self._subscribing:
            if self._is_assigned:
                raise ConsumerUsageError(
                    "Queues are assigned to this consumer: it cannot subscribe.", remedy=_EITHER
                )
            with self._reading.subscribing(subscription):
                if self._rebalancer is not None:
                    self._rebalancer.subscribe(topic)
                else:
                    rebalancer = self._rebalancing(topic)
                    self._reading.holds = rebalancer.holds
                    rebalancer.start()
                    self._rebalancer = rebalancer
            self._fetch(subscription)
        return self

    def assign(
        self, queues: Iterable[MessageQueue], filter: str = "*", *, filter_type: str = "tag"
    ) -> Self:
        """Read exactly these queues, regardless of other members.

        Raises:
            ConsumerUsageError: the consumer has subscriptions, or a queue does not exist.
        """
        self._check_open()
        if self._rebalancer is not None:
            raise ConsumerUsageError("This consumer has subscriptions.", remedy=_EITHER)
        wanted = set(queues)
        for topic in {queue.topic for queue in wanted}:
            if unknown := {q for q in wanted if q.topic == topic} - set(self.queues_of(topic)):
                raise ConsumerUsageError(f"{min(unknown).key} does not exist.")
            self._reading.subscribe(Subscription(topic, filter, filter_type))
        self._is_assigned = True
        before = set(self._reading.queues())
        self._reading.forgo(before - wanted)
        for queue in before - wanted:
            self._reading.drop(queue)
        for queue in sorted(wanted - before):
            self._reading.take(queue)
        for topic in {queue.topic for queue in wanted}:
            self._fetch(Subscription(topic, filter, filter_type))
        return self

    def queues_of(self, topic: str) -> list[MessageQueue]:
        """Return all queues of a topic."""
        count = self._client.describe_topic(topic)["queues"]
        return queues_of(topic, count, broker_name=self._broker_name)

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that this consumer reads now, sorted."""
        return self._reading.queues()

    def message_queue_changed(self, topic: str, listener: QueueListener) -> None:
        """Call ``listener(topic, all queues, own queues)`` when the queues change.

        With assigned queues, a check for new queues runs every 30 s. The listener runs in a thread
        of the consumer and must not wait for the consumer.
        """
        self._listeners[topic] = listener

    # ------------------------------------------------------------------------------------ reading

    def poll(self, timeout_s: float = POLL_S, *, limit: int = POLL_ROWS) -> pa.Table:
        """Return messages, or an empty table after the timeout; earlier polls become processed.

        Returns:
            topic and schema.READ, up to ``limit`` rows, in order within each queue.

        Raises:
            ConsumerUsageError: the consumer has no subscriptions or queues, or is closed.
            RocketMQError: reading or committing fails, for example as the topic was deleted.
        """
        self._check_reads()
        if self._reading.commit_trouble is not None:
            raise self._reading.commit_trouble
        if self._auto_commit_ms is not None:
            self._reading.settle()
        deadline = Deadline(timeout_s)
        while True:
            messages = self._reading.give_out(limit)
            left_s = deadline.left_s
            if messages.num_rows or not left_s:
                return messages
            self._check_reads()
            self._raise_trouble()
            for fetcher in list(self._fetchers.values()):
                fetcher.fetch_moved()
            self._reading.wait_for_messages(min(left_s, _LOOK_S))

    def messages(
        self, timeout_s: float = POLL_S, *, limit: int = POLL_ROWS
    ) -> Iterator[ReceivedMessage]:
        """Yield messages one by one, until a poll returns none; a poll has up to ``limit`` rows.

        If the loop ends early, the next poll returns the messages that were not yielded.
        """
        while (table := self.poll(timeout_s, limit=limit)).num_rows:
            waiting = deque(one_by_one(table, broker_name=self._broker_name))
            try:
                while waiting:
                    yield waiting.popleft()
            finally:
                first: dict[MessageQueue, int] = {}
                for message in waiting:
                    first.setdefault(message.queue.queue, message.queue_offset)
                self._reading.release(first)

    def pause(self, *queues: MessageQueue) -> None:
        """Exclude queues from polls until ``resume``."""
        self._reading.pause(queues, is_paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        """Include paused queues in polls again."""
        self._reading.pause(queues, is_paused=False)

    def paused(self) -> list[MessageQueue]:
        """Return the paused queues, sorted."""
        return self._reading.paused()

    def seek(self, queue: MessageQueue, to: int | Literal["begin", "end"]) -> None:
        """Continue at an offset, at the first retained message, or after the last one.

        Raises:
            IllegalOffsetError: the queue does not have the offset; the error has its range.
            ConsumerUsageError: this consumer does not read the queue.
        """
        self._check_open()
        self._reading.check(queue)
        bounds = self._client.describe_topic(queue.topic)["offsets"][queue.queue_id]
        low, high = bounds["min_offset"], bounds["max_offset"]
        offset = {"begin": low, "end": high}.get(to, to) if isinstance(to, str) else to
        if isinstance(offset, str):
            raise ConsumerUsageError(f"{to!r} is not an offset, begin or end.")
        if not low <= offset <= high:
            raise IllegalOffsetError(f"{queue.key} keeps offsets {low} to {high}, not {offset}.")
        self._reading.seek(queue, offset)

    def seek_to_time(self, queue: MessageQueue, at_ms: int) -> None:
        """Continue at the first message stored at or after a time in ms since 1970."""
        self.seek(queue, self.offset_for_time(queue, at_ms))

    def offset_for_time(self, queue: MessageQueue, at_ms: int) -> int:
        """Return the first offset stored at or after a time, or the end of the queue."""
        return self._client.offset_at(queue.topic, queue.queue_id, at_ms=at_ms)

    def position(self, queue: MessageQueue) -> int:
        """Return the offset of the next message that a poll returns from a queue."""
        return self._reading.position(queue)

    # --------------------------------------------------------------------------------- committing

    def commit(self, offsets: Asked = None) -> dict[MessageQueue, int]:
        """Commit all polled messages, or those of given queues, or given offsets.

        Returns:
            The committed offsets. If one differs from the requested offset, another client has
            reset it meanwhile, and reading continues there.

        Raises:
            IllegalOffsetError: an offset is past the end of its queue.
            QueueLockedError, BusyError: another member has, or may have, one of the queues. This
                consumer then stops reading a queue that it had to hand over unprocessed.
        """
        self._check_open()
        return self._reading.commit_given(offsets)

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset; None if the group has none for the queue."""
        return self._reading.committed(queue)

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Mark the last poll as processed, hand the queues over, and leave the group."""
        self._close(is_done=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(is_done=kind is None)

    def _close(self, *, is_done: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._timetable.close()
        if self._auto_commit_ms is not None and is_done:
            self._reading.settle()
        else:
            self._reading.forgo()
        for fetcher in self._fetchers.values():
            fetcher.close()
        try:
            if self._rebalancer is not None:
                self._rebalancer.close(patience_s=_PATIENCE_S)
            elif self._is_assigned:
                self._reading.commit()
        finally:
            self._reading.close()

    # -------------------------------------------------------------------------------------- parts

    def _own_offsets(self, start_from: StartFrom, folder: Path | str | None) -> OffsetStore | None:
        if self._model == "clustering":
            return None
        file = OffsetFile(self.client_id, self.group, folder=folder)
        return FileOffsets(self._client, file, start_from=start_from)

    def _rebalancing(self, topic: str) -> Rebalancer:
        return Rebalancer(
            self._client,
            group=self.group,
            client_id=self.client_id,
            topics=[topic],
            owner=self._reading,
            locking=True,
            model=self._model,
            strategy=self._strategy,
            listener=self._tell,
            broker_name=self._broker_name,
            pace=self._pace,
        )

    def _fetch(self, subscription: Subscription) -> None:
        before = self._fetchers.pop(subscription.topic, None)
        if before is not None:
            before.close()
        self._fetchers[subscription.topic] = Fetcher(
            self._client,
            subscription,
            reading=self._reading,
            statistics=self._statistics,
            wait_ms=self._pace.fetch_ms,
        )

    def _tell(self, topic: str, *queues: list[MessageQueue]) -> None:
        """Call the listener of a topic with all queues and the own ones."""
        listener = self._listeners.get(topic)
        if listener is not None:
            listener(topic, *queues)

    def _look_at_topics(self) -> None:
        """Check for new queues: with assigned queues no rebalance does."""
        for topic in list(self._listeners) if self._is_assigned else ():
            queues = self.queues_of(topic)
            before = self._listened.get(topic)
            self._listened[topic] = queues
            if before is not None and queues != before:
                own = [queue for queue in self.assignment() if queue.topic == topic]
                self._tell(topic, queues, own)

    def _raise_trouble(self) -> None:
        """Raise the error that prevents reading or committing, unless it is temporary."""
        of_group = self._rebalancer.trouble if self._rebalancer is not None else None
        for trouble in (of_group, self._reading.trouble):
            if trouble is not None and not isinstance(trouble, BusyError):
                raise trouble

    def _check_reads(self) -> None:
        self._check_open()
        if self._rebalancer is None and not self._is_assigned:
            raise ConsumerUsageError("This consumer reads nothing yet.", remedy=_FIRST)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerUsageError("This consumer is closed.", remedy="Create a new consumer.")
