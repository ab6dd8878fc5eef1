"""Rights that a verb needs, told from the arguments of a call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from rmq_pipeline.access.policy import CLUSTER_ITSELF, Action, Resource, ResourceType

_CONSUMER: Final = "consumer/"

Right = tuple[Resource, Action]
Arguments = Mapping[str, Any]


class Names(Protocol):
    """The part of the broker that knows what receipts and transactions stand for."""

    def deliveries_of(self, receipts: pa.Table | Sequence[str]) -> set[tuple[str, str]]:
        """Return consumer group and topic of these deliveries."""
        ...

    def transactions_of(self, resolutions: pa.Table) -> set[str]:
        """Return the topics of the half messages of these transactions."""
        ...


@dataclass(frozen=True)
class Rights:
    """Rights that a verb needs; parts that do not apply are left out."""

    #: On the topic that this argument names; without one, on the cluster.
    topic: tuple[str, Action] | None = None
    group: tuple[str, Action] | None = None
    cluster: Action | None = None
    #: On the cluster, where no group is named.
    all_groups: Action | None = None
    #: sub on groups and topics of the deliveries whose receipts this argument holds.
    settles: str = ""
    #: pub on the topics of the transactions in this argument.
    ends: str = ""
    #: pub on the topics of this mapping.
    publishes: str = ""
    #: sub on the group that the window belongs to, else update on the cluster.
    window: bool = False
    #: get on the group that this argument names, too.
    reads: str = ""
    #: Only for super users and the owner of the home.
    super_only: bool = False

    def of(self, args: Arguments, names: Names) -> Iterator[Right]:
        """Yield all rights that a call with these arguments needs."""
        yield from self.named(args)
        if self.settles and (receipts := args.get(self.settles)) is not None:
            for group, topic in sorted(names.deliveries_of(receipts)):
                yield Resource("group", group), "sub"
                yield Resource("topic", topic), "sub"
        if self.ends and (resolutions := args.get(self.ends)) is not None:
            for topic in sorted(names.transactions_of(resolutions)):
                yield Resource("topic", topic), "pub"
        if self.publishes:
            for topic in args.get(self.publishes) or ():
                yield _thing("topic", topic), "pub"

    def named(self, args: Arguments) -> Iterator[Right]:
        """Yield the rights that are known before the tables of the call arrive."""
        if self.cluster is not None:
            yield CLUSTER_ITSELF, self.cluster
        if self.topic is not None:
            argument, action = self.topic
            given = args.get(argument)
            for name in given if isinstance(given, list | tuple) else [given]:
                # Without a name the call means all topics.
                yield (
                    (CLUSTER_ITSELF, "update") if name is None else (_thing("topic", name), action)
                )
        if self.group is not None:
            argument, action = self.group
            if self.all_groups is not None and args.get(argument) is None:
                yield CLUSTER_ITSELF, self.all_groups
            else:
                yield _thing("group", args.get(argument)), action
        if self.reads:
            yield _thing("group", args.get(self.reads)), "get"
        if self.window:
            name = str(args.get("name"))
            if name.startswith(_CONSUMER):
                yield Resource("group", name.removeprefix(_CONSUMER)), "sub"
            else:
                yield CLUSTER_ITSELF, "update"


def _thing(type: ResourceType, name: object) -> Resource:
    # A value that is no text names nothing. The verb refuses it if the policies allow the call.
    return Resource(type, name if isinstance(name, str) else "")


def on_topic(action: Action, argument: str = "topic") -> Rights:
    """Return the right to do something with the topic that an argument names."""
    return Rights(topic=(argument, action))


def on_group(action: Action, argument: str = "group") -> Rights:
    """Return the right to do something with the group that an argument names."""
    return Rights(group=(argument, action))


CONSUMES: Final = Rights(topic=("topic", "sub"), group=("group", "sub"))
SETTLES: Final = Rights(settles="receipts")
UPKEEP: Final = Rights(cluster="update")
SUPER: Final = Rights(super_only=True)


Check = Callable[[Iterable[Right]], None]
_check: ContextVar[Check | None] = ContextVar("rmq_rights_check", default=None)


@contextmanager
def checking(check: Check) -> Iterator[None]:
    """Let a verb in this block check rights that only its work tells.

    Args:
        check: raises the refusal of a right that the caller lacks.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_rights(rights: Iterable[Right]) -> None:
    """Check rights of the running verb's caller; callers in this process have all rights.

    Raises:
        ForbiddenError: the caller lacks one.
    """
    check = _check.get()
    if check is not None:
        check(rights)
