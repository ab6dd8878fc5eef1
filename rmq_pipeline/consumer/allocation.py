"""Which queues of a topic a member of a group owns: six strategies, all of them pure.

Every member computes its own share from the same sorted queues and client ids, so all members of a
group must use the same strategy with the same settings.

A room (a data centre, a zone) is known as in RocketMQ: a client says its room by a ``client_id`` of
the form ``room@name``, a queue by a broker of such a name. Where one broker serves all rooms, give
the strategy ``room_of_queue`` of your own, for instance by the number of the queue.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import md5
from typing import Final, Protocol

from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.errors import AllocationError

VIRTUAL_NODES: Final = 10


class Strategy(Protocol):
    """Shares out the queues of one topic."""

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """The queues of ``client_id``; none when it is not among the client ids.

        Raises:
            AllocationError: there is no client id, no queue, no member, or a room is not known.
        """
        ...


def average(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """Neighbouring queues, as many each; the first members have one more where it does not fit."""
    index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
    if index is None:
        return []
    size, more = divmod(len(queues), members)
    start = index * size + min(index, more)
    return queues[start : start + size + (index < more)]


def average_by_circle(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """Dealt like cards: every n-th queue where there are n members."""
    index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
    return [] if index is None else queues[index::members]


def consistent_hash(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """By a ring of ten places a member: one that comes or goes moves few queues of the others.

    Shares may differ in size, and be empty.
    """
    index, queues, _ = _ordered(client_id, queues, client_ids=client_ids)
    if index is None:
        return []
    ring = {
        _position(f"{member}-{node}"): member
        for member in sorted(client_ids)
        for node in range(VIRTUAL_NODES)
    }
    places = sorted(ring)

    def owner(queue: MessageQueue) -> str:
        return ring[places[bisect_left(places, _position(queue.key)) % len(places)]]

    return [queue for queue in queues if owner(queue) == client_id]


@dataclass(frozen=True)
class Configured:
    """What this member was told, as far as the topic has it; some queues may have no owner."""

    queues: tuple[MessageQueue, ...]

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """The queues it was made with."""
        index, existing, _ = _ordered(client_id, queues, client_ids=client_ids)
        there = set(existing)
        return [] if index is None else [queue for queue in self.queues if queue in there]


def room_of_name(name: str) -> str:
    """The room in ``room@name``; empty when it names none."""
    room, at, rest = name.partition("@")
    return room if at and rest else ""


def room_of_broker(queue: MessageQueue) -> str:
    """The room that the name of a queue's broker begins with."""
    return room_of_name(queue.broker_name)


@dataclass(frozen=True)
class MachineRoom:
    """The queues of these rooms, shared by all members; queues of other rooms have no owner."""

    rooms: frozenset[str]
    room_of_queue: Callable[[MessageQueue], str] = room_of_broker

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """Neighbouring queues, as many each; of those left over one each, from the first on."""
        index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
        if index is None:
            return []
        eligible = [queue for queue in queues if self.room_of_queue(queue) in self.rooms]
        size, more = divmod(len(eligible), members)
        mine = eligible[size * index : size * (index + 1)]
        return mine + ([eligible[index + size * members]] if more > index else [])


@dataclass(frozen=True)
class MachineRoomNearby:
    """Another strategy within each room; rooms where nobody lives are shared by all members."""

    within: Strategy = average
    room_of_queue: Callable[[MessageQueue], str] = room_of_broker
    room_of_client: Callable[[str], str] = room_of_name

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """The share of the own room's queues, then that of each room without members."""
        index, queues, _ = _ordered(client_id, queues, client_ids=client_ids)
        if index is None:
            return []
        members: dict[str, list[str]] = {}
        for member in sorted(client_ids):
            room = _known(self.room_of_client(member), what=f"client {member}")
            members.setdefault(room, []).append(member)
        rooms: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            room = _known(self.room_of_queue(queue), what=queue.key)
            rooms.setdefault(room, []).append(queue)
        mine: list[MessageQueue] = []
        own = self.room_of_client(client_id)
        if own in rooms:
            mine += self.within(client_id, queues=rooms[own], client_ids=members[own])
        for room in sorted(set(rooms) - set(members)):
            mine += self.within(client_id, queues=rooms[room], client_ids=client_ids)
        return mine


#: The strategies that need no settings, by the names RocketMQ gives them.
BY_NAME: Final[dict[str, Strategy]] = {
    "AVG": average,
    "AVG_BY_CIRCLE": average_by_circle,
    "CONSISTENT_HASH": consistent_hash,
}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """A strategy, or the one of that name.

    Raises:
        AllocationError: no strategy has the name.
    """
    if not isinstance(strategy, str):
        return strategy
    if strategy not in BY_NAME:
        raise AllocationError(
            f"No allocation strategy is called {strategy!r}: {', '.join(BY_NAME)} are; Configured,"
            " MachineRoom and MachineRoomNearby are given as objects."
        )
    return BY_NAME[strategy]


def _ordered(
    client_id: str, queues: Sequence[MessageQueue], *, client_ids: Sequence[str]
) -> tuple[int | None, list[MessageQueue], int]:
    """Which of the sorted members the client is, the sorted queues, and how many members."""
    if not client_id:
        raise AllocationError("A member without a client id owns nothing.")
    if not queues:
        raise AllocationError("There are no queues to share out.")
    if not client_ids:
        raise AllocationError("There are no members to share the queues.")
    assert len(by_topic(queues)) == 1, "one topic at a time"
    members = sorted(client_ids)
    index = members.index(client_id) if client_id in members else None
    return index, sorted(queues), len(members)


def _known(room: str, *, what: str) -> str:
    if not room:
        raise AllocationError(f"The room of {what} is not known.")
    return room


def _position(key: str) -> int:
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4])
