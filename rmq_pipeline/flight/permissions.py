"""What a caller must be allowed for each verb of the table door, when there is access control."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from rmq_pipeline.access.resource import CLUSTER_ITSELF, Action, Resource, ResourceType

_CONSUMER: Final = "consumer/"

Right = tuple[Resource, Action]
Arguments = Mapping[str, Any]


class Names(Protocol):
    """The broker, as far as it tells what handles and ids stand for."""

    def deliveries_of(self, receipts: pa.Table | Sequence[str]) -> set[tuple[str, str]]:
        """Consumer group and topic of these deliveries."""
        ...

    def transactions_of(self, resolutions: pa.Table) -> set[str]:
        """The topics that the half messages of these transactions are for."""
        ...


@dataclass(frozen=True)
class Rights:
    """What a verb asks for; a part that does not apply is left out."""

    #: On the topic that this argument names; without one, on the cluster.
    topic: tuple[str, Action] | None = None
    group: tuple[str, Action] | None = None
    cluster: Action | None = None
    #: sub on groups and topics of the deliveries whose receipts this argument holds.
    settles: str = ""
    #: pub on the topics of the transactions in this argument.
    ends: str = ""
    #: pub on the topics of this mapping.
    publishes: str = ""
    #: sub on the group that the window is of, else update on the cluster.
    window: bool = False
    #: get on the group that this argument names, too.
    reads: str = ""
    #: Only for super users and the owner of the home.
    super_only: bool = False

    def of(self, args: Arguments, names: Names) -> Iterator[Right]:
        """The rights that a call with these arguments needs, all of them."""
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
        """Those of them that can be told before a call's tables are there."""
        if self.cluster is not None:
            yield CLUSTER_ITSELF, self.cluster
        if self.topic is not None:
            argument, action = self.topic
            given = args.get(argument)
            for name in given if isinstance(given, list | tuple) else [given]:
                # What is not said is every topic there is.
                yield (
                    (CLUSTER_ITSELF, "update") if name is None else (_thing("topic", name), action)
                )
        if self.group is not None:
            argument, action = self.group
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
    # What is no text names nothing; the verb refuses it, if the policies let it come so far.
    return Resource(type, name if isinstance(name, str) else "")


def _topic(action: Action, argument: str = "topic") -> Rights:
    return Rights(topic=(argument, action))


def _group(action: Action, argument: str = "group") -> Rights:
    return Rights(group=(argument, action))


_CONSUMES: Final = Rights(topic=("topic", "sub"), group=("group", "sub"))
_SETTLES: Final = Rights(settles="receipts")
_UPKEEP: Final = Rights(cluster="update")
_SUPER: Final = Rights(super_only=True)

RIGHTS: Final[Mapping[str, Rights]] = {
    # Whoever may call at all may ask who answers.
    "ping": Rights(),
    "create_topic": _topic("create", "name"),
    "ensure_topic": _topic("create", "name"),
    "alter_topic": _topic("update", "name"),
    "delete_topic": _topic("delete", "name"),
    "list_topics": Rights(cluster="list"),
    "describe_topic": _topic("get", "name"),
    "create_group": _group("create", "name"),
    "ensure_group": _group("create", "name"),
    "alter_group": _group("update", "name"),
    "delete_group": _group("delete", "name"),
    "list_groups": Rights(cluster="list"),
    "describe_group": _group("get", "name"),
    "subscribe": _CONSUMES,
    "send": _topic("pub"),
    "recall": _topic("pub"),
    "send_half": _topic("pub"),
    "end_transactions": Rights(ends="resolutions"),
    "fetch_checks": _topic("pub", "topics"),
    "check_transactions": _UPKEEP,
    "receive": _CONSUMES,
    "sync_lite_subscription": _CONSUMES,
    "lite_subscriptions": _CONSUMES,
    "ack": _SETTLES,
    "release": _SETTLES,
    "change_invisible_duration": _SETTLES,
    "forward_to_dead_letter_queue": _SETTLES,
    "settle": Rights(group=("group", "sub"), settles="outcomes", publishes="publish"),
    "unpark": _group("update"),
    "redrive": _group("update"),
    "seen_before": _group("sub"),
    "read": _topic("sub"),
    "find": _topic("sub"),
    "offset_at": _topic("get"),
    "reset_offset": _group("update"),
    "update_offsets": _CONSUMES,
    "commit_offsets": _CONSUMES,
    "committed_offsets": _CONSUMES,
    "start_offsets": _CONSUMES,
    "clone_offsets": Rights(group=("to_group", "update"), reads="from_group"),
    "pull": _topic("sub"),
    "heartbeat": Rights(topic=("topics", "sub"), group=("group", "sub")),
    "leave": _group("sub"),
    "lock_queues": _CONSUMES,
    "unlock_queues": _CONSUMES,
    "keyed_state": _group("sub"),
    "keyed_state_history": _group("sub"),
    "sink_files": _group("get"),
    "replace_sink_files": _group("update"),
    # A query sees all topics.
    "sql": Rights(cluster="get"),
    "due": Rights(cluster="get"),
    "status": Rights(cluster="get"),
    "archive": Rights(cluster="get"),
    "open_window": Rights(window=True),
    "renew_window": Rights(window=True),
    "close_window": Rights(window=True),
    "deliver_scheduled": _UPKEEP,
    "revive": _UPKEEP,
    "seal": _UPKEEP,
    "compact": _UPKEEP,
    "plan_compaction": _UPKEEP,
    "replace_segments": _UPKEEP,
    "expire": _UPKEEP,
    "create_user": _SUPER,
    "alter_user": _SUPER,
    "delete_user": _SUPER,
    "list_users": _SUPER,
    "put_policy": _SUPER,
    "delete_policy": _SUPER,
    "list_policies": _SUPER,
    "explain_access": _SUPER,
}
