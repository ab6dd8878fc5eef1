"""What is held of a queue that is put elsewhere or dropped (semantics §6.3)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.message_queue import Subscription
from rmq_pipeline.consumer.owned_queues import OwnedQueues
from rmq_pipeline.consumer.process_queue import ProcessQueue, Thresholds
from rmq_pipeline.consumer.puller import Puller
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.statistics import Statistics
from tests.consumer.pieces import QUEUE, Settled, received, rows
from tests.waiting import until


def owned(settled: Settled, *, ordered: bool = False) -> OwnedQueues:
    """One queue that was just taken."""
    queues = OwnedQueues(
        settled,
        clock=ManualClock(),
        wake=lambda _: None,
        report=lambda _: {},
        places=None,
        ordered=ordered,
    )
    queues.take(QUEUE)
    return queues


@pytest.mark.parametrize(("ordered", "released"), [(False, [2, 3]), (True, [])])
def test_what_a_pull_brought_before_the_news_of_a_reset_is_released(
    ordered: bool, released: list[int]
) -> None:
    settled = Settled()
    queues = owned(settled, ordered=ordered)
    (before,) = queues.of_topic(QUEUE.topic)
    before.put(received(before, [2, 3]))

    queues.reset(QUEUE)

    (after,) = queues.of_topic(QUEUE.topic)
    assert (before.dropped, before.count) == (True, 0)
    assert (after is before, after.count) == (False, 0)
    # In order, the queue comes again with the leases that there are.
    assert (settled.released, after.unsure) == (released, ordered)


class Once:
    """A source with one pull's messages."""

    def __init__(self, table: pa.Table) -> None:
        self._left = [table]
        self.ended = threading.Event()

    def pull(self, *_: Any, **__: Any) -> pa.Table:
        return self._left.pop() if self._left else rows([])

    def handed_on(self, _: Sequence[ProcessQueue]) -> None:
        self.ended.set()

    def lost(self, queues: Sequence[ProcessQueue]) -> None:
        raise AssertionError(queues)


class Late:
    """Somebody drops the queue just before what was pulled of it is held."""

    spans = True

    def __init__(self, queues: OwnedQueues) -> None:
        self._queues = queues

    def arrived(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        self._queues.drop(queue.queue)
        queue.put(messages)

    def is_starving(self) -> bool:
        return False

    def expire(self) -> None:
        """Nothing is with a listener."""


def test_what_comes_while_a_queue_is_dropped_is_released() -> None:
    settled = Settled()
    queues = owned(settled)
    source = Once(rows([4, 5]))
    puller = Puller(
        Subscription(QUEUE.topic, "*"),
        source=source,
        service=Late(queues),
        settling=settled,
        queues=queues.of_topic,
        holds=lambda _: True,
        thresholds=Thresholds(),
        statistics=Statistics(ManualClock().now_ms),
        clock=ManualClock(),
        batch=32,
        poll_ms=10,
    )

    puller.start()
    until(source.ended.is_set)
    puller.stop(30)

    assert settled.released == [4, 5]


def test_an_ordered_queue_is_unsure_of_what_was_leased_before() -> None:
    queues = owned(Settled(), ordered=True)
    (first,) = queues.of_topic(QUEUE.topic)
    assert first.unsure
    assert queues.drop(QUEUE)

    queues.take(QUEUE)
    (second,) = queues.of_topic(QUEUE.topic)
    assert second.unsure

    # A pull of the first one has leased something that no worker has.
    queues.restart(first)
    (third,) = queues.of_topic(QUEUE.topic)
    assert third is not second
    assert third.unsure


@pytest.mark.parametrize("again", ["dropped", "begun anew"])
def test_leases_of_running_messages_are_renewed_after_the_queue_is_replaced(again: str) -> None:
    queues = owned(Settled())
    (held,) = queues.of_topic(QUEUE.topic)
    running = received(held, [7])
    held.put(running)
    held.begin(running)

    if again == "dropped":
        for _ in range(2):
            queues.drop(QUEUE)
            assert queues.messages() == running
            queues.take(QUEUE)
    else:
        queues.restart(held)
    assert queues.messages() == running

    held.remove(running)
    assert queues.messages() == []
