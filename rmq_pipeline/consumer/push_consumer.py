"""A consumer that calls a listener, in one of three orders of work (semantics §6)."""

import threading
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from rmq_pipeline.clock import Clock, SteadyClock
from rmq_pipeline.consumer.consuming import Consuming
from rmq_pipeline.consumer.hooks import Hook, Hooks
from rmq_pipeline.consumer.listener import Listener
from rmq_pipeline.consumer.membership import new_client_id, steady_client_id
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.push_settings import PushOptions, PushSettings
from rmq_pipeline.consumer.statistics import Totals
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.consumer.verbs import Verbs
from rmq_pipeline.errors import ConsumerUsageError


class PushConsumer:
    """Calls a listener with the messages of the queues that this member of a group owns.

    ``listener(messages, context)`` returns a Result (or its value as text); None or an exception
    says that they failed. In which order it is called:

    * concurrently: as many calls at a time as there are threads, in no order.
    * queue: one call at a time for each queue, in the order of the queue.
    * key: one call at a time for each key, in the order of the key; different keys at once.

    A listener is called at least once for each message: again after a crash, and after a failure.
    """

    def __init__(
        self,
        client: Verbs,
        group: str,
        *,
        clock: Clock | None = None,
        **options: Unpack[PushOptions],
    ) -> None:
        """A consumer of a group, which must exist; ``start`` begins.

        Args:
            client: stays open as long as this.
            clock: of timeouts and suspensions.
            options: PushOptions says what each means.

        Raises:
            ConsumerUsageError: a setting is out of range.
        """
        settings = PushSettings(group=group, **options)
        clustering = settings.model == "clustering"
        default_id = new_client_id() if clustering else steady_client_id()
        self._settings = replace(settings, client_id=settings.client_id or default_id)
        self._client, self._clock = client, clock or SteadyClock()
        self._hooks = Hooks(settings.hooks)
        self._subscriptions: dict[str, Subscription] = {}
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._consuming: Consuming | None = None
        self._is_closed = False

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._settings.group

    @property
    def client_id(self) -> str:
        """Which member this is."""
        return self._settings.client_id

    def subscribe(self, topic: str, filter: str = "*", *, filter_type: str = "tag") -> Self:
        """Consume a topic; more topics by more calls, also while it runs.

        Raises:
            RequestError: the filter does not parse, or this is closed.
        """
        self._check_open()
        subscription = Subscription(topic, filter, filter_type)
        if self._consuming is not None:
            if topic in self._subscriptions:
                raise ConsumerUsageError(
                    f"{topic} is subscribed to already: close this consumer to change its filter."
                )
            self._consuming.subscribe(subscription)
            self._check_open()  # another thread may have closed it meanwhile
        self._subscriptions[topic] = subscription
        return self

    def unsubscribe(self, topic: str) -> None:
        """Leave a topic to the other members, once a pull that waits at the broker has ended."""
        self._subscriptions.pop(topic, None)
        if self._consuming is not None:
            self._consuming.unsubscribe(topic)

    def listen(self, listener: Listener) -> Self:
        """Who is called with the messages, and with a context that says more."""
        self._check_open()
        if self._consuming is not None:
            raise ConsumerUsageError("A consumer that runs keeps its listener.")
        self._listener = listener
        return self

    def add_hook(self, hook: Hook) -> Self:
        """Told before and after every call of the listener."""
        self._hooks.add(hook)
        return self

    def start(self) -> Self:
        """Join the group and begin.

        Raises:
            ConsumerUsageError: there is no listener or no topic; it runs or is closed; the group's
                order is at odds with this consumer's.
            RocketMQError: no such group or topic, no right, no broker.
        """
        with self._lock:
            self._check_open()
            if self._consuming is not None:
                raise ConsumerUsageError("This consumer runs already.")
            if self._listener is None or not self._subscriptions:
                raise ConsumerUsageError(
                    "A consumer needs a topic and a listener: call subscribe and listen first."
                )
            group = self._client.describe_group(self.group)
            self._settings.check_group(group["order"])
            consuming = Consuming(
                self._client,
                self._settings,
                group=group,
                listener=self._listener,
                subscriptions=list(self._subscriptions.values()),
                hooks=self._hooks,
                clock=self._clock,
            )
            # Before the first call of the listener, which may close this.
            self._consuming = consuming
            try:
                consuming.start()
            except BaseException:
                self._consuming = None
                consuming.close()
                raise
        return self

    def suspend(self) -> None:
        """Call the listener no more, and pull nothing, until ``resume``; calls under way end."""
        self._running().hold(True)

    def resume(self) -> None:
        """Go on after ``suspend``."""
        self._running().hold(False)

    def owned(self) -> list[MessageQueue]:
        """The queues that are this member's now."""
        return self._running().rebalancer.owned()

    def statistics(self, topic: str) -> Totals:
        """What was counted of a topic since the start; rates are in ``describe_group``."""
        return self._running().statistics.totals(topic)

    def close(self) -> None:
        """Finish calls under way, give back what is held, leave the group.

        A listener may call it, too: then it returns at once, and happens once that call has ended.
        """
        consuming = self._consuming
        if consuming is not None and consuming.workers.includes_caller():
            threading.Thread(target=self._close, name="rmq-close").start()
        else:
            self._close()

    def _close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._consuming is not None:
                self._consuming.close()

    def __enter__(self) -> Self:
        """Start, unless it runs."""
        return self if self._consuming is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _running(self) -> Consuming:
        if self._consuming is None or self._is_closed:
            raise ConsumerUsageError("This consumer does not run.")
        return self._consuming

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerUsageError("This consumer is closed.")
