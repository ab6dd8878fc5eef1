"""Lite topics at the endpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.rocketmq.clients import LIVE_WITH_STREAM_MS
from rmq_pipeline.rocketmq.protocol import (
    LiteSubscriptionAction,
    Resource,
    SyncLiteSubscriptionRequest,
)
from tests.rocketmq.consuming import EMPTY, OK, Consumer, Stand
from tests.waiting import until

ADD, REMOVE = LiteSubscriptionAction.PARTIAL_ADD, LiteSubscriptionAction.PARTIAL_REMOVE
REPLACE, CLEAR = LiteSubscriptionAction.COMPLETE_ADD, LiteSubscriptionAction.COMPLETE_REMOVE


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("chats", type="lite", queues=2)
    stand.broker.create_topic("t")
    yield stand
    stand.close()


@pytest.fixture
def one(stand: Stand) -> Consumer:
    return stand.consumer("one")


def sync(stand: Stand, consumer: Consumer, action: int, *names: str, topic: str = "chats") -> Any:
    request = SyncLiteSubscriptionRequest(
        action=action,
        topic=Resource(name=topic),
        group=Resource(name="g"),
        lite_topic_set=names,
    )
    reply = stand.stub.SyncLiteSubscription(request, metadata=consumer.metadata, timeout=20)
    return reply.status.code


def test_a_client_is_given_the_lite_topics_it_asked_for(stand: Stand, one: Consumer) -> None:
    other = stand.consumer("other")
    assert sync(stand, one, ADD, "a", "b") == OK
    assert sync(stand, other, ADD, "c") == OK

    stand.send("chats", b"1", b"2", b"3", lite_topic=["a", "b", "c"])

    got = one.receive("chats", "g")
    assert sorted(got.bodies) == [b"1", b"2"]
    assert {m.system_properties.lite_topic for m in got.messages} == {"a", "b"}
    assert {m.system_properties.message_type for m in got.messages} == {5}
    assert other.receive("chats", "g").bodies == [b"3"]


def test_actions_add_remove_replace_and_clear(stand: Stand, one: Consumer) -> None:
    def names() -> list[str]:
        found: list[str] = stand.broker.lite_subscriptions("g", "chats")["lite_topic"].to_pylist()
        return found

    for action, given, after in (
        (ADD, ("l", "t", "1"), ["1", "l", "t"]),
        (REPLACE, ("lt1",), ["lt1"]),
        (ADD, ("lt2",), ["lt1", "lt2"]),
        (REMOVE, ("lt1",), ["lt2"]),
        (CLEAR, (), []),
    ):
        assert sync(stand, one, action, *given) == OK
        assert names() == after


def test_a_waiting_poll_hears_of_its_own_lite_topics_only(stand: Stand, one: Consumer) -> None:
    other = stand.consumer("other")
    sync(stand, one, ADD, "a")
    sync(stand, other, ADD, "b")
    polls = [one.begin("chats", "g"), other.begin("chats", "g")]

    stand.send("chats", b"1", lite_topic="b")

    assert polls[1].result(60).bodies == [b"1"]
    assert not polls[0].done()
    stand.send("chats", b"2", lite_topic="a")
    assert polls[0].result(60).bodies == [b"2"]


@pytest.mark.parametrize(
    ("topic", "name", "code"),
    [("chats", "x" * 64, 40020), ("chats", " ", 40020), ("t", "a", 40014), ("no", "a", 40402)],
)
def test_a_wrong_subscription_is_answered_with_its_status(
    stand: Stand, one: Consumer, topic: str, name: str, code: int
) -> None:
    assert sync(stand, one, ADD, name, topic=topic) == code


def test_too_many_lite_topics_are_refused(stand: Stand, one: Consumer) -> None:
    assert sync(stand, one, ADD, *(str(n) for n in range(2001))) == 42902


def test_a_client_that_goes_has_subscribed_to_nothing(stand: Stand, one: Consumer) -> None:
    other = stand.consumer("other")
    sync(stand, one, ADD, "a")
    sync(stand, other, ADD, "b")

    one.terminate()
    until(lambda: stand.broker.lite_subscriptions("g", "chats").num_rows == 1)
    stand.clock.advance(LIVE_WITH_STREAM_MS)
    third = stand.consumer("third")
    sync(stand, third, ADD, "c")

    until(lambda: stand.broker.lite_subscriptions("g", "chats").num_rows == 1)
    assert stand.broker.lite_subscriptions("g", "chats")["client_id"].to_pylist() == ["third"]
    assert other.receive("chats", "g").code == EMPTY
