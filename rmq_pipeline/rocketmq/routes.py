"""Routes: all queues of a topic are on this broker, at the address that the client dialled."""

from typing import Any, Final

from rmq_pipeline.errors import IllegalTopicError, TopicNotFoundError
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import (
    OK,
    Address,
    AddressScheme,
    Assignment,
    Broker,
    Endpoints,
    MessageQueue,
    MessageType,
    Permission,
    QueryAssignmentResponse,
    QueryRouteResponse,
)
from rmq_pipeline.topic import is_hidden

BROKER_NAME: Final = "rmq"
#: RocketMQ's own words for an unknown topic: programs and tests of its clients search for them.
_NO_ROUTE: Final = "CODE: 17  DESC: No topic route info in name server for the topic: {}."
#: Queue id in the assignments of an unordered group: all queues of the broker.
_ANY_QUEUE: Final = -1
#: Message types that a topic takes. A mixed topic names the four that every client knows: older
#: clients refuse a route with any other.
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
    """Handlers of QueryRoute and QueryAssignment."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def query_route(self, request: Any, caller: Caller) -> Any:
        """Return all queues of a topic; every client relies on queue 0 of broker id 0."""
        topic = self._topic(request, caller)
        broker = self._broker(request)
        queues = [
            self._queue(request.topic, topic, queue_id=queue_id, broker=broker)
            for queue_id in range(topic.queues)
        ]
        return QueryRouteResponse(status=OK, message_queues=queues)

    async def query_assignment(self, request: Any, caller: Caller) -> Any:
        """Return a push consumer's queues: each one for an ordered group, else one for all."""
        topic = self._topic(request, caller)
        group = caller.named(request.group)
        await self._context.groups.ensure(group, [topic.name])
        self._context.bridge.engine.state.group(group)
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
            raise IllegalTopicError(f"Topic {name} is a system topic.")
        try:
            return self._context.bridge.engine.state.topic(name).topic
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"{error.message} {_NO_ROUTE.format(name)}", remedy=error.remedy
            ) from error

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
        """Return the broker at the dialled address: behind NAT no other one works."""
        known = endpoints(request.endpoints) or endpoints_of(self._context.address)
        return Broker(name=BROKER_NAME, id=0, endpoints=known)


def endpoints(dialled: Any) -> Any:
    """Return the address that a client dialled, with one host name; None if it names none."""
    if not dialled.addresses:
        return None
    if dialled.scheme == AddressScheme.DOMAIN_NAME and len(dialled.addresses) > 1:
        return Endpoints(scheme=dialled.scheme, addresses=dialled.addresses[:1])
    return dialled


def endpoints_of(address: str) -> Any:
    """Return an address that the endpoint listens on."""
    host, _, port = address.rpartition(":")
    scheme = AddressScheme.IPv6 if ":" in host else AddressScheme.IPv4
    return Endpoints(scheme=scheme, addresses=[Address(host=host.strip("[]"), port=int(port))])
