"""The six strategies: RocketMQ's examples, and what holds for any number of queues and members."""

from bisect import bisect_left
from hashlib import md5

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.consumer.allocation import (
    BY_NAME,
    Configured,
    MachineRoom,
    MachineRoomNearby,
    Strategy,
    average,
    average_by_circle,
    consistent_hash,
    strategy_of,
)
from rmq_pipeline.consumer.message_queue import MessageQueue, queues_of
from rmq_pipeline.errors import AllocationError

TOPIC = "orders"


def members(count: int, *, room: str = "") -> list[str]:
    prefix = f"{room}@" if room else ""
    return [f"{prefix}client-{i}" for i in range(count)]


def rooms(**counts: int) -> list[MessageQueue]:
    """Queues of brokers ``room@broker``, as many each as is said."""
    return [
        MessageQueue(TOPIC, f"{room}@broker", i) for room, n in counts.items() for i in range(n)
    ]


def shares(strategy: Strategy, queues: list[MessageQueue], clients: list[str]) -> list[list[int]]:
    """The places of the queues, in their order, that each client gets."""
    ordered = sorted(queues)
    return [
        [ordered.index(queue) for queue in strategy(client, queues=queues, client_ids=clients)]
        for client in clients
    ]


@pytest.mark.parametrize(
    ("queues", "clients", "expected"),
    [
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (2, 4, [[0], [1], [], []]),
        (4, 4, [[0], [1], [2], [3]]),
        (7, 1, [[0, 1, 2, 3, 4, 5, 6]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (12, 5, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], [10, 11]]),
    ],
)
def test_average(queues: int, clients: int, expected: list[list[int]]) -> None:
    assert shares(average, queues_of(TOPIC, queues), members(clients)) == expected


@pytest.mark.parametrize(
    ("queues", "clients", "expected"),
    [
        (10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (2, 4, [[0], [1], [], []]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_average_by_circle(queues: int, clients: int, expected: list[list[int]]) -> None:
    assert shares(average_by_circle, queues_of(TOPIC, queues), members(clients)) == expected


def test_consistent_hash_is_a_ring_of_ten_places_a_member() -> None:
    clients, queues = members(3), queues_of(TOPIC, 16)
    ring = sorted(
        (int(md5(f"{client}-{i}".encode()).hexdigest()[:8], 16), client)
        for client in clients
        for i in range(10)
    )

    for queue in queues:
        text = f"MessageQueue [topic=orders, brokerName=rmq, queueId={queue.queue_id}]"
        place = int(md5(text.encode()).hexdigest()[:8], 16)
        owner = ring[bisect_left(ring, (place, "")) % len(ring)][1]
        assert queue in consistent_hash(owner, queues=queues, client_ids=clients)


def test_consistent_hash_moves_only_the_queues_of_a_member_that_goes() -> None:
    clients, queues = members(5), queues_of(TOPIC, 64)
    before = {c: set(consistent_hash(c, queues=queues, client_ids=clients)) for c in clients}

    gone = clients.pop(2)

    for client in clients:
        after = set(consistent_hash(client, queues=queues, client_ids=clients))
        assert before[client] <= after <= before[client] | before[gone]


def test_configured_gives_what_it_was_told_and_the_topic_has() -> None:
    queues = queues_of(TOPIC, 4)
    told = Configured((queues[3], queues[1], MessageQueue(TOPIC, "rmq", 9)))

    assert told("client-0", queues=queues, client_ids=members(2)) == [queues[3], queues[1]]


@pytest.mark.parametrize(
    ("counts", "clients", "expected"),
    [
        ({"east": 5, "west": 3}, 2, [[0, 1, 4], [2, 3]]),
        ({"east": 1, "west": 3}, 3, [[0], [], []]),
        ({"east": 6, "west": 1}, 3, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_machine_room_shares_the_queues_of_its_rooms_only(
    counts: dict[str, int], clients: int, expected: list[list[int]]
) -> None:
    assert shares(MachineRoom(frozenset({"east"})), rooms(**counts), members(clients)) == expected


def test_machine_room_passes_over_a_broker_whose_name_has_no_room() -> None:
    strategy = MachineRoom(frozenset({"east", "rmq"}))

    assert shares(strategy, queues_of(TOPIC, 4), members(1)) == [[]]


def test_nearby_shares_each_room_among_its_own() -> None:
    clients = members(2, room="east") + members(1, room="west")

    found = shares(MachineRoomNearby(), rooms(east=5, west=2), clients)

    assert found == [[0, 1, 2], [3, 4], [5, 6]]


def test_nearby_shares_the_rooms_without_members_among_all() -> None:
    clients = members(2, room="east") + members(1, room="west")

    found = shares(MachineRoomNearby(), rooms(east=2, north=4, west=1), clients)

    assert found == [[0, 2, 3], [1, 4], [6, 5]]


def test_nearby_uses_any_strategy_within() -> None:
    clients = members(2, room="east")

    found = shares(MachineRoomNearby(average_by_circle), rooms(east=5), clients)

    assert found == [[0, 2, 4], [1, 3]]


def test_rooms_may_be_told_otherwise_where_one_broker_serves_all() -> None:
    def room_of_queue(queue: MessageQueue) -> str:
        return "east" if queue.queue_id < 3 else "west"

    clients = members(1, room="east") + members(1, room="west")

    found = shares(MachineRoomNearby(room_of_queue=room_of_queue), queues_of(TOPIC, 8), clients)

    assert found == [[0, 1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("queues", "clients"),
    [
        (rooms(east=2), ["client-0", "east@client-1"]),
        (queues_of(TOPIC, 2), ["east@client-0"]),
        (rooms(east=2), ["@client-0"]),
    ],
)
def test_nearby_refuses_a_room_that_is_not_known(
    queues: list[MessageQueue], clients: list[str]
) -> None:
    with pytest.raises(AllocationError, match="room of"):
        MachineRoomNearby()(clients[0], queues=queues, client_ids=clients)


EVERY = [
    average,
    average_by_circle,
    consistent_hash,
    Configured(tuple(queues_of(TOPIC, 2))),
    MachineRoom(frozenset({"east"})),
    MachineRoomNearby(),
]


def _name(strategy: Strategy) -> str:
    """The same in every process: workers must agree on it."""
    return getattr(strategy, "__name__", type(strategy).__name__)


@pytest.mark.parametrize("strategy", EVERY, ids=_name)
def test_who_is_no_member_owns_nothing(strategy: Strategy) -> None:
    assert strategy("stranger", queues=rooms(east=2), client_ids=members(2, room="east")) == []


@pytest.mark.parametrize("strategy", EVERY, ids=_name)
@pytest.mark.parametrize(
    ("client", "queues", "clients"),
    [
        ("", rooms(east=2), ["east@client-0"]),
        ("east@client-0", [], ["east@client-0"]),
        ("east@client-0", rooms(east=2), []),
    ],
)
def test_nothing_to_share_is_refused(
    strategy: Strategy, client: str, queues: list[MessageQueue], clients: list[str]
) -> None:
    with pytest.raises(AllocationError):
        strategy(client, queues=queues, client_ids=clients)


@pytest.mark.parametrize(
    "strategy", [each for each in EVERY if not isinstance(each, Configured)], ids=_name
)
@given(counts=st.tuples(st.integers(1, 40), st.integers(1, 12)), shuffle=st.randoms())
def test_every_queue_has_one_owner(
    strategy: Strategy, counts: tuple[int, int], shuffle: st.DataObject
) -> None:
    queues, clients = rooms(east=counts[0]), members(counts[1], room="east")
    owned: list[MessageQueue] = []
    for client in clients:
        # Members hear of queues and of each other in any order.
        shuffle.shuffle(queues)  # type: ignore[attr-defined]
        heard = sorted(clients, key=lambda _: shuffle.random())  # type: ignore[attr-defined]
        owned += strategy(client, queues=queues, client_ids=heard)

    assert sorted(owned) == sorted(queues)


@given(queues=st.integers(1, 100), clients=st.integers(1, 20))
def test_averages_differ_by_one_queue_at_most(queues: int, clients: int) -> None:
    for strategy in (average, average_by_circle):
        sizes = [len(each) for each in shares(strategy, queues_of(TOPIC, queues), members(clients))]
        assert max(sizes) - min(sizes) <= 1


def test_strategies_go_by_their_name() -> None:
    assert {name: strategy_of(name) for name in BY_NAME} == BY_NAME
    with pytest.raises(AllocationError, match="AVG_BY_CIRCLE"):
        strategy_of("average")
