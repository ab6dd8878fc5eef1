"""What a scheduled message is once it is delivered, and that it is delivered once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000
DAY = 24 * 3600 * SECOND


@pytest.fixture
def later(topic: Make) -> str:
    return str(topic(type="delay", queues=1))


@pytest.mark.every_endpoint
def test_a_delivered_message_is_found_by_its_tag_and_its_properties(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    by_tag, by_property = group(), group()
    endpoint.broker.send(
        later, messages(2, delay_level=1, tag=["t", "u"], properties=[{"p": "1"}, {"p": "2"}])
    )
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled()

    tagged = endpoint.broker.receive(by_tag, later, filter="t")
    chosen = endpoint.broker.receive(by_property, later, filter="p = 2", filter_type="sql92")

    assert tagged["body"].to_pylist() == [b"0"]
    assert chosen["body"].to_pylist() == [b"1"]


@pytest.mark.every_endpoint
@pytest.mark.parametrize("from_the_log", [False, True])
def test_what_was_delivered_does_not_come_twice_after_a_restart(
    endpoint: Endpoint, later: str, group: Make, messages: Make, from_the_log: bool
) -> None:
    readers = group()
    endpoint.broker.send(later, messages(30, delay_level=1))
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled(limit=20)

    if from_the_log:
        reopened_from_the_log(endpoint)
    else:
        endpoint.reopen()

    assert endpoint.stored(later) == 20
    assert endpoint.broker.deliver_scheduled()["delivered"] == 10
    assert endpoint.drain(later, readers) == [b"%d" % i for i in range(30)]


@pytest.mark.every_endpoint
def test_a_full_level_does_not_hold_up_another_that_is_due_before_it(
    endpoint: Endpoint, later: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(later, messages(50, delay_level=4))
    endpoint.advance(25 * SECOND)
    endpoint.broker.send(later, messages(1, start=50, delay_level=1))
    endpoint.advance(5 * SECOND)

    endpoint.broker.deliver_scheduled(limit=1)

    assert endpoint.drain(later, readers) == [b"50"]


@pytest.mark.every_endpoint
@pytest.mark.parametrize(
    "name",
    [
        *("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"),
        *("REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "CHECK_IMMUNITY_TIME_IN_SECONDS"),
    ],
)
def test_a_delay_or_a_transaction_is_no_property_of_a_message(
    endpoint: Endpoint, topic: Make, messages: Make, name: str
) -> None:
    plain = topic(queues=1)

    with pytest.raises(errors.IllegalMessagePropertyError):
        endpoint.broker.send(plain, messages(1, properties=[{name: "1"}]))

    assert endpoint.stored(plain) == 0


# ----------------------------------------------------------------------------------------- recall


@pytest.mark.every_endpoint
@pytest.mark.parametrize("ahead_ms", [3 * DAY, 3 * DAY + 1, 365 * DAY])
def test_a_message_may_be_recalled_however_far_ahead_it_is(
    endpoint: Endpoint, later: str, messages: Make, ahead_ms: int
) -> None:
    due = endpoint.clock.now_ms() + ahead_ms
    sent = endpoint.broker.send(later, messages(2, deliver_at_ms=due))

    endpoint.broker.recall(later, sent.slice(0, 1).select(["recall_handle"]))
    endpoint.advance(ahead_ms)

    assert endpoint.broker.deliver_scheduled()["delivered"] == 1
    assert endpoint.bodies(later) == [b"1"]


@pytest.mark.every_endpoint
def test_a_message_of_the_same_id_is_not_recalled_with_another(
    endpoint: Endpoint, later: str, topic: Make, messages: Make
) -> None:
    other = topic(type="delay", queues=1)
    sent = endpoint.broker.send(later, messages(2, message_id="same", delay_level=1))
    endpoint.broker.send(other, messages(1, message_id="same", delay_level=1))

    endpoint.broker.recall(later, sent.slice(1).select(["recall_handle"]))
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled()

    assert (endpoint.bodies(later), endpoint.bodies(other)) == ([b"0"], [b"0"])
