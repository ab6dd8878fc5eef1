"""Lite topics: ordered, made by sending to them, and given to the clients that asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.behaviour.lite import Clients, to_lite

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def chats(topic: Make) -> str:
    return str(topic(type="lite", queues=2))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(backoff_ms=[1_000]))


@pytest.fixture
def clients(endpoint: Endpoint, chats: str, readers: str) -> Clients:
    return Clients(endpoint, chats, readers)


def bodies(received: pa.Table) -> list[bytes]:
    return [bytes(body) for body in received["body"].to_pylist()]


# ------------------------------------------------------------------------------- who is given what


def test_clients_with_different_lite_topics_are_given_their_own(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    names = ["a", "b", "c", "d"]
    clients.sync("one", "add", "a", "c")
    clients.sync("other", "add", "b", "d")
    endpoint.broker.send(chats, to_lite(40, names))

    got = {client: clients.drain(client, limit=7) for client in ("one", "other")}

    assert got["one"] == {"a": list(range(0, 40, 4)), "c": list(range(2, 40, 4))}
    assert got["other"] == {"b": list(range(1, 40, 4)), "d": list(range(3, 40, 4))}


def test_a_client_without_lite_topics_is_given_nothing(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a")
    endpoint.broker.send(chats, to_lite(10, ["a"]))

    nothing = clients.receive("stranger")

    assert nothing.num_rows == 0
    assert clients.drain("one") == {"a": list(range(10))}


@pytest.mark.one_endpoint
def test_messages_without_a_subscriber_wait_for_one(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a")
    endpoint.broker.send(chats, to_lite(3_000, ["a", "b", "c"]))
    first = clients.drain("one")
    endpoint.broker.send(chats, to_lite(3, ["a", "b", "c"], start=3_000))

    clients.sync("one", "add", "b")
    second = clients.drain("one")
    clients.sync("late", "add", "c")
    third = clients.drain("late", limit=100)

    assert first == {"a": list(range(0, 3_000, 3))}
    assert second == {"a": [3_000], "b": list(range(1, 3_002, 3))}
    assert third == {"c": list(range(2, 3_003, 3))}


@pytest.mark.one_endpoint
def test_more_than_is_kept_in_memory_of_a_lite_topic_is_found_again(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "quiet")
    for start in range(0, 6_000, 1_000):
        endpoint.broker.send(chats, to_lite(1_000, ["loud", "louder"], start=start))
        endpoint.broker.send(chats, to_lite(1, ["quiet"], start=100_000 + start))
        clients.drain("one", limit=10)
    held = endpoint_consumptions(endpoint, clients)
    known = [len(entry.known) for one in held for entry in one.backlog.values()]

    clients.sync("other", "add", "loud", "louder")

    assert sorted(known)[-2:] == [1_024, 1_024]
    assert clients.drain("other", limit=500) == {
        "loud": list(range(0, 6_000, 2)),
        "louder": list(range(1, 6_000, 2)),
    }


def endpoint_consumptions(endpoint: Endpoint, clients: Clients) -> list[Any]:
    state = endpoint.inside.engine.state
    key = (state.group_ids[clients.group], state.topic_ids[clients.topic])
    return [found for at, found in state.consumptions.items() if at[:2] == key]


def test_a_lite_topic_of_two_clients_goes_to_one_of_them_at_a_time(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a")
    clients.sync("other", "add", "a")
    endpoint.broker.send(chats, to_lite(4, ["a"]))

    first = clients.receive("one", limit=2)
    locked = clients.receive("other")
    endpoint.broker.ack(first)
    second = clients.receive("other")

    assert (bodies(first), bodies(second)) == ([b"0", b"1"], [b"2", b"3"])
    assert locked.num_rows == 0


def test_two_consumer_groups_have_subscriptions_of_their_own(
    endpoint: Endpoint, chats: str, clients: Clients, group: Make
) -> None:
    others = Clients(endpoint, chats, group())
    clients.sync("one", "add", "a")
    others.sync("one", "add", "b")
    endpoint.broker.send(chats, to_lite(4, ["a", "b"]))

    assert clients.drain("one") == {"a": [0, 2]}
    assert others.drain("one") == {"b": [1, 3]}


def test_a_lite_topic_is_in_order_in_a_group_without_order_too(
    endpoint: Endpoint, chats: str, clients: Clients, fail: Make
) -> None:
    clients.sync("one", "add", "a", "b")
    endpoint.broker.send(chats, to_lite(6, ["a", "b"]))
    got = clients.receive("one")
    first_of_a = got.filter(pa.compute.equal(got["body"], b"0"))

    fail(clients.group, first_of_a)
    of_b = got.filter(pa.compute.equal(got["message_group"], "b"))
    endpoint.broker.ack(of_b)
    nothing = clients.receive("one")
    endpoint.advance(1_000)
    again = clients.receive("one")

    assert nothing.num_rows == 0
    assert bodies(again) == [b"0", b"2", b"4"]
    assert again["delivery_attempt"].to_pylist() == [2, 1, 1]


def test_what_one_client_lets_end_another_of_the_lite_topic_is_given(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a")
    clients.sync("other", "add", "b")
    endpoint.broker.send(chats, to_lite(2, ["a"]))
    clients.receive("one", invisible_duration_ms=5_000)
    endpoint.advance(5_000)

    not_its_own = clients.receive("other")
    clients.sync("other", "add", "a")

    assert not_its_own.num_rows == 0
    assert bodies(clients.receive("other")) == [b"0", b"1"]


def test_a_waiting_client_wakes_when_it_is_given_a_lite_topic(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a")
    endpoint.broker.send(chats, to_lite(1, ["b"]))
    poll = endpoint.begin(lambda: clients.receive("one", wait_ms=30_000))

    clients.sync("one", "add", "b")

    assert bodies(poll.result(60)) == [b"0"]


def test_a_final_failure_goes_to_the_dead_letters_and_the_lite_topic_goes_on(
    endpoint: Endpoint, chats: str, group: Make, fail: Make
) -> None:
    clients = Clients(endpoint, chats, group(max_attempts=1))
    clients.sync("one", "add", "a")
    endpoint.broker.send(chats, to_lite(2, ["a"]))

    fail(clients.group, clients.receive("one", limit=1))

    assert clients.drain("one") == {"a": [1]}
    assert endpoint.bodies(f"%DLQ%{clients.group}") == [b"0"]


def test_a_grown_topic_keeps_its_lite_topics_in_order(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    names = [f"chat-{i}" for i in range(20)]
    clients.sync("one", "add", *names)
    endpoint.broker.send(chats, to_lite(100, names))
    held = clients.receive("one", limit=5)
    endpoint.broker.alter_topic(chats, queues=9)
    endpoint.broker.send(chats, to_lite(100, names, start=100))

    got = clients.drain("one", limit=9)
    blocked = set(held["message_group"].to_pylist())
    endpoint.broker.ack(held)
    rest = clients.drain("one")

    for i, name in enumerate(names):
        mine = [int(r["body"]) for r in held.to_pylist() if r["message_group"] == name]
        assert (name in got) != (name in blocked)
        assert mine + got.get(name, []) + rest.get(name, []) == list(range(i, 200, 20))
