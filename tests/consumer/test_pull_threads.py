"""A pull consumer that several threads call, or that commits while its queues are handed over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.rebalancing import Rebalancer
from rmq_pipeline.errors import BrokerUnavailableError, BusyError
from tests.consumer.between import Between
from tests.consumer.conftest import FAST, Make, Open, bodies, read
from tests.consumer.pieces import Gate
from tests.waiting import until


def test_a_queue_that_was_let_go_while_it_was_worked_on_is_named_once(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    slow = replace(FAST, let_go_s=0.05)
    consumer = reader(readers, client_id="a", auto_commit_ms=None, pace=slow).subscribe(name)
    assert len(read(consumer, 20)) == 20
    other = reader(readers, client_id="b").subscribe(name)
    until(other.assignment)
    (gone,) = other.assignment()
    (left,) = {*consumer.assignment()} - {gone}
    until(lambda: not consumer._reading.holds(gone))

    with pytest.raises(BusyError, match=f"Nothing is committed of .*queueId={gone.queue_id}"):
        consumer.commit()

    assert consumer.commit() == {left: 10}
    assert consumer.assignment() == [left]
    assert len(read(other, 10)) == 10, "what is not committed comes again there"


def test_a_queue_that_was_let_go_is_named_until_all_of_it_is_done_with(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    slow = replace(FAST, let_go_s=0.05)
    consumer = reader(readers, client_id="a", auto_commit_ms=None, pace=slow).subscribe(name)
    assert len(read(consumer, 20)) == 20
    other = reader(readers, client_id="b").subscribe(name)
    until(other.assignment)
    (gone,) = other.assignment()
    until(lambda: not consumer._reading.holds(gone))

    for offset in (4, 7, 10):
        with pytest.raises(BusyError, match="Nothing is committed"):
            consumer.commit({gone: offset})

    assert gone not in consumer.assignment()


def test_a_queue_that_was_let_go_and_of_which_all_is_committed_is_not_missed(
    verbs: Broker, topic: Make, group: Make, reader: Open
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    between = Between(verbs, only=("commit_offsets",))
    slow = replace(FAST, let_go_s=0.05)
    consumer = reader(readers, auto_commit_ms=None, pace=slow, verbs=between).subscribe(name)
    assert len(read(consumer, 20)) == 20
    assert len(consumer.commit()) == 2
    between.refusal = BrokerUnavailableError("It is away, for commits.")
    other = reader(readers).subscribe(name)
    until(other.assignment)
    (gone,) = other.assignment()
    until(lambda: not consumer._reading.holds(gone))
    between.refusal = None

    (left,) = {*consumer.assignment()} - {gone}
    assert consumer.commit() == {left: 10}
    assert consumer.assignment() == [left]


class Overtaken:
    """A lock that somebody else is faster with, once."""

    def __init__(self, lock: Any, first: Callable[[], object]) -> None:
        self._lock, self._first = lock, [first]

    def __enter__(self) -> None:
        if self._first:
            self._first.pop()()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


def test_a_queue_that_is_handed_over_just_before_a_commit_is_not_missed(
    verbs: Broker, topic: Make, group: Make, reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    consumer = reader(readers, auto_commit_ms=None).subscribe(name)
    assert len(read(consumer, 20)) == 20
    assert len(consumer.commit()) == 2
    reading = consumer._reading

    def hand_over() -> None:
        reader(readers).subscribe(name)
        until(lambda: len(consumer.assignment()) == 1)

    monkeypatch.setattr(reading, "_committing", Overtaken(reading._committing, hand_over))

    assert consumer.commit() == dict.fromkeys(consumer.assignment(), 10)


def test_a_queue_of_which_all_is_committed_may_go_while_the_others_are(
    verbs: Broker, topic: Make, group: Make, reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, readers = topic(queues=2), group()
    verbs.send(name, bodies(0, 20))
    between = Between(verbs, only=("commit_offsets",))
    consumer = reader(readers, auto_commit_ms=None, verbs=between).subscribe(name)
    assert len(read(consumer, 20)) == 20
    assert len(consumer.commit()) == 2
    dropped, committed = Gate(), Gate()
    commit = consumer._reading.commit

    def commit_and_wait(queues: Iterable[MessageQueue] | None = None) -> dict[MessageQueue, int]:
        found = commit(queues)
        if not dropped.arrived.is_set():
            dropped.pass_through()
        return found

    monkeypatch.setattr(consumer._reading, "commit", commit_and_wait)
    other = reader(readers).subscribe(name)
    assert dropped.arrived.wait(30)
    between.gate = committed

    with ThreadPoolExecutor() as threads:
        found = threads.submit(consumer.commit)
        assert committed.arrived.wait(30)
        dropped.open()
        until(other.assignment)
        committed.open()

    assert found.result() == dict.fromkeys(consumer.assignment(), 10)


def test_two_threads_that_subscribe_first_make_one_member(
    verbs: Broker, topic: Make, group: Make, reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = topic(queues=1), topic(queues=1)
    consumer = reader(group())
    make, two, made = consumer._rebalancing, threading.Event(), list[str]()

    def make_slowly(topic: str) -> Rebalancer:
        made.append(topic)
        if len(made) == 2:
            two.set()
        two.wait(0.2)  # as long as it takes another one to come by here, if it may
        return make(topic)

    monkeypatch.setattr(consumer, "_rebalancing", make_slowly)
    with ThreadPoolExecutor() as threads:
        list(threads.map(consumer.subscribe, (one, other)))

    assert len(made) == 1
    verbs.send(one, bodies(0, 1))
    verbs.send(other, bodies(1, 2))
    assert sorted(read(consumer, 2)) == [0, 1]
