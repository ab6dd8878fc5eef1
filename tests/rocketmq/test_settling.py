"""Acks, other ends of leases and dead letters at the endpoint, with raw stubs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.decide.settle_each import AckEach
from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.rocketmq.encoding import parse
from rmq_pipeline.rocketmq.settling import _Acks
from tests.rocketmq.consuming import EMPTY, MIXED, OK, Consumer, Stand
from tests.rocketmq.test_grpc_endpoint import held_up
from tests.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=2)
    stand.broker.create_topic("u", queues=2)
    yield stand
    stand.close()


@pytest.fixture
def one(stand: Stand) -> Consumer:
    return stand.consumer("one")


def test_acks_of_one_request_have_one_status(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1", b"2", b"3")
    handles = one.receive("t", "g").handles

    reply = one.ack("t", "g", handles)

    assert reply.status.code == OK
    assert [entry.status.code for entry in reply.entries] == [OK] * 3
    assert [entry.receipt_handle for entry in reply.entries] == handles
    stand.clock.advance(60_000)
    assert one.receive("t", "g").code == EMPTY


def test_a_second_ack_is_refused(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    handles = one.receive("t", "g").handles

    codes = [one.ack("t", "g", handles).status.code for _ in range(2)]

    assert codes == [OK, 40013]


def test_acks_that_do_not_wait_for_each_other_share_frames(stand: Stand, one: Consumer) -> None:
    stand.send("t", *(b"%d" % number for number in range(32)))
    handles = one.receive("t", "g").handles
    log, twice = stand.broker.engine.log, handles[0]
    start = log.end

    with held_up(stand.broker):
        acking = [one.begin_ack("t", "g", [handle]) for handle in (*handles, twice)]
        until(lambda: stand.endpoint._service._calls == 33)
    codes = [ack.result().status.code for ack in acking]

    assert sorted(codes) == [OK] * 32 + [40013]
    # The first to come have one, and all that came during that share the other.
    assert len(list(log.frames(start, log.end))) <= 2
    stand.clock.advance(60_000)
    assert one.receive("t", "g").code == EMPTY


def test_acks_with_different_results_say_which(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1", b"2")
    first, second = one.receive("t", "g").handles
    one.ack("t", "g", [first])

    reply = one.ack("t", "g", [first, second, "no handle", second])

    assert reply.status.code == MIXED
    assert [entry.status.code for entry in reply.entries] == [40013, OK, 40013, 40013]


@pytest.mark.parametrize("handle", ["", "x", "00" * 28, "zz" * 28, "ff" * 28, "0" * 55, "é" * 56])
def test_what_is_no_receipt_is_refused_everywhere(one: Consumer, handle: str) -> None:
    one.receive("t", "g")

    assert one.ack("t", "g", [handle]).status.code == 40013
    assert one.forward("t", "g", handle) == 40013
    reply = one.change("t", "g", handle, ms=10_000)
    assert (reply.status.code, reply.receipt_handle) == (40013, handle)


def test_a_receipt_is_good_for_its_group_and_topic_only(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    handles = one.receive("t", "g").handles
    one.receive("t", "h")
    one.receive("u", "g")

    assert one.ack("t", "h", handles).status.code == 40013
    assert one.ack("u", "g", handles).status.code == 40013
    assert one.ack("t", "g", handles).status.code == OK


@pytest.mark.parametrize("entries", [0, 10_001])
def test_an_ack_of_nothing_or_too_much_is_refused(one: Consumer, entries: int) -> None:
    assert one.ack("t", "g", ["x"] * entries).status.code == 40000


def test_a_receipt_that_comes_late_is_refused(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    handles = one.receive("t", "g", invisible_ms=10_000).handles

    stand.clock.advance(10_000)

    assert one.ack("t", "g", handles).status.code == 40013
    assert one.receive("t", "g").attempts == [2]


def test_acks_of_many_callers_have_their_own_answers(stand: Stand, one: Consumer) -> None:
    stand.send("t", *(str(n).encode() for n in range(32)))
    handles = one.receive("t", "g").handles
    given = [*handles, *handles[:8], "wrong"]

    replies = [stand.pool.submit(one.ack, "t", "g", [handle]) for handle in given]

    codes = [reply.result(60).status.code for reply in replies]
    assert codes.count(OK) == 32
    assert codes[-1] == 40013
    assert codes.count(40013) == 9
    assert stand.broker.sql("SELECT * FROM in_flight").num_rows == 0


def test_another_end_of_a_lease_has_another_receipt(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    (handle,) = one.receive("t", "g", invisible_ms=10_000).handles

    reply = one.change("t", "g", handle, ms=60_000)

    assert reply.status.code == OK
    assert reply.receipt_handle != handle
    stand.clock.advance(59_999)
    assert one.receive("t", "g").code == EMPTY
    assert one.ack("t", "g", [handle]).status.code == 40013
    assert one.ack("t", "g", [reply.receipt_handle]).status.code == OK


def test_no_invisible_duration_at_all_gives_a_message_back(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    (handle,) = one.receive("t", "g").handles

    assert one.change("t", "g", handle, ms=0).status.code == OK

    stand.clock.advance(1)
    assert one.receive("t", "g").attempts == [2]


def test_an_invisible_duration_is_12_hours_at_most(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    (handle,) = one.receive("t", "g").handles

    reply = one.change("t", "g", handle, ms=12 * 3_600_000 + 1)

    assert (reply.status.code, reply.receipt_handle) == (40011, handle)
    assert one.ack("t", "g", [handle]).status.code == OK


def test_a_listener_that_fails_without_a_delay_has_that_of_its_group(
    stand: Stand, one: Consumer
) -> None:
    stand.broker.create_group("g", backoff_ms=[7_000, 20_000])
    stand.send("t", b"1")

    for attempt, delay in ((1, 7_000), (2, 20_000)):
        received = one.receive("t", "g", renewed=True)
        assert received.attempts == [attempt]
        assert one.change("t", "g", received.handles[0], ms=17).status.code == OK
        stand.clock.advance(delay - 1)
        assert one.receive("t", "g", renewed=True).code == EMPTY
        stand.clock.advance(1)

    assert one.receive("t", "g", renewed=True).attempts == [3]


def test_a_listener_that_fails_after_a_restart_has_the_delay_of_its_group(
    stand: Stand, tmp_path: Path
) -> None:
    stand.broker.create_group("g", backoff_ms=[7_000])
    stand.send("t", b"1", b"2")
    first, second = stand.consumer("one").receive("t", "g", renewed=True).handles
    stand.close()

    # The broker has not heard of the client yet: neither settings nor a heartbeat nor a receive.
    again = Stand(tmp_path / "home")
    try:
        one = again.consumer("one")
        renewed = one.change("t", "g", first, ms=2_000)
        for handle in (second, renewed.receipt_handle):
            assert one.change("t", "g", handle, ms=1).status.code == OK
        again.clock.advance(6_999)
        assert one.receive("t", "g").code == EMPTY
        again.clock.advance(1)
        assert one.receive("t", "g").attempts == [2, 2]
    finally:
        again.close()


def test_a_listener_that_names_a_delay_has_it(stand: Stand, one: Consumer) -> None:
    stand.send("t", b"1")
    (handle,) = one.receive("t", "g", renewed=True).handles

    one.change("t", "g", handle, ms=2_000)

    stand.pass_time(1_000, one)  # and nobody prolongs it
    assert one.receive("t", "g").attempts == [2]


def test_what_fails_too_often_goes_to_the_dead_letters(stand: Stand, one: Consumer) -> None:
    stand.broker.create_group("g", max_attempts=2, backoff_ms=[1_000])
    stand.send("t", b"1", properties=[[("p", "v")]])

    for _ in range(2):
        (handle,) = one.receive("t", "g").handles
        one.change("t", "g", handle, ms=1_000)
        stand.clock.advance(1_000)
    assert one.receive("t", "g").code == EMPTY

    (message,) = one.receive("%DLQ%g", "burial").messages
    assert message.body == b"1"
    assert message.user_properties["p"] == "v"
    assert message.system_properties.dead_letter_queue.topic == "t"


def test_a_message_that_a_client_rejects_is_a_dead_letter_at_once(
    stand: Stand, one: Consumer
) -> None:
    stand.broker.create_topic("orders", type="fifo", queues=1)
    stand.send("orders", b"1", b"2", message_group="A")
    first = one.receive("orders", "g", batch=1, renewed=True)

    assert one.forward("orders", "g", first.handles[0]) == OK

    assert one.receive("%DLQ%g", "burial").bodies == [b"1"]
    assert one.receive("orders", "g", batch=1).bodies == [b"2"]
    until(lambda: len(stand.context.leases) == 0)


def test_what_has_ended_is_forwarded_as_far_as_its_client_is_told(
    stand: Stand, one: Consumer
) -> None:
    stand.send("t", b"1", b"2")
    late, again = one.receive("t", "g", renewed=True).handles
    stand.broker.release([late])
    two = stand.consumer("two")
    anew = two.receive("t", "g")

    codes = [one.forward("t", "g", handle) for handle in (late, again, again)]

    assert codes == [OK, OK, OK]
    assert len(stand.context.leases) == 0
    assert one.receive("%DLQ%g", "burial").bodies == [b"2"]
    assert two.ack("t", "g", anew.handles).status.code == OK


class Broken(Request):
    """A request that fails in the writer with an unexpected error."""

    def decide(self, *_: object, **__: object) -> Decision:
        raise ZeroDivisionError


class Tripping(Bridge):
    """A bridge on which acks with one offset are broken."""

    asked: list[int]
    offset: int

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        assert isinstance(request, AckEach)
        self.asked.append(len(request.receipts))
        broken = self.offset in request.receipts.queue_offset.tolist()
        return super().submit(Broken() if broken else request)


def test_an_unexpected_error_is_the_answer_to_one_ack_only(stand: Stand, one: Consumer) -> None:
    stand.broker.create_topic("single", queues=1)
    stand.send("single", *(str(n).encode() for n in range(4)))
    rows = [parse(handle) for handle in one.receive("single", "g").handles]

    async def acks() -> tuple[list[Any], list[int]]:
        bridge = Tripping(stand.broker.engine, asyncio.get_running_loop())
        bridge.asked, bridge.offset = [], 2
        acks = _Acks(bridge)
        settling = (acks.settle([row], f"c{n}") for n, row in enumerate(rows) if row is not None)
        answers = await asyncio.gather(*settling, return_exceptions=True)
        bridge.close()
        return answers, bridge.asked

    answers, asked = asyncio.run(acks())

    assert asked == [4, 1, 1, 1, 1]
    assert isinstance(answers.pop(2), ZeroDivisionError)
    assert answers == [[True]] * 3
    stand.clock.advance(60_000)
    assert one.receive("single", "g").bodies == [b"2"]
