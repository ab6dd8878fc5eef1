"""Results reach the broker: in batches, whole, and in the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of
from rmq_pipeline.consumer.settler import Part, Settler
from rmq_pipeline.errors import ConsumerGroupNotFoundError, ForbiddenError, ReceiptHandleError
from tests.consumer.between import Between
from tests.consumer.conftest import bodies
from tests.consumer.pieces import Gate
from tests.waiting import until

Make = Callable[..., Any]


class Setup:
    """A topic of one queue, a group, and a settler of its deliveries."""

    def __init__(self, verbs: Broker, topic: str, group: str, pace: Pace | None = None) -> None:
        self.verbs, self.topic, self.group = verbs, topic, group
        self.between = Between(verbs)
        self.queue = ProcessQueue(MessageQueue(topic, "rmq", 0), now_ms=0)
        self.settler = Settler(cast(Any, self.between), group, pace=pace)

    def receive(self, n: int, *, invisible_ms: int = 60_000) -> list[ReceivedMessage]:
        self.verbs.send(self.topic, bodies(0, n))
        table = self.verbs.receive(
            self.group, self.topic, limit=n, invisible_duration_ms=invisible_ms
        )
        messages = messages_of(table, self.topic, queues={0: self.queue})[0]
        self.queue.put(messages)
        return self.queue.take(n)

    def unread(self) -> int:
        query = f"SELECT sum(lag) AS n FROM lag WHERE consumer_group = '{self.group}'"
        return int(self.verbs.sql(query)["n"][0].as_py() or 0)

    def settled(self) -> None:
        until(lambda: self.queue._unsettled == 0)


@pytest.fixture
def setup(verbs: Broker, topic: Make, group: Make) -> Iterator[Setup]:
    setup = Setup(verbs, topic(queues=1), group(max_attempts=2))
    yield setup
    setup.settler.close(5)


def test_acknowledged_messages_do_not_come_again(setup: Setup) -> None:
    setup.settler.settle(Part(setup.receive(3)))
    setup.settled()

    assert setup.between.calls == [("ack", 3)]
    assert setup.unread() == 0
    assert setup.queue.count == 0


def test_what_is_settled_during_a_call_goes_with_the_next(setup: Setup) -> None:
    gate = setup.between.gate = Gate()
    messages = setup.receive(11)
    setup.settler.settle(Part(messages[:1]))
    assert gate.arrived.wait(30)

    for message in messages[1:]:
        setup.settler.settle(Part([message]))
    gate.open()
    setup.settled()

    assert setup.between.calls == [("ack", 1), ("ack", 10)]


def test_results_wait_for_others_unless_somebody_waits_for_them(
    verbs: Broker, topic: Make, group: Make
) -> None:
    setup = Setup(verbs, topic(queues=1), group(), Pace(settle_gap_s=3600.0))
    setup.settler.settle(Part(setup.receive(1)))
    assert not threading.Event().wait(0.05)
    assert setup.between.calls == []

    setup.settler.hurry()
    setup.settled()

    assert setup.between.calls == [("ack", 1)]
    setup.settler.close(5)


def test_failures_carry_their_reason_to_the_broker(setup: Setup) -> None:
    one, two, three = setup.receive(3)
    setup.settler.settle(
        Part([one]),
        Part([two], "dead_letter", reason="no gate 7", error_type="GateError"),
        Part([three], "retry", 3_600_000, "later", "failed"),
    )
    setup.settled()

    assert setup.between.calls == [("settle", 3)]
    dead = setup.verbs.sql(
        f"SELECT reason, error_type FROM dead_letters WHERE consumer_group = '{setup.group}'"
    )
    assert dead.to_pylist() == [{"reason": "no gate 7", "error_type": "GateError"}]
    retrying = setup.verbs.sql(
        f"SELECT reason FROM retrying WHERE consumer_group = '{setup.group}'"
    )
    assert retrying.to_pylist() == [{"reason": "later"}]


def test_the_group_decides_what_give_up_does(verbs: Broker, topic: Make, group: Make) -> None:
    setup = Setup(verbs, topic(queues=1), group(max_attempts=9, on_failure="park"))

    setup.settler.settle(Part(setup.receive(1), "give_up", reason="enough"))
    setup.settler.close(5)

    parked = verbs.sql(f"SELECT reason FROM parked WHERE consumer_group = '{setup.group}'")
    assert parked.to_pylist() == [{"reason": "enough"}]


def test_a_lost_call_is_made_again_until_it_is_answered(setup: Setup) -> None:
    setup.between.lost_before = 2

    setup.settler.settle(Part(setup.receive(2)))
    setup.settled()

    assert setup.between.calls == [("ack", 2)] * 3
    assert setup.unread() == 0


def test_a_lost_answer_is_found_out_by_its_refusal(setup: Setup) -> None:
    setup.between.lost_after = 1

    setup.settler.settle(Part(setup.receive(1)))
    setup.settled()

    assert setup.unread() == 0


def test_a_refused_receipt_takes_no_other_result_along(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    gate = setup.between.gate = Gate()
    first, *messages = setup.receive(9)
    setup.settler.settle(Part([first]))
    assert gate.arrived.wait(30)
    setup.verbs.ack([messages[3].receipt_handle])

    with caplog.at_level(logging.INFO):
        setup.settler.settle(Part(messages[:2]))
        setup.settler.settle(Part(messages[2:5]))
        setup.settler.settle(Part(messages[5:]))
        gate.open()
        setup.settled()

    assert setup.unread() == 0
    assert caplog.text.count("too late") == 1
    assert repr(messages[3]) in caplog.text


def test_what_is_released_comes_at_once_and_uncounted(setup: Setup) -> None:
    setup.settler.release(setup.receive(2))

    again = setup.verbs.receive(setup.group, setup.topic, limit=9, wait_ms=20_000)

    assert again["delivery_attempt"].to_pylist() == [1, 1]


def test_giving_back_what_has_ended_is_nothing(setup: Setup) -> None:
    one, two = setup.receive(2)
    setup.verbs.ack([one.receipt_handle])

    setup.settler.release([one, two])

    assert setup.verbs.receive(setup.group, setup.topic, wait_ms=20_000).num_rows == 1


def test_closing_tells_the_broker_all_there_is(setup: Setup) -> None:
    for message in setup.receive(50):
        setup.settler.settle(Part([message]))

    setup.settler.close(30)

    assert setup.unread() == 0


def test_closing_gives_up_on_a_broker_that_is_away(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.between.lost_before = 1_000_000
    setup.settler.settle(Part(setup.receive(1)))
    until(lambda: setup.between.calls)

    setup.settler.close(0.1)

    assert "closes unsettled: messages are redelivered" in caplog.text


@pytest.mark.parametrize(
    "error", [ForbiddenError("No right."), ConsumerGroupNotFoundError("Gone."), ValueError("odd")]
)
def test_what_is_refused_for_another_reason_is_told_again_until_it_is_taken(
    error: Exception,
    setup: Setup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup.settler, "_refused_s", 0.01)
    one, two, three = setup.receive(3)
    setup.between.refusal = error
    setup.settler.settle(Part([one]), Part([two], "retry", 3_600_000, "later", "failed"))
    until(lambda: len(setup.between.calls) >= 3)
    assert setup.queue._unsettled == 2, "the queue is not handed over meanwhile"

    setup.between.refusal = None
    setup.settler.settle(Part([three]))
    setup.settled()

    assert f"retries until it closes; then unsettled messages are redelivered: {error}" in (
        caplog.text
    )
    assert setup.unread() == 1
    view = f"SELECT reason FROM retrying WHERE consumer_group = '{setup.group}'"
    assert setup.verbs.sql(view).to_pylist() == [{"reason": "later"}]


def test_one_topic_that_is_refused_holds_up_no_other(setup: Setup) -> None:
    one, *others = setup.receive(5)
    setup.between.refused_receipts = {one.receipt_handle: ForbiddenError("Not this one.")}

    for message in [one, *others]:
        setup.settler.settle(Part([message]))

    until(lambda: setup.unread() == 1 and setup.queue._unsettled == 1)


def test_what_is_refused_until_the_end_is_told_once_more_and_comes_again(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.between.refusal = ForbiddenError("No right.")
    setup.settler.settle(Part(setup.receive(2)))
    until(lambda: setup.between.calls)

    setup.settler.close(5)

    assert "closes: redelivering 2 unsettled messages" in caplog.text
    assert setup.queue._unsettled == 0
    assert setup.unread() == 2


def test_leases_are_renewed_while_messages_are_held(
    verbs: Broker, topic: Make, group: Make
) -> None:
    often = Pace(lease_renew_s=0.02)
    setup = Setup(verbs, topic(queues=1), group())
    setup.settler.close(5)
    setup.settler = Settler(
        cast(Any, setup.between), setup.group, held=setup.queue.held, pace=often
    )
    done, lost = setup.receive(2)
    before = done.receipt_handle, lost.receipt_handle
    waits = setup.receive(1)[0]
    setup.queue.consume_again([waits])

    def are_acked() -> bool:
        try:
            verbs.ack([lost.receipt_handle, waits.receipt_handle])
        except ReceiptHandleError:  # they were renewed meanwhile
            return False
        return True

    until(lambda: done.receipt_handle != before[0])
    # A renewal in between would make the receipts old ones again and again.
    setup.settler._pace = Pace(lease_renew_s=3600.0)
    until(are_acked)
    setup.settler._pace = often
    # It wakes the thread, which finds out at the next renewal what is lost.
    setup.settler.settle(Part([done]))
    until(lambda: all(message is not waits for message in setup.queue.held()))
    assert setup.queue.begin([waits]) == []
    setup.settled()

    assert setup.unread() == 0
    setup.settler.close(5)
