"""Consumer groups that are created on first use, unless the settings forbid it."""

from collections.abc import Iterable

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import AlreadyExistsError, TopicNotFoundError
from rmq_pipeline.rocketmq.bridge import Bridge


class Groups:
    """Creates unknown groups, as RocketMQ's brokers do."""

    def __init__(self, broker: Broker, bridge: Bridge) -> None:
        self._broker = broker
        self._bridge = bridge

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
        try:
            return self._broker.engine.state.topic(topic).topic.type == "fifo"
        except TopicNotFoundError:
            return False
