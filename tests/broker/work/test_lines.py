"""Receives that wait: one of a line is woken for what comes, and nobody waits beside a message."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.admin import CreateGroup, CreateTopic, DeleteGroup, DeleteTopic
from rmq_pipeline.broker.decide.deliver import Receive
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work.waiting import LOOK_MS, Waiter, Wakeups, watching
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from tests.waiting import until

WAITING = 40
LONG_MS = 60_000
AGAIN: dict[str, list[Request]] = {
    "topic": [DeleteTopic("t", False), CreateTopic("t", "normal", 1, "stored", False)],
    "group": [DeleteGroup("g", False), CreateGroup("g", "none", 17, (1000,), "dead_letter", False)],
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    small = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
    with Broker.open(
        tmp_path / "home", clock=ManualClock(), upkeep="none", settings=small
    ) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        yield broker


@contextmanager
def receives(broker: Broker, number: int, **asked: Any) -> Iterator[list[Future[pa.Table]]]:
    """So many that wait, in the order they came."""
    before = len(broker.engine.wakeups)
    with ThreadPoolExecutor(number) as pool:
        waiting = []
        for one in range(number):
            waiting.append(
                pool.submit(
                    broker.receive, **{"group": "g", "topic": "t", "wait_ms": LONG_MS, **asked}
                )
            )
            until(partial(_stand, broker, before + one + 1))
        try:
            yield waiting
        finally:
            broker.engine.wakeups.close()


def _stand(broker: Broker, number: int) -> bool:
    return len(broker.engine.wakeups) >= number


def messages(n: int) -> pa.Table:
    return pa.table({"body": [b"%d" % i for i in range(n)]})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Receive]:
    """What the writer was asked."""
    asked: list[Receive] = []
    decide = Receive.decide

    def looked(request: Receive, state: State, now_ms: int) -> Decision:
        asked.append(request)
        return decide(request, state, now_ms)

    monkeypatch.setattr(Receive, "decide", looked)
    return asked


def test_one_message_makes_two_receives_look(broker: Broker, looks: list[Receive]) -> None:
    with receives(broker, WAITING) as waiting:
        until(lambda: len(looks) == WAITING)

        broker.send("t", messages(1))

        # The second learns when the delivery ends.
        until(lambda: len(looks) == WAITING + 2)
        until(lambda: sum(one.done() for one in waiting) == 1)


def test_messages_that_come_at_once_are_for_all_that_wait(broker: Broker) -> None:
    with receives(broker, WAITING, limit=1) as waiting:
        broker.send("t", messages(WAITING))

        found = [one.result(60)["queue_offset"].to_pylist() for one in waiting]

    assert sorted(offset for some in found for offset in some) == list(range(WAITING))


@pytest.mark.parametrize("what", ["topic", "group"])
def test_who_waits_is_given_what_comes_after_it_was_made_again(broker: Broker, what: str) -> None:
    """In one frame, so that nobody looks between the two."""
    with receives(broker, 1) as (waiting,):
        broker.engine.writer.submit_together(AGAIN[what])
        broker.subscribe("g", "t")
        broker.send("t", messages(1))

        assert waiting.result(60)["body"].to_pylist() == [b"0"]


def test_a_topic_made_again_before_a_receive_is_in_its_line_wakes_it(
    broker: Broker, looks: list[Receive], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Wakeups.put
    late = iter([True])

    def put_late(wakeups: Wakeups, waiter: Waiter) -> int | None:
        if next(late, False):
            broker.engine.writer.submit_together(AGAIN["topic"])
        return put(wakeups, waiter)

    monkeypatch.setattr(Wakeups, "put", put_late)
    with receives(broker, 1) as (waiting,):
        until(lambda: len(looks) == 1)
        broker.send("t", messages(1))

        assert waiting.result(10)["body"].to_pylist() == [b"0"]


def test_a_topic_made_again_before_a_pull_waits_for_it_wakes_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = Wakeups.version
    asked: list[int] = []

    def late(wakeups: Wakeups, topic_id: int) -> int:
        if not asked:
            broker.engine.writer.submit_together(AGAIN["topic"])
        asked.append(topic_id)
        return version(wakeups, topic_id)

    monkeypatch.setattr(Wakeups, "version", late)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broker.pull, "t", {0: 0}, wait_ms=LONG_MS)
        try:
            until(lambda: len(asked) == 2)
            broker.send("t", messages(1))

            assert waiting.result(10).messages["body"].to_pylist() == [b"0"]
        finally:
            broker.engine.wakeups.close()


def test_one_of_each_group_is_woken(broker: Broker) -> None:
    broker.create_group("g2")
    with receives(broker, 2) as ours, receives(broker, 2, group="g2") as theirs:
        broker.send("t", messages(1))

        until(lambda: [sum(one.done() for one in some) for some in (ours, theirs)] == [1, 1])


def test_what_lies_in_a_locked_queue_reaches_the_client_that_has_it(broker: Broker) -> None:
    broker.lock_queues("g", "t", queue_ids=[0], client_id="owner", duration_ms=LONG_MS)
    with (
        receives(broker, 3, client_id="other"),
        receives(broker, 1, client_id="owner") as waiting,
    ):
        broker.send("t", messages(1))

        assert len(waiting[0].result(60)) == 1


def test_a_receive_that_is_refused_leaves_its_wakeup_to_the_next(broker: Broker) -> None:
    window = broker.open_window("consumer/g", owner="first", duration_ms=LONG_MS)["epoch"]
    with (
        receives(broker, 1, window=("consumer/g", window)) as fenced,
        receives(broker, 1) as waiting,
    ):
        broker.close_window("consumer/g", epoch=window)
        broker.open_window("consumer/g", owner="second", duration_ms=LONG_MS)
        broker.send("t", messages(1))

        with pytest.raises(errors.FencedError):
            fenced[0].result(60)
        assert len(waiting[0].result(60)) == 1


def test_a_delivery_that_ends_is_given_to_a_receive_that_waits(
    broker: Broker, looks: list[Receive]
) -> None:
    clock = broker.engine.clock
    assert isinstance(clock, ManualClock)
    with receives(broker, 3, limit=5, invisible_duration_ms=5_000) as waiting:
        until(lambda: len(looks) == 3)
        broker.send("t", messages(1))
        until(lambda: len(looks) == 3 + 2)

        clock.advance(5_000)

        until(lambda: sum(one.done() for one in waiting) == 2)
        given = [one.result() for one in waiting if one.done()]
    attempts = [attempt for some in given for attempt in some["delivery_attempt"].to_pylist()]
    assert sorted(attempts) == [1, 2]


def test_what_a_rate_limit_holds_back_is_given_to_a_receive_that_waits(
    broker: Broker, looks: list[Receive]
) -> None:
    clock = broker.engine.clock
    assert isinstance(clock, ManualClock)
    broker.create_group("paced", max_rate_per_s=2)
    with receives(broker, 2, group="paced", limit=8) as waiting:
        until(lambda: len(looks) == 2)
        broker.send("t", messages(4))
        until(lambda: len(looks) == 2 + 2)

        clock.advance(1_000)

        given = [one.result(60) for one in waiting]
    assert all(len(some) for some in given)


def test_a_caller_that_has_gone_is_given_nothing(broker: Broker) -> None:
    gone: list[bool] = []

    def watched() -> pa.Table:
        with watching(lambda: bool(gone)):
            return broker.receive("g", "t", wait_ms=LONG_MS)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(watched)
        until(lambda: len(broker.engine.wakeups) == 1)
        gone.append(True)
        broker.send("t", messages(1))

        assert len(asked.result(60)) == 0
    assert len(broker.receive("g", "t")) == 1


@pytest.mark.parametrize(
    "verb", ["check_transactions", "deliver_scheduled", "fetch_checks", "revive"]
)
def test_a_verb_of_upkeep_ends_once_its_caller_has_gone(broker: Broker, verb: str) -> None:
    clock = broker.engine.clock
    assert isinstance(clock, ManualClock)
    gone = threading.Event()

    def watched() -> object:
        with watching(gone.is_set):
            return getattr(broker, verb)(wait_ms=LONG_MS)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(watched)
        until(lambda: bool(clock._waiting))
        gone.set()
        try:
            for _ in range(LONG_MS // LOOK_MS // 2):  # it ends at its first look after that
                clock.advance(LOOK_MS)
                if wait([asked], 1).done:
                    break
            assert asked.done()
            assert asked.result() is not None
        finally:
            broker.engine.wakeups.close()


def test_lines_are_forgotten_with_those_who_stood_in_them(broker: Broker) -> None:
    lines: Wakeups = broker.engine.wakeups

    assert len(broker.receive("g", "t")) == 0
    with receives(broker, 2) as waiting:
        broker.send("t", messages(64))
        broker.send("t", messages(64))
        assert all(len(one.result(60)) for one in waiting)

    assert len(lines) == 0


def test_a_deleted_topic_is_forgotten(broker: Broker) -> None:
    wakeups: Wakeups = broker.engine.wakeups
    broker.create_topic("deleted", queues=1)
    broker.create_topic("unread", queues=1)
    before = set(wakeups._topics)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broker.pull, "deleted", {0: 0}, wait_ms=LONG_MS)
        until(lambda: len(wakeups._topics) > len(before))
        broker.send("unread", messages(1))

        broker.delete_topic("deleted")

        with pytest.raises(errors.TopicNotFoundError):
            waiting.result(60)
    broker.delete_topic("unread")
    assert set(wakeups._topics) == before
