"""Consumer groups that clients name are there, unless an operator wants to declare them."""

from collections.abc import Iterable

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import AlreadyExistsError, TopicNotFoundError
from rmq_pipeline.rocketmq.bridge import Bridge


class Groups:
    """Creates groups as RocketMQ's brokers do."""

    def __init__(self, broker: Broker, bridge: Bridge) -> None:
        self._broker = broker
        self._bridge = bridge

    async def ensure(self, group: str, topics: Iterable[str]) -> None:
        """Create a group if need be, and if the settings want it; ordered for a fifo topic.

        Raises:
            IllegalConsumerGroupError: its name breaks the rules.
        """
        engine = self._broker.engine
        if group in engine.state.group_ids or not engine.settings.grpc_create_groups:
            return
        order = "message_group" if any(map(self._is_fifo, topics)) else "none"
        try:
            await self._bridge.run(self._broker.ensure_group, group, order=order)
        except AlreadyExistsError:  # somebody was first, and wants it otherwise
            return

    def is_ordered(self, group: str) -> bool:
        """Whether the group takes messages in the order of their message groups, or queues."""
        state = self._broker.engine.state
        found = state.groups.get(state.group_ids.get(group, 0))
        return found is not None and found.order != "none"

    def _is_fifo(self, topic: str) -> bool:
        try:
            return self._broker.engine.state.topic(topic).topic.type == "fifo"
        except TopicNotFoundError:
            return False
