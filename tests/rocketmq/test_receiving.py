"""ReceiveMessage at the endpoint, with raw stubs."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.rocketmq.consuming import EMPTY, OK, Consumer, Stand
from tests.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=4)
    stand.broker.create_topic("orders", type="fifo", queues=2)
    yield stand
    stand.close()


@pytest.fixture
def one(stand: Stand) -> Consumer:
    return stand.consumer("one")


@pytest.fixture
def other(stand: Stand) -> Consumer:
    return stand.consumer("other")


def test_a_message_arrives_with_all_that_clients_look_at(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"body", tag="a", keys=[["k1", "k2"]], properties=[[("p", "v")]])

    received = one.receive("t", "g")

    (message,) = received.messages
    system = message.system_properties
    assert message.topic.name == "t"
    assert message.body == b"body"
    assert dict(message.user_properties) == {"p": "v"}
    assert (system.tag, list(system.keys)) == ("a", ["k1", "k2"])
    assert system.body_digest.checksum == hashlib.md5(b"body").hexdigest().upper()
    assert (system.body_encoding, system.body_digest.type) == (1, 2)
    assert system.message_type == 1
    assert system.delivery_attempt == 1
    assert system.store_timestamp.ToMilliseconds() == stand.clock.now_ms()
    assert system.born_timestamp.ToMilliseconds() == stand.clock.now_ms()
    assert len(system.message_id) == 34


def test_a_message_of_a_group_names_it_and_where_it_lies(stand: Stand, one: Consumer) -> None:
    stand.send("orders", b"1", b"2", message_group="A")

    received = one.receive("orders", "g")

    second = received.messages[1]
    system = second.system_properties
    assert (system.message_group, system.message_type) == ("A", 2)
    assert second.user_properties["__SHARDINGKEY"] == "A"
    assert (system.queue_id, system.queue_offset) == (0, 1)


def test_a_delayed_message_says_when_it_was_due(stand: Stand, one: Consumer) -> None:
    stand.broker.create_topic("later", type="delay")
    due = stand.clock.now_ms() + 5_000
    stand.send("later", b"x", deliver_at_ms=due)
    stand.clock.advance(5_000)
    stand.broker.deliver_scheduled()

    (message,) = one.receive("later", "g").messages

    assert message.system_properties.message_type == 3
    assert message.system_properties.delivery_timestamp.ToMilliseconds() == due


def test_filters_by_tag_and_by_condition(stand: Stand, one: Consumer) -> None:
    prices: list[Any] = [[("price", str(n))] for n in range(4)]
    stand.send("t", b"0", b"1", b"2", b"3", tag=["a", "b", "c", None], properties=prices)

    assert sorted(one.receive("t", "by-tag", tags="a || c").bodies) == [b"0", b"2"]
    assert sorted(one.receive("t", "by-price", sql="price > 1").bodies) == [b"2", b"3"]
    assert one.receive("t", "by-tag", tags="a || c").code == EMPTY


@pytest.mark.parametrize(
    ("topic", "how", "code"),
    [
        ("t", {"batch": 0}, 40000),
        ("t", {"batch": -1}, 40000),
        ("t", {"invisible_ms": 9_999}, 40011),
        ("t", {"invisible_ms": 12 * 3_600_000 + 1}, 40011),
        ("t", {"tags": "||"}, 40010),
        ("t", {"sql": "price >"}, 40010),
        ("nowhere", {}, 40402),
        ("SCHEDULE_TOPIC_XXXX", {}, 40002),
    ],
)
def test_a_wrong_receive_is_answered_with_its_status(
    one: Consumer, topic: str, how: dict[str, Any], code: int
) -> None:
    assert one.receive(topic, "g", **how).code == code


def test_members_with_different_filters_are_shown(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    one.receive("t", "g", tags="a")
    assert stand.broker.describe_group("g")["mixed_filters"] == {}

    other.receive("t", "g", tags="b || c")

    assert stand.broker.describe_group("g")["mixed_filters"] == {"t": ["a", "b || c"]}


def test_a_batch_is_32_at_most(stand: Stand, one: Consumer) -> None:
    stand.send("t", *(str(n).encode() for n in range(40)))

    assert len(one.receive("t", "g", batch=1000).messages) == 32
    assert len(one.receive("t", "g", batch=5).messages) == 5


def test_a_poll_is_woken_by_an_arrival(stand: Stand, one: Consumer) -> None:
    poll = one.begin("t", "g")
    assert not poll.done()

    stand.send("t", b"new")

    assert poll.result(60).bodies == [b"new"]


def test_a_poll_is_not_woken_for_good_by_what_its_filter_refuses(
    stand: Stand, one: Consumer
) -> None:
    poll = one.begin("t", "g", tags="wanted")

    stand.send("t", b"x", tag="other")
    stand.send("t", b"y", tag="wanted")

    assert poll.result(60).bodies == [b"y"]


def test_a_poll_is_woken_by_the_end_of_a_lease(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    stand.send("t", b"x")
    assert one.receive("t", "g", invisible_ms=10_000).attempts == [1]
    poll = other.begin("t", "g")

    stand.clock.advance(9_999)
    assert not poll.done()
    stand.clock.advance(1)

    assert poll.result(60).attempts == [2]


def test_a_poll_is_woken_by_a_message_at_its_time(stand: Stand, one: Consumer) -> None:
    stand.broker.create_topic("later", type="delay")
    stand.send("later", b"x", deliver_at_ms=stand.clock.now_ms() + 3_000)
    poll = one.begin("later", "g")

    stand.clock.advance(3_000)
    stand.broker.deliver_scheduled()

    assert poll.result(60).bodies == [b"x"]


def test_a_poll_ends_empty_when_its_time_is_over(stand: Stand, one: Consumer) -> None:
    poll = one.begin("t", "g", wait_ms=6_000)

    stand.clock.advance(5_999)
    assert not poll.done()
    stand.clock.advance(1)

    assert poll.result(60).code == EMPTY
    until(lambda: stand.waiting() == 0)


def test_a_poll_ends_before_the_deadline_of_its_call(stand: Stand, one: Consumer) -> None:
    poll = one.begin("t", "g", timeout_s=18, wait_ms=20_000)

    stand.clock.advance(17_700)

    assert poll.result(18).code == EMPTY


def test_a_call_without_time_to_wait_is_answered_at_once(one: Consumer) -> None:
    assert one.receive("t", "g", wait_ms=0).code == EMPTY


def test_one_message_wakes_one_of_those_who_share_it(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    polls = [one.begin("t", "g"), other.begin("t", "g")]

    stand.send("t", b"1")
    until(lambda: any(poll.done() for poll in polls))
    # Who found it has woken the other, which looks, finds nothing, and waits again.
    until(lambda: stand.waiting() == 1)
    assert [poll.done() for poll in polls].count(True) == 1
    stand.send("t", b"2")

    assert sorted(poll.result(60).bodies for poll in polls) == [[b"1"], [b"2"]]


def test_who_finds_more_than_it_takes_wakes_the_next(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    polls = [one.begin("t", "g", batch=1), other.begin("t", "g", batch=1)]

    stand.send("t", b"1", b"2")

    assert sorted(poll.result(60).bodies for poll in polls) == [[b"1"], [b"2"]]


def test_the_same_attempt_is_given_the_same_again(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    stand.send("orders", b"1", b"2", b"3", message_group="A")
    first = one.receive("orders", "g", attempt_id="x", renewed=True)
    one.ack("orders", "g", first.handles[:1])

    again = one.receive("orders", "g", attempt_id="x", renewed=True)

    assert again.bodies == [b"2", b"3"]
    assert again.handles == first.handles[1:]
    assert again.attempts == [1, 1]
    assert one.receive("orders", "g", attempt_id="y", renewed=True).code == EMPTY
    assert other.receive("orders", "g", attempt_id="x", renewed=True).code == EMPTY
    entries = one.ack("orders", "g", again.handles)
    assert entries.status.code == OK
    assert one.receive("orders", "g", attempt_id="x", renewed=True).code == EMPTY


def test_a_message_group_is_with_one_receiver_at_a_time(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    stand.send("orders", b"a1", b"a2", message_group="A")
    first = one.receive("orders", "g", batch=1)
    stand.send("orders", b"b1", message_group="B")

    assert other.receive("orders", "g").bodies == [b"b1"]
    poll = other.begin("orders", "g")
    one.ack("orders", "g", first.handles)

    assert first.bodies == [b"a1"]
    assert poll.result(60).bodies == [b"a2"]


def test_each_delivery_counts(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"x")

    for attempt in (1, 2, 3):
        assert one.receive("t", "g", invisible_ms=10_000).attempts == [attempt]
        stand.clock.advance(10_000)


def test_a_client_that_goes_while_it_waits_leases_nothing(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    call = one.call("t", "g", wait_ms=20_000)
    until(lambda: stand.waiting() == 1)

    call.cancel()
    until(lambda: stand.waiting() == 0)
    stand.send("t", b"x")

    assert other.receive("t", "g").attempts == [1]


def test_what_a_client_leaves_unread_is_there_for_others_at_once(
    stand: Stand, one: Consumer, other: Consumer
) -> None:
    stand.send("t", *(bytes([n]) * 1_000_000 for n in range(16)))
    call = one.call("t", "g")
    assert next(call).status.code == OK

    call.cancel()
    with pytest.raises(grpc.RpcError):
        list(call)
    got: list[int] = []
    until(lambda: len(got.__iadd__(other.receive("t", "g").attempts)) >= 16)

    assert got == [1] * 16


def test_closing_the_endpoint_ends_what_waits(stand: Stand, one: Consumer) -> None:
    poll = one.begin("t", "g")

    stand.endpoint.shutdown()

    # As every call of a broker that stops: clients repeat it.
    assert poll.result(60).code == 50001
