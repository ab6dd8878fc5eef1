"""Push consumer: calls a listener, in one of three orders (semantics §6)."""

import threading
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from rmq_pipeline.clock import Clock, SteadyClock
from rmq_pipeline.consumer.consuming import Consuming
from rmq_pipeline.consumer.listener import Hook, Hooks, Listener
from rmq_pipeline.consumer.membership import new_client_id, steady_client_id
from rmq_pipeline.consumer.message_queue import MessageQueue, Subscription
from rmq_pipeline.consumer.push_settings import PushOptions, PushSettings
from rmq_pipeline.consumer.statistics import Totals
from rmq_pipeline.errors import ConsumerUsageError
from rmq_pipeline.verbs import Verbs


class PushConsumer:
    """Consumer that calls a listener with the messages of the queues that this member owns.

    ``listener(messages, context)`` returns a Result or its string value. None or an exception means
    that the messages failed. The setting ``order`` determines the order of calls:

    * concurrently: one call per thread at a time, in no order.
    * queue: one call per queue at a time, in the order of the queue.
    * key: one call per key at a time, in the order of the key; keys run in parallel.

    Delivery is at least once: after a failure or a crash, the listener gets a message again.
    """

    def __init__(
        self,
        client: Verbs,
        group: str,
        *,
        clock: Clock | None = None,
        **options: Unpack[PushOptions],
    ) -> None:
        """Create a consumer of an existing group; ``start`` starts it.

        Args:
            client: must stay open as long as the consumer.
            group: the consumer group.
            clock: measures timeouts and suspensions.
            options: settings, see PushOptions.

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
        """Name of the consumer group."""
        return self._settings.group

    @property
    def client_id(self) -> str:
        """Id of this member in the group."""
        return self._settings.client_id

    def subscribe(self, topic: str, filter: str = "*", *, filter_type: str = "tag") -> Self:
        """Consume a topic; call it once per topic, before or after ``start``.

        Raises:
            FilterExpressionError: the filter does not parse.
            ConsumerUsageError: the consumer is closed, or runs with the topic already.
        """
        self._check_open()
        subscription = Subscription(topic, filter, filter_type)
        if self._consuming is not None:
            if topic in self._subscriptions:
                raise ConsumerUsageError(
                    f"This consumer has already subscribed to {topic}.",
                    remedy="Close the consumer to change a filter.",
                )
            self._consuming.subscribe(subscription)
            self._check_open()  # another thread may have closed it meanwhile
        self._subscriptions[topic] = subscription
        return self

    def unsubscribe(self, topic: str) -> None:
        """Leave a topic to the other members; waits for a running pull to end."""
        self._subscriptions.pop(topic, None)
        if self._consuming is not None:
            self._consuming.unsubscribe(topic)

    def listen(self, listener: Listener) -> Self:
        """Set the listener, which is called with messages and a context.

        Raises:
            ConsumerUsageError: the consumer runs or is closed.
        """
        self._check_open()
        if self._consuming is not None:
            raise ConsumerUsageError(
                "The listener of a running consumer cannot change.",
                remedy="Set the listener before start.",
            )
        self._listener = listener
        return self

    def add_hook(self, hook: Hook) -> Self:
        """Add a hook that runs before and after every call of the listener."""
        self._hooks.add(hook)
        return self

    def start(self) -> Self:
        """Join the group and start consuming.

        Raises:
            ConsumerUsageError: the consumer has no listener or no topic, runs already, is closed,
                or its order conflicts with the group's order.
            RocketMQError: a group or topic does not exist, access is denied, or no broker answers.
        """
        with self._lock:
            self._check_open()
            if self._consuming is not None:
                raise ConsumerUsageError("This consumer runs already.", remedy="Call start once.")
            if self._listener is None or not self._subscriptions:
                raise ConsumerUsageError(
                    "This consumer has no topic or no listener.",
                    remedy="Call subscribe and listen first.",
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
            # Set before ``start``, because the first call of the listener may close the consumer.
            self._consuming = consuming
            try:
                consuming.start()
            except BaseException:
                self._consuming = None
                consuming.close()
                raise
        return self

    def suspend(self) -> None:
        """Pause pulls and new calls of the listener until ``resume``; running calls end."""
        self._running().hold(True)

    def resume(self) -> None:
        """Resume pulls and calls after ``suspend``."""
        self._running().hold(False)

    def owned(self) -> list[MessageQueue]:
        """Return the queues that this member owns now, sorted."""
        return self._running().rebalancer.owned()

    def statistics(self, topic: str) -> Totals:
        """Return the counts of a topic since the start; ``describe_group`` has the rates."""
        return self._running().statistics.totals(topic)

    def close(self) -> None:
        """Finish running calls, release held messages, and leave the group.

        A listener may call it too: then it returns at once and closes after the call has ended.
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
        """Start the consumer if necessary."""
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
            raise ConsumerUsageError("This consumer does not run.", remedy="Call start first.")
        return self._consuming

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerUsageError("This consumer is closed.", remedy="Create a new consumer.")
