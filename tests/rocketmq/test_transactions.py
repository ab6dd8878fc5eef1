"""Half messages end as their producer says; what stays open is asked of any producer there is."""

from collections.abc import Callable
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.transactions import producer_group
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.conftest import Opened
from tests.rocketmq.talking import Talk, producer
from tests.waiting import until

Clients = Callable[..., Raw]
#: A half message is asked about after 6 s, and then every 30 s.
FIRST_MS, NEXT_MS = 6_000, 30_000


@pytest.fixture(autouse=True)
def topic(broker: Broker) -> None:
    broker.create_topic("tx", type="transaction", queues=1)


def begin(client: Raw, body: bytes = b"half", topic: str = "tx", **properties: Any) -> Any:
    """The entry of a half message that was sent."""
    message = raw.message(topic, body, kind="TRANSACTION", **properties)
    answer = client("SendMessage", raw.sends(message))
    assert raw.code(answer) == "OK", answer
    (entry,) = answer.entries
    assert entry.message_id == message.system_properties.message_id
    assert entry.transaction_id
    return entry


def end(client: Raw, entry: Any, resolution: str, topic: str = "tx") -> str:
    request = raw.ends(topic, entry.transaction_id, resolution=resolution)
    return raw.code(client("EndTransaction", request))


def visible(broker: Broker, topic: str = "tx") -> list[bytes]:
    found: list[bytes] = broker.read(topic, 0, offset=0, limit=100).column("body").to_pylist()
    return found


def check(broker: Broker, clock: ManualClock, milliseconds: int) -> None:
    """Let time pass, and have what is due by then be asked about."""
    clock.advance(milliseconds)
    broker.check_transactions()


def asked(talk: Talk) -> list[Any]:
    kind = "recover_orphaned_transaction_command"
    commands = [command for command in talk.heard if command.WhichOneof("command") == kind]
    return [getattr(command, kind) for command in commands]


def test_a_half_message_is_seen_once_it_is_committed(broker: Broker, client: Clients) -> None:
    one = client()
    entry = begin(one)
    assert visible(broker) == []

    assert end(one, entry, "COMMIT") == "OK"

    assert visible(broker) == [b"half"]
    assert end(one, entry, "COMMIT") == "OK"
    assert visible(broker) == [b"half"]
    assert end(one, entry, "ROLLBACK") == "INVALID_TRANSACTION_ID"


def test_the_id_that_a_consumer_reads_ends_the_transaction_as_the_producers_does(
    broker: Broker, client: Clients
) -> None:
    broker.create_group("g")
    one = client()
    entry = begin(one)
    assert end(one, entry, "COMMIT") == "OK"

    (message,) = raw.received(one("ReceiveMessage", raw.receives("tx", "g")))

    read = message.user_properties["__transactionId__"]
    assert read == entry.transaction_id
    assert raw.code(one("EndTransaction", raw.ends("tx", read, resolution="COMMIT"))) == "OK"


def test_a_half_message_that_is_rolled_back_is_never_seen(broker: Broker, client: Clients) -> None:
    one = client()
    entry = begin(one)

    assert end(one, entry, "ROLLBACK") == "OK"

    assert visible(broker) == []
    assert end(one, entry, "COMMIT") == "INVALID_TRANSACTION_ID"


def test_an_unknown_end_leaves_it_open(broker: Broker, client: Clients) -> None:
    one = client()
    entry = begin(one)

    assert end(one, entry, "TRANSACTION_RESOLUTION_UNSPECIFIED") == "OK"

    assert visible(broker) == []
    assert end(one, entry, "COMMIT") == "OK"
    assert visible(broker) == [b"half"]


def test_ends_of_nothing_are_refused(broker: Broker, client: Clients) -> None:
    broker.create_topic("other", type="transaction")
    one = client()
    entry = begin(one)

    assert raw.code(one("EndTransaction", raw.ends("tx", " ", resolution="COMMIT"))) == (
        "INVALID_TRANSACTION_ID"
    )
    assert raw.code(one("EndTransaction", raw.ends("tx", "x", resolution="COMMIT"))) == (
        "INVALID_TRANSACTION_ID"
    )
    assert end(one, entry, "COMMIT", topic="nowhere") == "TOPIC_NOT_FOUND"
    assert end(one, entry, "COMMIT", topic="other") == "BAD_REQUEST"
    assert visible(broker) == []


def test_a_producer_is_asked_about_what_stays_open(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    one = client()
    with producer(one, "tx") as talk:
        entry = begin(one, tag="blue", keys=["k"], user={"a": "b"})

        check(broker, clock, FIRST_MS)
        until(lambda: asked(talk))

        (question,) = asked(talk)
        assert question.transaction_id == entry.transaction_id
        message, own = question.message, question.message.system_properties
        assert (message.topic.name, message.body) == ("tx", b"half")
        assert own.message_id == entry.message_id
        assert (own.tag, list(own.keys)) == ("blue", ["k"])
        assert own.body_encoding == pb.Encoding.IDENTITY
        assert own.body_digest.checksum
        assert message.user_properties["a"] == "b"
        assert end(one, entry, "COMMIT") == "OK"
    assert visible(broker) == [b"half"]


def test_it_is_asked_again_until_somebody_knows(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    one = client()
    with producer(one, "tx") as talk:
        entry = begin(one)
        for times, wait_ms in enumerate((FIRST_MS, NEXT_MS, NEXT_MS), start=1):
            check(broker, clock, wait_ms)
            _until_asked(talk, times)
        assert end(one, entry, "ROLLBACK") == "OK"
        check(broker, clock, NEXT_MS)
        # Whatever was asked is there by the time this is answered.
        talk.settle(talk_settings(talk))
        assert len(asked(talk)) == 3


def talk_settings(talk: Talk) -> Any:
    return next(each.settings for each in talk.heard if each.HasField("settings"))


def _until_asked(talk: Talk, times: int) -> None:
    until(lambda: len(asked(talk)) >= times)
    assert len(asked(talk)) == times


def test_a_producer_that_has_not_told_its_settings_is_asked(
    opened: Opened, client: Clients, clock: ManualClock
) -> None:
    broker, endpoint, _ = opened
    one, clients = client(), endpoint._service._context.clients
    with Talk(one) as talk:  # as Python, some minutes after a restart of the broker
        until(lambda: len(clients) == 1)
        entry = begin(one)
        check(broker, clock, FIRST_MS)
        _until_asked(talk, 1)

        assert asked(talk)[0].transaction_id == entry.transaction_id
        assert asked(talk)[0].message.topic == raw.resource("tx")
    assert end(one, entry, "COMMIT") == "OK"


def test_any_producer_of_the_topic_is_asked(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    broker.create_topic("other", type="transaction")
    gone, here, elsewhere = client(), client(), client()
    begin(gone)
    gone.close()
    with producer(here, "other", "tx") as talk, producer(elsewhere, "other") as deaf:
        check(broker, clock, FIRST_MS)
        until(lambda: asked(talk))

        assert asked(talk)[0].message.body == b"half"
        assert asked(deaf) == []


def test_checks_wait_for_a_producer_that_comes_back(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    one = client()
    begin(one)
    check(broker, clock, FIRST_MS)

    with producer(one, "tx") as talk:
        until(lambda: asked(talk))
        assert asked(talk)[0].message.body == b"half"


def test_producers_take_turns(broker: Broker, client: Clients, clock: ManualClock) -> None:
    one, two = client(), client()
    with producer(one, "tx") as first, producer(two, "tx") as second:
        for n in range(6):
            begin(one, str(n).encode())
        check(broker, clock, FIRST_MS)
        until(lambda: len(asked(first)) + len(asked(second)) == 6)

        assert len(asked(first)) == len(asked(second)) == 3


def test_a_half_message_may_say_when_it_is_asked_about(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    one = client()
    with producer(one, "tx") as talk:
        begin(one, orphaned_transaction_recovery_duration_ms=60_000)
        check(broker, clock, 59_999)
        talk.settle(talk_settings(talk))
        assert asked(talk) == []
        check(broker, clock, 1)
        _until_asked(talk, 1)


def test_namespaces_have_their_own_checks(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    broker.create_topic("ns%tx", type="transaction", queues=1)
    inside, outside = client(namespace="ns"), client()
    with producer(inside, "tx", namespace="ns") as talk, producer(outside, "tx") as deaf:
        entry = begin(inside)
        check(broker, clock, FIRST_MS)
        _until_asked(talk, 1)

        assert asked(talk)[0].message.topic == raw.resource("tx", "ns")
        assert asked(deaf) == []
        assert end(inside, entry, "COMMIT") == "OK"
    assert visible(broker, "ns%tx") == [b"half"]


def test_what_is_asked_about_is_a_transaction_in_a_mixed_topic_too(
    broker: Broker, client: Clients, clock: ManualClock
) -> None:
    broker.create_topic("m", type="mixed", queues=1)
    one = client()
    with producer(one, "m") as talk:
        entry = begin(one, topic="m")
        check(broker, clock, FIRST_MS)
        _until_asked(talk, 1)

        message = asked(talk)[0].message

    assert message.system_properties.message_type == pb.MessageType.TRANSACTION
    assert message.system_properties.message_id == entry.message_id
    assert message.user_properties["__transactionId__"] == entry.transaction_id


def test_half_messages_come_alone(opened: Opened, client: Clients) -> None:
    broker, _, _ = opened
    broker.create_topic("m", type="mixed")
    half, whole = raw.message("m", kind="TRANSACTION"), raw.message("m")

    assert raw.code(client()("SendMessage", raw.sends(half, whole))) == "BAD_REQUEST"
    assert raw.code(client()("SendMessage", raw.sends(half, half))) == "OK"


def test_the_longest_topic_has_producers(broker: Broker, client: Clients) -> None:
    long = "t" * 127
    broker.create_topic(long, type="transaction", queues=1)
    one = client()

    entry = begin(one, topic=long)

    assert end(one, entry, "COMMIT", topic=long) == "OK"
    assert visible(broker, long) == [b"half"]
    assert len(producer_group(long)) == 120
    assert producer_group(long) != producer_group("t" * 126)
