"""A consumer that asks for messages when it wants them, and says itself how far it is."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import pyarrow as pa

from rmq_pipeline.clock import SteadyClock
from rmq_pipeline.consumer.allocation import Strategy, strategy_of
from rmq_pipeline.consumer.fetching import Fetcher, described
from rmq_pipeline.consumer.flow_control import Thresholds
from rmq_pipeline.consumer.kept_offsets import (
    BrokerOffsets,
    FileOffsets,
    KeptOffsets,
    ReadingVerbs,
    StartFrom,
    checked_interval,
)
from rmq_pipeline.consumer.membership import new_client_id, steady_client_id
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue, queues_of
from rmq_pipeline.consumer.offset_file import OffsetFile
from rmq_pipeline.consumer.polled import one_by_one
from rmq_pipeline.consumer.reading import Asked, Reading
from rmq_pipeline.consumer.rebalancing import Model, Pace, QueueListener, Rebalancer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.consumer.timetable import Timetable
from rmq_pipeline.errors import BusyError, ConsumerUsageError, IllegalOffsetError

AUTO_COMMIT_MS: Final = 5_000
POLL_S: Final = 5.0
POLL_ROWS: Final = 1_000
#: How long who polls may miss that a queue is held again, which nobody tells.
_LOOK_S: Final = 1.0
#: How long ``close`` tries to commit, while no broker answers.
_PATIENCE_S: Final = 5.0


class PullConsumer:
    """Reads topics by offset: ``subscribe`` shares them with the group, ``assign`` takes queues.

    Messages are done with when the next poll asks for more, or by ``commit`` where
    ``auto_commit_ms`` is None: what a crash interrupts comes again, and nothing is passed over.
    (RocketMQ's counts a message as done when it is polled.) One thread polls; any thread may call
    the other methods.

    Closing at the end of a ``with`` counts the last poll as done, too, unless an exception ends it.
    """

    def __init__(
        self,
        client: ReadingVerbs,
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
        """A consumer of a group, which must exist; it reads nothing yet.

        Args:
            client: stays open as long as this.
            model: broadcasting keeps offsets in a file of this machine, and reads all queues.
            strategy: AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, or one of consumer.allocation.
            start_from: where queues begin that the group has no committed offset of: last, first,
                or ms since 1970.
            auto_commit_ms: how often what is done with is committed; None: by ``commit`` only.
            thresholds: the most that is fetched ahead, of each queue.
            client_id: whose member this is; ``room@name`` for strategies that go by rooms. A
                broadcasting consumer has its offsets by it.
            offsets_folder: of broadcasting consumers; else ``~/.rocketmq_offsets``.
            broker_name: the name of all queues' broker, ``room@name`` likewise.
        """
        if model not in ("clustering", "broadcasting"):
            raise ConsumerUsageError(f"A model is clustering or broadcasting, not {model!r}.")
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

    # ------------------------------------------------------------------------------- what is read

    def subscribe(self, topic: str, filter: str = "*", *, filter_type: str = "tag") -> Self:
        """Read this member's share of a topic; more topics by more calls.

        Raises:
            ConsumerUsageError: queues are assigned.
            TopicNotFoundError: create the topic first; so with the consumer group.
        """
        self._check_open()
        subscription = Subscription(topic, filter, filter_type)
        with self._subscribing:
            if self._is_assigned:
                raise ConsumerUsageError(
                    "Queues are assigned to this consumer: it cannot subscribe."
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
        """Read these queues and no others, whatever other members do.

        Raises:
            ConsumerUsageError: topics are subscribed to, or there is no such queue.
        """
        self._check_open()
        if self._rebalancer is not None:
            raise ConsumerUsageError("This consumer has subscribed: no queues can be assigned.")
        wanted = set(queues)
        for topic in {queue.topic for queue in wanted}:
            if unknown := {q for q in wanted if q.topic == topic} - set(self.queues_of(topic)):
                raise ConsumerUsageError(f"There is no {min(unknown).key}.")
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
        """All queues of a topic."""
        count = self._client.describe_topic(topic)["queues"]
        return queues_of(topic, count, broker_name=self._broker_name)

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now."""
        return self._reading.queues()

    def message_queue_changed(self, topic: str, listener: QueueListener) -> None:
        """Call ``listener(topic, all queues, own queues)`` when they change.

        Where queues are assigned, the topic is looked at for new ones every 30 s. The listener is
        called from a thread of this consumer, and must not wait for it.
        """
        self._listeners[topic] = listener

    # ------------------------------------------------------------------------------------ reading

    def poll(self, timeout_s: float = POLL_S, *, limit: int = POLL_ROWS) -> pa.Table:
        """Messages, and none when none came in time; what was polled before is done with.

        Returns:
            topic and schema.READ, in order within each queue.

        Raises:
            ConsumerUsageError: nothing is subscribed to or assigned, or this is closed.
            RocketMQError: why nothing can be read: a topic is gone, a room is not known.
        """
        self._check_reads()
        if self._reading.commit_trouble is not None:
            raise self._reading.commit_trouble
        if self._auto_commit_ms is not None:
            self._reading.settle()
        give_up_at = time.monotonic() + timeout_s
        while True:
            messages = self._reading.give_out(limit)
            left_s = give_up_at - time.monotonic()
            if messages.num_rows or left_s <= 0:
                return messages
            self._check_reads()
            self._raise_trouble()
            for fetcher in list(self._fetchers.values()):
                fetcher.fetch_moved()
            self._reading.wait_for_messages(min(left_s, _LOOK_S))

    def messages(
        self, timeout_s: float = POLL_S, *, limit: int = POLL_ROWS
    ) -> Iterator[ReceivedMessage]:
        """Message by message, until none came for ``timeout_s``; each ``limit`` are one poll.

        Who leaves the loop early leaves the messages it has not seen for the next poll.
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
                self._reading.give_back(first)

    def pause(self, *queues: MessageQueue) -> None:
        """Poll nothing of these queues, until ``resume``."""
        self._reading.pause(queues, is_paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        """Poll them again."""
        self._reading.pause(queues, is_paused=False)

    def paused(self) -> list[MessageQueue]:
        """Queues that are paused."""
        return self._reading.paused()

    def seek(self, queue: MessageQueue, to: int | Literal["begin", "end"]) -> None:
        """Go on from an offset, from the first message that is kept, or behind the last one.

        Raises:
            IllegalOffsetError: the queue does not keep it; says what it keeps.
            ConsumerUsageError: the queue is not read here.
        """
        self._check_open()
        self._reading.check(queue)
        bounds = self._client.describe_topic(queue.topic)["offsets"][queue.queue_id]
        low, high = bounds["min_offset"], bounds["max_offset"]
        offset = {"begin": low, "end": high}.get(to, to) if isinstance(to, str) else to
        if isinstance(offset, str):
            raise ConsumerUsageError(f"Seek an offset, begin or end, not {to!r}.")
        if not low <= offset <= high:
            raise IllegalOffsetError(f"{queue.key} keeps offsets {low} to {high}, not {offset}.")
        self._reading.seek(queue, offset)

    def seek_to_time(self, queue: MessageQueue, at_ms: int) -> None:
        """Go on from the first message stored at or after a time in ms since 1970."""
        self.seek(queue, self.offset_for_time(queue, at_ms))

    def offset_for_time(self, queue: MessageQueue, at_ms: int) -> int:
        """The first offset stored at or after a time; behind the last one when there is none."""
        return self._client.offset_at(queue.topic, queue.queue_id, at_ms=at_ms)

    def position(self, queue: MessageQueue) -> int:
        """The offset of the next message of a queue that a poll gives."""
        return self._reading.position(queue)

    # --------------------------------------------------------------------------------- committing

    def commit(self, offsets: Asked = None) -> dict[MessageQueue, int]:
        """Commit all that polls have given, or that of some queues, or these offsets.

        Returns:
            The committed offsets. One that is not what was asked for was put there by somebody
            else meanwhile, and reading goes on there.

        Raises:
            IllegalOffsetError: an offset lies behind the end of its queue.
            QueueLockedError, BusyError: another member has one of the queues, or may have it. One
                that had to be let go while it was worked on is read no more then.
        """
        self._check_open()
        return self._reading.commit_given(offsets)

    def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset; None when the group has none of the queue."""
        return self._reading.committed(queue)

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Count the last poll as done, hand the queues over, and leave the group."""
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

    # ---------------------------------------------------------------------------------- its parts

    def _own_offsets(self, start_from: StartFrom, folder: Path | str | None) -> KeptOffsets | None:
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
        """All queues of a topic, and the own ones."""
        listener = self._listeners.get(topic)
        if listener is not None:
            listener(topic, *queues)

    def _look_at_topics(self) -> None:
        """Where queues are assigned nobody else looks for new ones."""
        for topic in list(self._listeners) if self._is_assigned else ():
            queues = self.queues_of(topic)
            before = self._listened.get(topic)
            self._listened[topic] = queues
            if before is not None and queues != before:
                own = [queue for queue in self.assignment() if queue.topic == topic]
                self._tell(topic, queues, own)

    def _raise_trouble(self) -> None:
        """Say why nothing comes, or is committed, unless it will by and by."""
        of_group = self._rebalancer.trouble if self._rebalancer is not None else None
        for trouble in (of_group, self._reading.trouble):
            if trouble is not None and not isinstance(trouble, BusyError):
                raise trouble

    def _check_reads(self) -> None:
        self._check_open()
        if self._rebalancer is None and not self._is_assigned:
            raise ConsumerUsageError("This consumer reads nothing yet.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerUsageError("This consumer is closed.")
