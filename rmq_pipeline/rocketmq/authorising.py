"""What each RPC asks of its caller's rights: resources, and actions of which one is enough."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from rmq_pipeline.access.access import Access
from rmq_pipeline.access.resource import Action, Resource
from rmq_pipeline.errors import AccessError, ForbiddenError
from rmq_pipeline.rocketmq.caller import Caller

#: A resource, and the actions one of which must be allowed on it.
Demand = tuple[Resource, tuple[Action, ...]]
Demands = Callable[[Any, Caller], Iterable[Demand]]

_PUB: Final[tuple[Action, ...]] = ("pub",)
_SUB: Final[tuple[Action, ...]] = ("sub",)
_ROUTE: Final[tuple[Action, ...]] = ("pub", "sub", "get")


def authorise(access: Access, caller: Caller, *, demands: Iterable[Demand]) -> None:
    """Let a call pass, or not.

    Raises:
        ForbiddenError: none of the actions is allowed on one of the resources.
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
    """Whether a caller of before may send to a topic still."""
    if access is None:
        return True
    try:
        access.authorize(caller.user, resource=_topic(topic), action="pub", peer=caller.peer)
    except AccessError:
        return False
    return True


def route(request: Any, caller: Caller) -> list[Demand]:
    """Whoever may send, receive or look may know where."""
    return [(_topic(caller.named(request.topic)), _ROUTE)]


def publish(request: Any, caller: Caller) -> list[Demand]:
    """The topic of a request that ends or calls back what was sent."""
    return [(_topic(caller.named(request.topic)), _PUB)]


def send(request: Any, caller: Caller) -> list[Demand]:
    """The topics of all messages, which should be one."""
    names = {caller.named(message.topic) for message in request.messages}
    return [(_topic(name), _PUB) for name in names]


def consume(request: Any, caller: Caller) -> list[Demand]:
    """The group and, where requests of the kind have one, the topic.

    Producers have no group: their heartbeats, and what goes without one, ask for nothing.
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
    """The topic of a question about a queue."""
    return [(_topic(caller.named(request.message_queue.topic)), ("sub", "get"))]


def settings(request: Any, caller: Caller) -> list[Demand]:
    """All that a client's settings say it will do."""
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
