"""Fetching messages of a topic ahead of who polls."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from rmq_pipeline import schema
from rmq_pipeline.consumer.assigned_queues import Reading
from rmq_pipeline.consumer.message_queue import Subscription
from rmq_pipeline.consumer.offset_store import Place
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.pull_consumer import Fetcher
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.verb import PullResult
from tests.consumer.pieces import QUEUE, rows
from tests.waiting import until


class Endless:
    """A queue without an end, of which each pull brings one message; its group is at the begin."""

    def __init__(self) -> None:
        self.pulls: list[int] = []

    def pull(self, _topic: str, offsets: dict[int, int], **_: Any) -> PullResult:
        ((queue_id, offset),) = offsets.items()
        self.pulls.append(offset)
        table = rows([offset], queue_id=queue_id).select(schema.READ.names)
        return PullResult(table, {queue_id: offset + 1})

    def start(self, _queue: Any) -> Place:
        return Place(0)


def test_room_that_is_made_just_before_the_fetcher_waits_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verbs: Any = Endless()
    thresholds = Thresholds(messages=1)
    reading = Reading(verbs, of_group=verbs, thresholds=thresholds, describe=lambda _: {})
    reading.holds = lambda _: True
    subscription = Subscription(QUEUE.topic)
    reading.subscribe(subscription)
    reading.take(QUEUE)
    look, tried = reading.wanted, threading.Event()

    def poll() -> None:
        """Between the look and the wait, where nothing is in the way; else as soon as may be."""
        if is_free := reading.changed.acquire(blocking=False):
            reading.give_out(1)
            reading.changed.release()
        tried.set()
        if not is_free:
            reading.give_out(1)

    polls = threading.Thread(target=poll)

    def look_and_be_overtaken(topic: str, **how: Any) -> dict[int, int]:
        wanted = look(topic, **how)
        if not wanted and not tried.is_set():
            polls.start()
            assert tried.wait(30)
        return wanted

    monkeypatch.setattr(reading, "wanted", look_and_be_overtaken)
    statistics = Statistics(lambda: 0)
    fetcher = Fetcher(
        cast(Any, verbs), subscription, reading=reading, statistics=statistics, wait_ms=60_000
    )
    try:
        until(lambda: verbs.pulls == [0, 1], within_s=5)
    finally:
        fetcher.close()
        polls.join()
