"""Routes: the queues of a topic, of this broker alone or of all brokers of the route table."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rmq_pipeline.access.source import is_address, split_address
from rmq_pipeline.errors import IllegalTopicError, RequestError, TopicNotFoundError
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
from rmq_pipeline.route_table import RoutedBroker, RoutedTopic, RouteTable
from rmq_pipeline.topic import Topic, is_hidden

#: RocketMQ's own words for an unknown topic: programs and tests of its clients search for them.
_NO_ROUTE: Final = "CODE: 17  DESC: No topic route info in name server for the topic: {}."
#: Queue id in the assignments of an unordered group: all queues of the broker.
_ANY_QUEUE: Final = -1
#: Interval at which the file of the route table is looked at.
_LOOK_MS: Final = 1_000
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
        self._look_ms = 0
        #: The last look at the file of the route table.
        self._look: asyncio.Task[None] | None = None

    async def query_route(self, request: Any, caller: Caller) -> Any:
        """Return all queues of a topic; every client relies on queue 0 of broker id 0."""
        route = await self._route(request, caller)
        return QueryRouteResponse(
            status=OK,
            message_queues=[
                _queue(request.topic, route, queue_id=queue_id, broker=name)
                for name, queue_id in route.places
            ],
        )

    async def query_assignment(self, request: Any, caller: Caller) -> Any:
        """Return a push consumer's queues: each one for an ordered group, else one per broker."""
        route = await self._route(request, caller)
        group = caller.named(request.group)
        await self._context.groups.ensure(group, [caller.named(request.topic)])
        self._context.bridge.engine.state.group(group)
        places = route.places
        if not self._context.groups.is_ordered(group):
            places = [(name, _ANY_QUEUE) for name in route.brokers]
        assignments = [
            Assignment(message_queue=_queue(request.topic, route, queue_id=queue_id, broker=name))
            for name, queue_id in places
        ]
        return QueryAssignmentResponse(status=OK, assignments=assignments)

    async def _route(self, request: Any, caller: Caller) -> "_Route":
        """Return the route of the table or, for a topic that it lacks, of this broker alone.

        Raises:
            IllegalTopicError: the topic is unnamed or hidden, or has another type in the table.
            TopicNotFoundError: this broker ought to have the topic.
        """
        name = caller.named(request.topic)
        if not request.topic.name:
            raise IllegalTopicError("The topic has no name.")
        if is_hidden(name):
            raise IllegalTopicError(f"Topic {name} is a system topic.")
        table = await self._table()
        routed = table.topics.get(name) if table is not None else None
        if table is None or routed is None:
            topic = self._own(name)
            own = self._context.settings.broker_name
            places = [(own, queue_id) for queue_id in range(topic.queues)]
            return _Route(topic.type, places, {own: self._broker(own, request)})
        if self._context.settings.broker_name in routed.queues:
            _check_type(self._own(name), routed)
        brokers = {each: table.brokers[each] for each in sorted(routed.queues)}
        encrypted = _is_encrypted(caller.call)
        return _Route(
            routed.type,
            routed.places(),
            {each: _at(broker, encrypted=encrypted) for each, broker in brokers.items()},
        )

    async def _table(self) -> RouteTable | None:
        """Return the route table; look for a changed file at most once a second."""
        routes = self._context.routes
        if routes is None:
            return None
        now_ms = self._context.clock.now_ms()
        # A file system that hangs holds one thread and one call, which may be cancelled; the other
        # calls go on with the table as it is.
        if now_ms >= self._look_ms and (self._look is None or self._look.done()):
            self._look_ms = now_ms + _LOOK_MS
            self._look = asyncio.create_task(self._context.bridge.run(routes.refresh))
            await asyncio.shield(self._look)
        return routes.table

    def _own(self, name: str) -> Topic:
        try:
            topic: Topic = self._context.bridge.engine.state.topic(name).topic
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"{error.message} {_NO_ROUTE.format(name)}", remedy=error.remedy
            ) from error
        return topic

    def _broker(self, name: str, request: Any) -> Any:
        """Return the broker at the dialled address: behind NAT no other one works."""
        known = endpoints(request.endpoints) or endpoints_of(self._context.address)
        return Broker(name=name, id=0, endpoints=known)


class _Route(NamedTuple):
    """The queues of a topic in the order of the answer, as (broker, id), and their brokers."""

    type: str
    places: Sequence[tuple[str, int]]
    brokers: Mapping[str, Any]


def _queue(resource: Any, route: _Route, *, queue_id: int, broker: str) -> Any:
    return MessageQueue(
        topic=resource,
        id=queue_id,
        permission=Permission.READ_WRITE,
        broker=route.brokers[broker],
        accept_message_types=ACCEPTED[route.type],
    )


def _check_type(own: Topic, routed: RoutedTopic) -> None:
    if own.type != routed.type:
        raise IllegalTopicError(
            f"Topic {own.name} has type {own.type} at this broker, {routed.type} in its route"
            " table.",
            remedy="An operator must correct the route table.",
        )


def _at(broker: RoutedBroker, *, encrypted: bool) -> Any:
    """Return a broker of the route table, at the addresses for the caller's kind of connection."""
    addresses = broker.grpc_tls if encrypted else broker.grpc
    if not addresses:
        raise RequestError(
            f"Broker {broker.name} has no grpc_tls in the route table.",
            remedy="Connect without TLS, or let an operator add grpc_tls to the table.",
        )
    return Broker(name=broker.name, id=0, endpoints=endpoints_of(*addresses))


def _is_encrypted(call: Any) -> bool:
    """Return True if a call came over TLS."""
    return b"ssl" in call.auth_context().get("transport_security_type", ())


def endpoints(dialled: Any) -> Any:
    """Return the address that a client dialled, with one host name; None if it names none."""
    if not dialled.addresses:
        return None
    if dialled.scheme == AddressScheme.DOMAIN_NAME and len(dialled.addresses) > 1:
        return Endpoints(scheme=dialled.scheme, addresses=dialled.addresses[:1])
    return dialled


def endpoints_of(*addresses: str) -> Any:
    """Return one broker's addresses: IP addresses of one family, or one name."""
    found = [split_address(address) for address in addresses]
    host = found[0][0]
    scheme = AddressScheme.IPv6 if ":" in host else AddressScheme.IPv4
    if not is_address(host):
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(
        scheme=scheme, addresses=[Address(host=host, port=port) for host, port in found]
    )
