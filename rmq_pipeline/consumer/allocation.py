"""Allocation of a topic's queues to the members of a group: six strategies, all pure functions.

Every member computes its own share from the same sorted queues and client ids. So all members of a
group must use the same strategy with the same settings.

A machine room is a data centre or a zone. As in RocketMQ, it is the part before the @ in a client
id or a broker name: ``room@name``. If one broker serves all rooms, pass ``room_of_queue`` to the
strategy, for example by the number of the queue.
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
    """Function that allocates the queues of one topic."""

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """Return the queues of ``client_id``; empty if it is not among the client ids.

        Raises:
            AllocationError: the client id, the queues or the client ids are empty, or the room of
                a client or a queue is unknown.
        """
        ...


def average(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """Allocate consecutive queues, equally many to each; the first members get the remainder."""
    index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
    if index is None:
        return []
    size, more = divmod(len(queues), members)
    start = index * size + min(index, more)
    return queues[start : start + size + (index < more)]


def average_by_circle(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """Allocate the queues in turn: member i of n gets every n-th queue from i on."""
    index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
    return [] if index is None else queues[index::members]


def consistent_hash(
    client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """Allocate by a hash ring with ten virtual nodes per member.

    A member that joins or leaves moves few queues of the others. Shares may differ in size, and
    may be empty.
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
    """Fixed allocation: this member gets the given queues; other queues may have no owner."""

    queues: tuple[MessageQueue, ...]

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """Return the configured queues that exist in the topic."""
        index, existing, _ = _ordered(client_id, queues, client_ids=client_ids)
        there = set(existing)
        return [] if index is None else [queue for queue in self.queues if queue in there]


def room_of_name(name: str) -> str:
    """Return the room in ``room@name``; empty if the name has no room."""
    room, at, rest = name.partition("@")
    return room if at and rest else ""


def room_of_broker(queue: MessageQueue) -> str:
    """Return the room in the name of a queue's broker."""
    return room_of_name(queue.broker_name)


@dataclass(frozen=True)
class MachineRoom:
    """Allocation of the queues in given rooms; queues in other rooms have no owner."""

    rooms: frozenset[str]
    room_of_queue: Callable[[MessageQueue], str] = room_of_broker

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """Return consecutive queues, equally many each; the first members get one extra each."""
        index, queues, members = _ordered(client_id, queues, client_ids=client_ids)
        if index is None:
            return []
        eligible = [queue for queue in queues if self.room_of_queue(queue) in self.rooms]
        size, more = divmod(len(eligible), members)
        mine = eligible[size * index : size * (index + 1)]
        return mine + ([eligible[index + size * members]] if more > index else [])


@dataclass(frozen=True)
class MachineRoomNearby:
    """Allocation within each room; all members share the queues of rooms without members."""

    within: Strategy = average
    room_of_queue: Callable[[MessageQueue], str] = room_of_broker
    room_of_client: Callable[[str], str] = room_of_name

    def __call__(
        self, client_id: str, *, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        """Return the share of the member's own room, then of each room without members."""
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


#: Strategies without settings, by their RocketMQ names.
BY_NAME: Final[dict[str, Strategy]] = {
    "AVG": average,
    "AVG_BY_CIRCLE": average_by_circle,
    "CONSISTENT_HASH": consistent_hash,
}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """Return the strategy with a name; a strategy is returned as it is.

    Raises:
        AllocationError: no strategy has the name.
    """
    if not isinstance(strategy, str):
        return strategy
    if strategy not in BY_NAME:
        raise AllocationError(
            f"The allocation strategy {strategy!r} is unknown.",
            remedy=f"Use {', '.join(BY_NAME)}, or an object: Configured, MachineRoom or"
            " MachineRoomNearby.",
        )
    return BY_NAME[strategy]


def _ordered(
    client_id: str, queues: Sequence[MessageQueue], *, client_ids: Sequence[str]
) -> tuple[int | None, list[MessageQueue], int]:
    """Return the client's index among the sorted members, the sorted queues, and the members."""
    if not client_id:
        raise AllocationError("The client id is empty.", remedy="Give the member a client id.")
    if not queues:
        raise AllocationError("The topic has no queues to allocate.")
    if not client_ids:
        raise AllocationError("The group has no members to allocate queues to.")
    assert len(by_topic(queues)) == 1, "one topic at a time"
    members = sorted(client_ids)
    index = members.index(client_id) if client_id in members else None
    return index, sorted(queues), len(members)


def _known(room: str, *, what: str) -> str:
    if not room:
        raise AllocationError(
            f"The room of {what} is unknown.",
            remedy="Use names of the form room@name, or pass room_of_queue and room_of_client.",
        )
    return room


def _position(key: str) -> int:
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4])
