"""The permissions that each RPC needs: resources, and for each the actions that suffice."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
from typing_extensions import override

from rmq_pipeline.access.access import Access
from rmq_pipeline.access.policy import Action, Resource
from rmq_pipeline.errors import AccessError, ForbiddenError
from rmq_pipeline.rocketmq.clients import Caller

#: A resource, and the actions of which the caller needs one.
Demand = tuple[Resource, tuple[Action, ...]]
Demands = Callable[[Any, Caller], Iterable[Demand]]

_PUB: Final[tuple[Action, ...]] = ("pub",)
_SUB: Final[tuple[Action, ...]] = ("sub",)
_ROUTE: Final[tuple[Action, ...]] = ("pub", "sub", "get")


def authorise(access: Access, caller: Caller, *, demands: Iterable[Demand]) -> None:
    """Check that the caller has every demanded permission.

    Raises:
        ForbiddenError: the caller has none of the actions on one of the resources.
    """
    for resource, actions in demands:
        *others, last = actions
        for action in others:
            try:
                access.authorize(caller.user, resource=resource, action=action, peer=caller.peer)
                break
            except ForbiddenError:
                continue
        else:
            access.authorize(caller.user, resource=resource, action=last, peer=caller.peer)


def may_publish(access: Access | None, caller: Caller, *, topic: str) -> bool:
    """Return whether the caller of an open stream may still send to a topic."""
    if access is None:
        return True
    try:
        access.authorize(caller.user, resource=_topic(topic), action="pub", peer=caller.peer)
    except AccessError:
        return False
    return True


def route(request: Any, caller: Caller) -> list[Demand]:
    """Demand any right to the topic: to send, to receive or to look at it."""
    return [(_topic(caller.named(request.topic)), _ROUTE)]


def publish(request: Any, caller: Caller) -> list[Demand]:
    """Demand the right to send to the topic of an EndTransaction or a RecallMessage."""
    return [(_topic(caller.named(request.topic)), _PUB)]


def send(request: Any, caller: Caller) -> list[Demand]:
    """Demand the right to send to the topics of all messages; a valid request has one."""
    names = {caller.named(message.topic) for message in request.messages}
    return [(_topic(name), _PUB) for name in names]


def consume(request: Any, caller: Caller) -> list[Demand]:
    """Demand the right to consume: of the group and, if the request has one, of the topic.

    A request without a group, such as a producer's heartbeat, demands no right to a group.
    """
    demands: list[Demand] = []
    if request.group.name:
        demands.append((Resource("group", caller.named(request.group)), _SUB))
    fields = request.DESCRIPTOR.fields_by_name
    topic = request.message_queue.topic if "message_queue" in fields else None
    topic = request.topic if "topic" in fields else topic
    if topic is not None:
        demands.append((_topic(caller.named(topic)), _SUB))
    return demands


def look(request: Any, caller: Caller) -> list[Demand]:
    """Demand the right to read or to look at the topic of an offset query."""
    return [(_topic(caller.named(request.message_queue.topic)), ("sub", "get"))]


def settings(request: Any, caller: Caller) -> list[Demand]:
    """Demand the rights to all topics and the group that a client's settings name."""
    demands: list[Demand] = [
        (_topic(caller.named(topic)), _PUB) for topic in request.publishing.topics
    ]
    if request.HasField("subscription"):
        entries = request.subscription.subscriptions
        demands.append((Resource("group", caller.named(request.subscription.group)), _SUB))
        demands += [(_topic(caller.named(entry.topic)), _SUB) for entry in entries]
    return demands


def _topic(name: str) -> Resource:
    return Resource("topic", name)


#: Returns a method's serialized reply to a refused call, or None if the method has no status field.
Refusal = Callable[[str, AccessError], bytes | None]


class Authenticating(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that checks the credentials in the headers of each call."""

    def __init__(self, access: Access, refusal: Refusal) -> None:
        self._access = access
        self._refusal = refusal

    @override
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the handler of the method, or a handler that refuses the call."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming or not self._access.enabled:
            return handler
        headers = dict(details.invocation_metadata or ())
        try:
            self._access.authenticate_mq(
                headers.get("authorization"), headers.get("x-mq-date-time")
            )
        except AccessError as error:
            answer = self._refusal(details.method, error)
            if answer is None:
                return _aborting(str(error))
            return _refusing(answer, streams=handler.response_streaming)
        return handler


def _aborting(said: str) -> Any:
    """Return a handler that ends the call with UNAUTHENTICATED and reads nothing."""

    async def end(_: AsyncIterator[bytes], call: Any) -> bytes:
        await call.abort(grpc.StatusCode.UNAUTHENTICATED, said)
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(end)


def _refusing(answer: bytes, *, streams: bool) -> Any:
    """Return a handler that replies with ``answer`` and reads nothing."""

    async def reply(_: AsyncIterator[bytes], call: Any) -> bytes:  # noqa: ARG001
        return answer

    async def replies(_: AsyncIterator[bytes], call: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
        yield answer

    if streams:
        return grpc.stream_stream_rpc_method_handler(replies)
    return grpc.stream_unary_rpc_method_handler(reply)
