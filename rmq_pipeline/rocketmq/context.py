"""Objects that the handlers of the gRPC endpoint share."""

from collections.abc import Iterable
from dataclasses import dataclass

from rmq_pipeline.access.access import Access
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import AlreadyExistsError, TopicNotFoundError
from rmq_pipeline.rocketmq.clients import Clients
from rmq_pipeline.rocketmq.leases import Leases
from rmq_pipeline.route_table import RouteFile
from rmq_pipeline.settings import Settings


class Groups:
    """Creates unknown groups, as RocketMQ's brokers do."""

    def __init__(self, broker: Broker, bridge: Bridge, *, routes: RouteFile | None = None) -> None:
        self._broker = broker
        self._bridge = bridge
        self._routes = routes

    async def ensure(self, group: str, topics: Iterable[str]) -> None:
        """Create a group if it is missing and the settings allow it; ordered for a fifo topic.

        Raises:
            IllegalConsumerGroupError: the group's name is invalid.
        """
        engine = self._broker.engine
        if group in engine.state.group_ids or not engine.settings.grpc_create_groups:
            return
        order = "message_group" if any(map(self._is_fifo, topics)) else "none"
        try:
            await self._bridge.run(self._broker.ensure_group, group, order=order)
        except AlreadyExistsError:  # another client created it with another order
            return

    def is_ordered(self, group: str) -> bool:
        """Return whether the group gets messages in order, by message group or by queue."""
        state = self._broker.engine.state
        found = state.groups.get(state.group_ids.get(group, 0))
        return found is not None and found.order != "none"

    def _is_fifo(self, topic: str) -> bool:
        # A consumer announces all its topics to each broker; one may be at other brokers only.
        routed = self._routes.table.topics.get(topic) if self._routes is not None else None
        if routed is not None:
            return routed.type == "fifo"
        try:
            return self._broker.engine.state.topic(topic).topic.type == "fifo"
        except TopicNotFoundError:
            return False


@dataclass(frozen=True)
class Context:
    """One open endpoint: its broker, and its clients and leases."""

    broker: Broker
    bridge: Bridge
    clients: Clients
    groups: Groups
    #: Leases of push consumers.
    leases: Leases
    #: The host:port that the endpoint listens on.
    address: str
    #: None: callers need no credentials.
    access: Access | None
    #: Of the broker.
    clock: Clock
    settings: Settings
    #: None: this broker has all topics.
    routes: RouteFile | None
