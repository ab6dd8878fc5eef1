"""Where the queues of a topic are: here, at the address that the client came by."""

from typing import Any, Final

from rmq_pipeline.errors import IllegalTopicError
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.endpoints import endpoints, endpoints_of
from rmq_pipeline.rocketmq.protocol import (
    Assignment,
    Broker,
    MessageQueue,
    MessageType,
    Permission,
    QueryAssignmentResponse,
    QueryRouteResponse,
)
from rmq_pipeline.rocketmq.status import OK
from rmq_pipeline.topic import is_hidden

BROKER_NAME: Final = "rmq"
#: In the assignments of an unordered group: all queues of the broker.
_ANY_QUEUE: Final = -1
#: What a topic takes. A mixed one names the four that every client knows: others make older
#: clients refuse the whole route.
ACCEPTED: Final[dict[str, tuple[int, ...]]] = {
    "normal": (MessageType.NORMAL,),
    "fifo": (MessageType.FIFO,),
    "delay": (MessageType.DELAY,),
    "transaction": (MessageType.TRANSACTION,),
    "lite": (MessageType.LITE,),
    "priority": (MessageType.PRIORITY,),
    "mixed": (MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION),
}


class Routes:
    """QueryRoute and QueryAssignment."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def query_route(self, request: Any, caller: Caller) -> Any:
        """All queues of a topic. All clients count on queue 0 of broker id 0."""
        topic = self._topic(request, caller)
        broker = self._broker(request)
        queues = [
            self._queue(request.topic, topic, queue_id=queue_id, broker=broker)
            for queue_id in range(topic.queues)
        ]
        return QueryRouteResponse(status=OK, message_queues=queues)

    async def query_assignment(self, request: Any, caller: Caller) -> Any:
        """What a push consumer receives from: a queue of an ordered group, else all in one."""
        topic = self._topic(request, caller)
        group = caller.named(request.group)
        await self._context.groups.ensure(group, [topic.name])
        self._context.engine.state.group(group)
        ordered = self._context.groups.is_ordered(group)
        broker = self._broker(request)
        assignments = [
            Assignment(
                message_queue=self._queue(request.topic, topic, queue_id=queue_id, broker=broker)
            )
            for queue_id in (range(topic.queues) if ordered else (_ANY_QUEUE,))
        ]
        return QueryAssignmentResponse(status=OK, assignments=assignments)

    def _topic(self, request: Any, caller: Caller) -> Any:
        name = caller.named(request.topic)
        if not request.topic.name:
            raise IllegalTopicError("The topic has no name.")
        if is_hidden(name):
            raise IllegalTopicError(f"Topic {name} is the system's.")
        return self._context.engine.state.topic(name).topic

    @staticmethod
    def _queue(resource: Any, topic: Any, *, queue_id: int, broker: Any) -> Any:
        return MessageQueue(
            topic=resource,
            id=queue_id,
            permission=Permission.READ_WRITE,
            broker=broker,
            accept_message_types=ACCEPTED[topic.type],
        )

    def _broker(self, request: Any) -> Any:
        """The one broker, where the client has found it: behind NAT it knows no better address."""
        known = endpoints(request.endpoints) or endpoints_of(self._context.address)
        return Broker(name=BROKER_NAME, id=0, endpoints=known)
