"""Assembly of a running push consumer from its parts."""

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rmq_pipeline import limits
from rmq_pipeline.clock import Clock
from rmq_pipeline.consumer.allocation import strategy_of
from rmq_pipeline.consumer.broadcasting import ANYWHERE, KEEP_MS, Keeper, KeptPlaces, Reading
from rmq_pipeline.consumer.by_key import ByKey
from rmq_pipeline.consumer.concurrently import Concurrently
from rmq_pipeline.consumer.listener import SUSPEND_MS, Calling, Hooks, Listener, Result
from rmq_pipeline.consumer.membership import Place, Suspects
from rmq_pipeline.consumer.message_queue import MessageQueue, Subscription
from rmq_pipeline.consumer.offset_store import BrokerOffsets, FileOffsets, OffsetFile
from rmq_pipeline.consumer.orderly import Orderly
from rmq_pipeline.consumer.owned_queues import OwnedQueues
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.puller import Leasing, Puller, Service, Source
from rmq_pipeline.consumer.push_settings import PushSettings
from rmq_pipeline.consumer.rebalancing import Rebalancer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Retries, Settler, Settling
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable, Workers
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Intervals of the checks for stuck workers, and for calls that time out.
LOOK_MS: Final = 100
EXPIRE_MS: Final = 1_000


class Consuming:
    """Running push consumer, from its start to its close."""

    def __init__(
        self,
        verbs: Verbs,
        settings: PushSettings,
        *,
        group: Mapping[str, Any],
        listener: Listener,
        subscriptions: Sequence[Subscription],
        hooks: Hooks,
        clock: Clock,
    ) -> None:
        """Create the parts.

        Args:
            group: the broker's description of the consumer group.
        """
        self._verbs, self._settings, self._clock = verbs, settings, clock
        self._subscriptions = {each.topic: each for each in subscriptions}
        #: Held while topics change: two simultaneous pulls of a queue could reorder messages.
        self._subscribing = threading.Lock()
        #: Held while a puller starts, so that ``close`` cannot miss it.
        self._beginning = threading.Lock()
        self._pullers: dict[str, Puller] = {}
        self._is_held = self._is_closing = False
        #: Identifies this process among processes with the same client id.
        self._instance = secrets.token_hex(4)
        self._suspects = Suspects(self._known_suspects, tell=self._report_now)
        self._file: FileOffsets | None = None
        self._settler: Settler | None = None
        # The step that can raise precedes those that start threads.
        self.queues = self._own()
        self.statistics = Statistics(clock.now_ms)
        self.timetable = Timetable(clock, name="rmq-timetable")
        self.workers = Workers(
            settings.threads,
            most=settings.most_threads,
            stuck_after_ms=settings.stuck_after_ms,
            name=f"rmq-consume-{settings.group}",
        )
        calling = Calling(
            listener,
            group=settings.group,
            hooks=hooks,
            failed=Result.SUSPEND if settings.order == "queue" else Result.LATER,
            timeout_ms=settings.consume_timeout_ms,
        )
        self._service = self._serve(calling, group)
        self.rebalancer = Rebalancer(
            verbs,
            group=settings.group,
            client_id=settings.client_id,
            topics=list(self._subscriptions),
            owner=self.queues,
            locking=settings.is_locking,
            model=settings.model,
            strategy=strategy_of(settings.strategy),
            broker_name=settings.broker_name,
            pace=settings.pace,
        )

    # ---------------------------------------------------------------------------------------- parts

    def _own(self) -> OwnedQueues:
        """Create the settler or the offset store, and the owned queues."""
        settings = self._settings
        places = None
        self._settling: Settling
        if settings.is_broadcasting:
            self._file = FileOffsets(
                self._verbs,
                OffsetFile(settings.client_id, settings.group, folder=settings.offsets_folder),
                start_from=settings.start_from,
            )
            of_group = BrokerOffsets(
                self._verbs,
                group=settings.group,
                client_id=settings.client_id,
                start_from=settings.start_from,
            )
            places = KeptPlaces(self._file, of_group)
            self._settling = self._keeper = Keeper(self._file, group=settings.group)
        else:
            renews = settings.order == "concurrently"
            self._settler = Settler(
                self._verbs,
                settings.group,
                held=self._leased if renews else None,
                pace=settings.pace,
            )
            self._settling = self._settler
        return OwnedQueues(
            self._settling,
            clock=self._clock,
            wake=self._wake,
            report=self._report,
            places=places,
            ordered=settings.order != "concurrently",
            pull_expiry_ms=settings.pace.pull_expiry_ms,
        )

    def _serve(self, calling: Calling, group: Mapping[str, Any]) -> Service:
        settings = self._settings
        if settings.order == "concurrently":
            return Concurrently(
                calling,
                settling=self._settling,
                workers=self.workers,
                statistics=self.statistics,
                clock=self._clock,
                batch=settings.batch,
                timeout_ms=settings.consume_timeout_ms,
            )
        if settings.order == "queue":
            return Orderly(
                calling,
                settling=self._settling,
                workers=self.workers,
                statistics=self.statistics,
                timetable=self.timetable,
                clock=self._clock,
                holds=self._holds,
                batch=settings.batch,
                suspend_ms=SUSPEND_MS if settings.suspend_ms is None else settings.suspend_ms,
                max_reconsume_times=settings.max_reconsume_times,
                suspects=self._suspects,
            )
        return ByKey(
            calling,
            settling=self._settling,
            workers=self.workers,
            key_of=settings.key_of,
            statistics=self.statistics,
            timetable=self.timetable,
            holds=self._holds,
            batch=settings.batch,
            suspend_ms=settings.suspend_ms,
            retries=Retries(
                partial(self._verbs.describe_group, settings.group),
                known=group,
                clock=self._clock,
                max_attempts=settings.max_attempts,
            ),
            gives_back_behind=group["order"] != "none" and not settings.is_broadcasting,
            suspects=self._suspects,
        )

    def _source(self) -> Source:
        settings = self._settings
        if settings.is_broadcasting:
            return Reading(self._verbs, misplaced=self._misplaced)
        locking = settings.is_locking
        return Leasing(
            self._verbs,
            settings.group,
            client_id=settings.client_id,
            lease_ms=limits.INVISIBLE_MAX_MS if locking else settings.pace.lease_ms,
            restart=self.queues.restart if locking else None,
        )

    def _pull(self, subscription: Subscription) -> None:
        """Start pulling a topic, unless it was unsubscribed or the consumer closed meanwhile."""
        topic = subscription.topic
        with self._beginning:
            if self._is_closing or self._subscriptions.get(topic) is not subscription:
                return
            puller = self._pullers[topic] = self._puller(subscription)
            puller.hold(self._is_held)
            puller.start()

    def _puller(self, subscription: Subscription) -> Puller:
        settings = self._settings
        return Puller(
            subscription,
            source=self._source(),
            service=self._service,
            settling=self._settling,
            queues=self.queues.of_topic,
            holds=self._holds,
            thresholds=settings.thresholds,
            statistics=self.statistics,
            clock=self._clock,
            batch=settings.pull_batch,
            poll_ms=settings.poll_ms,
        )

    # ----------------------------------------------------------------------------------- operations

    def start(self) -> None:
        """Join the group and start pulling.

        Raises:
            RocketMQError: a group or topic does not exist, access is denied, or no broker answers.
        """
        settings = self._settings
        if not settings.is_broadcasting:
            for topic in self._subscriptions:
                self._verbs.start_offsets(settings.group, topic, where=settings.start_from)
        self.rebalancer.start()
        for subscription in list(self._subscriptions.values()):
            self._pull(subscription)
        self.timetable.every(LOOK_MS, self.workers.look)
        self.timetable.every(min(EXPIRE_MS, settings.consume_timeout_ms), self._service.expire)
        self.timetable.every(settings.pace.pulls_ms, self._renew_pulls)
        if settings.is_broadcasting:
            self.timetable.every(KEEP_MS, self._keep)

    def subscribe(self, subscription: Subscription) -> None:
        """Add a topic."""
        settings = self._settings
        with self._subscribing:
            if not settings.is_broadcasting:
                where = settings.start_from
                self._verbs.start_offsets(settings.group, subscription.topic, where=where)
            self._subscriptions[subscription.topic] = subscription
            try:
                self.rebalancer.subscribe(subscription.topic)
            except BaseException:
                del self._subscriptions[subscription.topic]
                raise
            self._pull(subscription)

    def unsubscribe(self, topic: str) -> None:
        """Remove a topic after its pull at the broker has ended."""
        with self._subscribing:
            with self._beginning:
                self._subscriptions.pop(topic, None)
                puller = self._pullers.get(topic)
            if puller is not None:
                # Stop before the queues are unlocked: a later pull would lease without a lock.
                puller.stop(self._patience_s)
                self._pullers.pop(topic, None)
            self.rebalancer.unsubscribe(topic)

    def hold(self, held: bool) -> None:
        """Pause or resume pulls and calls; running calls end normally."""
        self._is_held = held
        if held:
            self.workers.hold()
        else:
            self.workers.go_on()
        for puller in list(self._pullers.values()):
            puller.hold(held)

    def close(self) -> None:
        """Finish running calls, release all other messages, and leave the group."""
        timeout_s = self._settings.close_timeout_s
        with self._beginning:
            self._is_closing = True
            pullers = list(self._pullers.values())
        for puller in pullers:
            puller.stop()
        for puller in pullers:
            puller.stop(self._patience_s)
        if not self.workers.close(timeout_s):
            log.warning(
                "group %s closes while its listener still runs: its messages are redelivered",
                self._settings.group,
            )
        self.timetable.close()
        try:
            self._keep()
        finally:
            self._leave(timeout_s)

    # ----------------------------------------------------------------------- callbacks of the parts

    @property
    def _patience_s(self) -> float:
        """Seconds to wait for a pull to end."""
        return self._settings.poll_ms / 1000 + self._settings.close_timeout_s

    def _leave(self, timeout_s: float) -> None:
        self.rebalancer.close(patience_s=min(timeout_s, 20.0))
        if self._settler is not None:
            self._settler.close(timeout_s)
        if self._file is not None:
            self._file.close()

    def _leased(self) -> list[ReceivedMessage]:
        # The settler's thread may ask before the queues are there: then nothing is leased.
        return self.queues.messages() if hasattr(self, "queues") else []

    def _holds(self, queue: MessageQueue) -> bool:
        return self.rebalancer.holds(queue)

    def _wake(self, topic: str) -> None:
        puller = self._pullers.get(topic)
        if puller is not None:
            puller.wake()

    def _report(self, owned: Mapping[str, list[ProcessQueue]]) -> dict[str, Any]:
        """Return the details of this member for the heartbeat."""
        statistics = {
            topic: {
                **self.statistics.report(topic),
                "cached": sum(queue.count for queue in owned.get(topic, [])),
                "cached_bytes": sum(queue.bytes for queue in owned.get(topic, [])),
            }
            for topic in list(self._subscriptions)
        }
        return {
            "model": self._settings.model,
            "order": self._settings.order,
            **self._begun(),
            "queues": {topic: [q.queue.queue_id for q in held] for topic, held in owned.items()},
            "statistics": statistics,
        }

    def _begun(self) -> dict[str, Any]:
        """Return what the broker needs to count attempts after a crash; empty without locks."""
        settings = self._settings
        if not settings.is_locking:
            return {}
        calls = settings.batch if settings.order == "queue" else settings.most_threads
        return {"instance": self._instance, "calls": calls, "trying": self._suspects.trying}

    def _known_suspects(self) -> frozenset[Place]:
        return self.rebalancer.suspects()

    def _report_now(self) -> None:
        self.rebalancer.report_now()

    def _renew_pulls(self) -> None:
        """Replace the pullers of topics that have not been pulled for 2 minutes."""
        for topic in () if self._is_held else self.queues.expired():
            puller, subscription = self._pullers.get(topic), self._subscriptions.get(topic)
            if puller is not None and subscription is not None:
                puller.stop()
                self._pull(subscription)

    def _keep(self) -> None:
        if self._settings.is_broadcasting:
            self._keeper.keep([queue for held in self.queues.all().values() for queue in held])

    def _misplaced(self, queue: ProcessQueue) -> None:
        """Move a queue to its end if its next offset is past the end."""
        try:
            rows = self._verbs.describe_topic(queue.queue.topic)["offsets"]
            end = next(r["max_offset"] for r in rows if r["queue_id"] == queue.queue.queue_id)
        except (RocketMQError, StopIteration):
            return
        if self._file is not None and queue.next_offset > end:
            log.warning("%s ends at %d: reading continues there", queue.queue.key, end)
            queue.next_offset = int(end)
            self._file.commit({queue.queue: (ANYWHERE, int(end))})
            self.queues.restart(queue)
