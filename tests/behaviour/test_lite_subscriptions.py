"""Subscribing to lite topics: changed by each client, kept across restarts, refused when wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits
from rmq_pipeline.broker.decide.members import SyncLiteSubscription
from tests.behaviour.lite import Clients, to_lite
from tests.behaviour.reopening import reopened_from_the_log

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


# ------------------------------------------------------------------------------------- the actions


def test_lite_topics_are_added_removed_replaced_and_cleared(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    assert clients.sync("one", "add", "b", "a") == ["a", "b"]
    assert clients.sync("one", "add", "b", "c") == ["a", "b", "c"]
    assert clients.sync("one", "remove", "a", "never") == ["b", "c"]
    assert clients.sync("one", "replace", "d") == ["d"]
    assert clients.sync("other", "replace", "x", "y") == ["x", "y"]
    listed = endpoint.broker.lite_subscriptions(clients.group, chats).to_pylist()
    assert clients.sync("one", "clear") == []

    assert [(row["client_id"], row["lite_topic"]) for row in listed] == [
        ("one", "d"),
        ("other", "x"),
        ("other", "y"),
    ]
    seen = endpoint.sql(
        f"SELECT client_id, lite_topic FROM lite_subscriptions WHERE topic = '{chats}' ORDER BY ALL"
    )
    assert [(row["client_id"], row["lite_topic"]) for row in seen] == [
        ("other", "x"),
        ("other", "y"),
    ]


def test_a_removed_lite_topic_is_not_delivered_and_waits(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "a", "b")
    endpoint.broker.send(chats, to_lite(4, ["a", "b"]))
    clients.drain("one")
    clients.sync("one", "remove", "b")
    endpoint.broker.send(chats, to_lite(4, ["a", "b"], start=4))

    first = clients.drain("one")
    clients.sync("one", "replace", "b")

    assert first == {"a": [4, 6]}
    assert clients.drain("one") == {"b": [5, 7]}


def test_the_same_again_changes_nothing(endpoint: Endpoint, clients: Clients) -> None:
    clients.sync("one", "add", "a")
    before = endpoint.sql("SELECT count(*) AS n FROM events")

    clients.sync("one", "add", "a")
    clients.sync("one", "replace", "a")
    clients.sync("one", "remove", "b")
    clients.sync("other", "clear")

    assert endpoint.sql("SELECT count(*) AS n FROM events") == before


def test_the_whole_topic_is_lag_once_a_client_has_subscribed(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    endpoint.broker.send(chats, to_lite(10, ["a", "b"]))

    clients.sync("one", "add", "a")
    clients.drain("one")

    rows = endpoint.sql(f"SELECT lag FROM lag WHERE topic = '{chats}'")
    assert sum(row["lag"] for row in rows) == 5


# --------------------------------------------------------------------------------- across a restart


def test_subscriptions_are_there_after_a_restart(
    inside: Endpoint, topic: Make, group: Make
) -> None:
    clients = Clients(inside, topic(type="lite", queues=2), group())
    inside.broker.send(clients.topic, to_lite(9, ["a", "b", "c"]))
    for client, name in (("one", "a"), ("other", "b"), ("gone", "c")):
        clients.sync(client, "add", name)
    clients.sync("gone", "clear")
    clients.sync("one", "replace", "a", "z")
    clients.drain("one")

    for reopen in (inside.reopen, lambda: reopened_from_the_log(inside)):
        reopen()
        rows = inside.broker.lite_subscriptions(clients.group, clients.topic).to_pylist()
        assert [(row["client_id"], row["lite_topic"]) for row in rows] == [
            ("one", "a"),
            ("one", "z"),
            ("other", "b"),
        ]
        assert clients.receive("one").num_rows == clients.receive("gone").num_rows == 0
    assert clients.drain("other") == {"b": [1, 4, 7]}
    clients.sync("other", "add", "c")
    assert clients.drain("other") == {"c": [2, 5, 8]}


def test_subscriptions_of_one_frame_are_told_apart_when_the_log_is_read_again(
    inside: Endpoint, topic: Make, group: Make
) -> None:
    clients = Clients(inside, topic(type="lite"), group())
    inside.inside.writer.submit_together(
        [
            SyncLiteSubscription(clients.group, clients.topic, client, "add", (name,))
            for client, name in (("one", "a"), ("other", "b"), ("one", "c"))
        ]
    )

    reopened_from_the_log(inside)

    rows = inside.broker.lite_subscriptions(clients.group, clients.topic).to_pylist()
    found = [(row["client_id"], row["lite_topic"]) for row in rows]
    assert found == [("one", "a"), ("one", "c"), ("other", "b")]


@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_topic_or_group_made_again_has_no_subscriptions(
    inside: Endpoint, topic: Make, group: Make, what: str
) -> None:
    clients = Clients(inside, topic(type="lite"), group())
    clients.sync("one", "add", "a")

    if what == "topic":
        inside.broker.delete_topic(clients.topic, force=True)
        inside.broker.create_topic(clients.topic, type="lite")
    else:
        inside.broker.delete_group(clients.group, force=True)
        inside.broker.create_group(clients.group)

    assert inside.broker.lite_subscriptions(clients.group, clients.topic).num_rows == 0
    inside.reopen()
    assert inside.broker.lite_subscriptions(clients.group, clients.topic).num_rows == 0


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["", "  ", "x" * 64, "é" * 32, "a\tb", None])
def test_a_name_that_is_no_lite_topic_is_refused(
    endpoint: Endpoint, chats: str, clients: Clients, name: Any
) -> None:
    table = pa.table({"body": [b"0"], "lite_topic": pa.array([name], pa.string())})
    with pytest.raises(errors.IllegalLiteTopicError):
        endpoint.broker.send(chats, table)
    with pytest.raises(errors.IllegalLiteTopicError):
        clients.sync("one", "add", "good", name)

    assert endpoint.stored(chats) == 0
    assert clients.sync("one", "add") == []


def test_a_name_of_63_bytes_is_a_lite_topic(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    clients.sync("one", "add", "x" * 63)
    endpoint.broker.send(chats, to_lite(1, ["x" * 63]))

    assert clients.drain("one") == {"x" * 63: [0]}


def test_what_is_no_message_of_a_lite_topic_is_refused(
    endpoint: Endpoint, chats: str, topic: Make, messages: Make
) -> None:
    with pytest.raises(errors.IllegalLiteTopicError):
        endpoint.broker.send(chats, messages(1))
    with pytest.raises(errors.MessageTypeError):
        endpoint.broker.send(
            chats, to_lite(1, ["a"]).append_column("message_group", pa.array(["a"]))
        )
    with pytest.raises(errors.MessageTypeError):
        endpoint.broker.send(chats, to_lite(1, ["a"]).append_column("delay_level", pa.array([1])))
    for kind in ("normal", "fifo", "delay"):
        name = topic(type=kind)
        with pytest.raises(errors.RequestError):
            endpoint.broker.send(name, to_lite(1, ["a"]))
        assert endpoint.stored(name) == 0

    assert endpoint.stored(chats) == 0


def test_a_receive_that_names_no_client_or_has_a_filter_is_refused(
    endpoint: Endpoint, chats: str, clients: Clients
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.receive(clients.group, chats)
    with pytest.raises(errors.FilterExpressionError):
        clients.receive("one", filter="tag")


def test_a_subscription_that_makes_no_sense_is_refused(
    endpoint: Endpoint, clients: Clients, topic: Make
) -> None:
    with pytest.raises(errors.RequestError):
        clients.sync("one", "strange", "a")
    with pytest.raises(errors.RequestError):
        clients.sync("one", "clear", "a")
    with pytest.raises(errors.RequestError):
        clients.sync(" ", "add", "a")
    with pytest.raises(errors.RequestError):
        clients.sync("x" * 256, "add", "a")
    with pytest.raises(errors.MessageTypeError):
        Clients(endpoint, topic(type="fifo"), clients.group).sync("one", "add", "a")
    with pytest.raises(errors.TopicNotFoundError):
        Clients(endpoint, "nowhere", clients.group).sync("one", "add", "a")
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        Clients(endpoint, clients.topic, "nobody").sync("one", "add", "a")

    assert endpoint.broker.lite_subscriptions(clients.group, clients.topic).num_rows == 0


def test_a_client_may_have_2000_lite_topics(endpoint: Endpoint, clients: Clients) -> None:
    names = [f"n{i:04}" for i in range(limits.LITE_TOPICS_PER_CLIENT)]

    assert clients.sync("one", "add", *names) == names
    with pytest.raises(errors.LiteSubscriptionQuotaError):
        clients.sync("one", "add", "one more")

    assert endpoint.broker.lite_subscriptions(clients.group, clients.topic).num_rows == len(names)
