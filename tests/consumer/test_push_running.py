"""A push consumer begins, is told of what changes, and ends (semantics §6.3, §6.11)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.listener import Call
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.errors import (
    ConsumerGroupNotFoundError,
    ConsumerUsageError,
    RequestError,
    TopicNotFoundError,
)
from tests.consumer.between import Between
from tests.consumer.conftest import bodies
from tests.consumer.listening import Heard, consumer, rows_of, unread
from tests.consumer.pieces import Gate, repeat
from tests.waiting import until

Make = Callable[..., Any]


def test_nothing_is_called_while_it_is_suspended(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    heard = Heard()

    with consumer(verbs, readers, name).listen(heard) as running:
        verbs.send(name, bodies(0, 1))
        heard.wait(1)
        running.suspend()
        verbs.send(name, bodies(1, 9))
        assert not threading.Event().wait(0.2)
        assert heard.bodies == [0]
        running.resume()
        heard.wait(9)

    assert sorted(heard.bodies) == list(range(9))


def test_closing_finishes_calls_and_gives_the_rest_back_uncounted(
    verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 20))
    heard = Heard(gate.hang)
    running = consumer(verbs, readers, name, threads=1, max_threads=1).listen(heard).start()
    assert gate.arrived.wait(30)
    until(lambda: len(rows_of(verbs, "in_flight", readers, "queue_offset")) == 20)

    parts = running._running()
    closing = threading.Thread(target=running.close)
    closing.start()
    until(lambda: parts.workers._closing)
    gate.open()
    closing.join(30)

    assert not closing.is_alive()
    assert heard.done == [0]
    again = verbs.receive(readers, name, limit=100)
    assert [int(body) for body in again["body"].to_pylist()] == list(range(1, 20))
    assert set(again["delivery_attempt"].to_pylist()) == {1}


def test_hooks_see_every_call_and_one_that_raises_stops_nothing(
    verbs: Broker, topic: Make, group: Make
) -> None:
    class Seen:
        def __init__(self) -> None:
            self.calls: list[Call] = []

        def before(self, call: Call) -> None:
            raise RuntimeError(call.group)

        def after(self, call: Call) -> None:
            self.calls.append(call)

    name, readers, seen = topic(queues=1), group(), Seen()
    verbs.send(name, bodies(0, 2))
    heard = Heard()

    with consumer(verbs, readers, name, hooks=[seen]).listen(heard):
        heard.wait(2)
        until(lambda: len(seen.calls) == 2)

    assert {call.group for call in seen.calls} == {readers}
    assert all(call.succeeded for call in seen.calls)


def test_statistics_are_told_with_the_heartbeat(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    heard = Heard()

    with consumer(verbs, readers, name, client_id="member-1").listen(heard) as running:
        heard.wait(20)
        running._running().rebalancer._membership.refresh()
        member = verbs.describe_group(readers)["members"]["member-1"]["details"]

    assert (member["model"], member["order"]) == ("clustering", "concurrently")
    assert member["queues"] == {name: [0, 1]}
    statistics = member["statistics"][name]
    assert statistics["consume_ok_per_s"] > 0
    assert statistics["pulled_per_s"] > 0
    assert statistics["pull_rt_ms"] > 0
    assert statistics["consume_failed_per_s"] == 0
    assert set(statistics) == {
        "consume_rt_ms",
        "consume_ok_per_s",
        "consume_failed_per_s",
        "pull_rt_ms",
        "pulled_per_s",
        "cached",
        "cached_bytes",
    }


def test_a_reset_is_followed_without_a_restart(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 5))
    heard = Heard()

    with consumer(verbs, readers, name).listen(heard):
        heard.wait(5)
        until(lambda: unread(verbs, readers) == 0)
        verbs.reset_offset(readers, name, to_offset=2)
        heard.wait(8)

    assert sorted(heard.bodies) == [0, 1, 2, 2, 3, 3, 4, 4]


def test_a_pull_that_hangs_is_made_up_for_by_another_after_two_minutes(
    verbs: Broker, topic: Make, group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    name, readers, clock = topic(queues=1), group(), ManualClock()
    between = Between(verbs, only=("receive",))
    gate = between.gate = Gate()
    heard = Heard()

    with consumer(cast(Broker, between), readers, name, clock=clock).listen(heard):
        assert gate.arrived.wait(30)
        verbs.send(name, bodies(0, 3))
        clock.advance(Pace().pull_expiry_ms - 1)
        assert not threading.Event().wait(0.1)
        assert heard.bodies == []
        # No further: the pull that makes up for it must not expire as well.
        repeat(lambda: clock.advance(10_000), lambda: "restarting it" in caplog.text)
        heard.wait(3)
        gate.open()

    assert "was not pulled for 120 s; restarting it" in caplog.text
    assert sorted(heard.bodies) == [0, 1, 2]


def test_it_goes_on_when_the_broker_was_away(
    verbs: Broker, topic: Make, group: Make, caplog: pytest.LogCaptureFixture
) -> None:
    name, readers = topic(queues=1), group()
    between = Between(verbs, only=("receive", "ack"))
    between.lost_before = 3
    verbs.send(name, bodies(0, 30))
    heard = Heard()

    with (
        caplog.at_level(logging.INFO),
        consumer(cast(Broker, between), readers, name).listen(heard),
    ):
        heard.wait(30)
        until(lambda: unread(verbs, readers) == 0)

    assert sorted(heard.bodies) == list(range(30))
    assert caplog.text.count("cannot pull from") == 1


def test_what_cannot_be_started_says_why(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(), group(order="message_group")
    heard = Heard()

    with pytest.raises(ConsumerGroupNotFoundError):
        consumer(verbs, "nobody", name).listen(heard).start()
    with pytest.raises(TopicNotFoundError):
        consumer(verbs, readers, "nowhere", order="key").listen(heard).start()
    with pytest.raises(ConsumerUsageError, match="Call subscribe and listen first"):
        consumer(verbs, readers, name).start()
    with pytest.raises(ConsumerUsageError, match="Use order='key' or order='queue'"):
        consumer(verbs, readers, name).listen(heard).start()
    with pytest.raises(ConsumerUsageError, match="Use key='message_group'"):
        consumer(verbs, readers, name, order="key", key="keys").listen(heard).start()
    with pytest.raises(RequestError):
        consumer(verbs, readers).subscribe(name, "a > ", filter_type="sql92")


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 0},
        {"threads": 4, "max_threads": 3},
        {"batch": 0},
        {"batch": True},
        {"order": "random"},
        {"model": "casting"},
        {"key": 7},
        {"pull_batch": 1_000_000},
        {"max_reconsume_times": -2},
        {"max_attempts": 0},
        {"consume_timeout_ms": 0.5},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConsumerUsageError, match=list(settings)[-1]):
        PushConsumer(cast(Any, None), "g", **settings)


def test_a_closed_consumer_is_closed(verbs: Broker, topic: Make, group: Make) -> None:
    running = consumer(verbs, group(), topic()).listen(Heard())
    running.start()
    with pytest.raises(ConsumerUsageError, match="runs already"):
        running.start()
    running.close()
    running.close()

    for again in (running.start, running.suspend, running.owned):
        with pytest.raises(ConsumerUsageError):
            again()
