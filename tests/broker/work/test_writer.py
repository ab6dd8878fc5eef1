"""A frame is decided while the one before it is written: nobody hears of it too early."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.publish import Send
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import StorageError, TopicNotFoundError
from rmq_pipeline.settings import Settings
from tests.broker.held import BULK, WITHIN_S, Held
from tests.broker.sealed_home import MIB, messages
from tests.conftest import Eventually


@dataclass(frozen=True, slots=True)
class Noted(Request):
    """A request that tells when it is decided."""

    inner: Request
    decided: Event

    def is_bulk(self) -> bool:
        return True

    def decide(self, state: State, now_ms: int) -> Decision:
        self.decided.set()
        return self.inner.decide(state, now_ms)


@dataclass(frozen=True, slots=True)
class Unstageable(Request):
    """A request whose rows no frame takes."""

    inner: Send

    def is_bulk(self) -> bool:
        return True

    def decide(self, state: State, now_ms: int) -> Decision:
        decision = self.inner.decide(state, now_ms)
        decision.keyed_state.append(pa.table({"n": [1]}))
        return decision


def one_after_the_other(
    held: Held, pool: ThreadPoolExecutor, second: Callable[[], Any]
) -> tuple[Future[Any], Future[Any]]:
    """A bulk send that is held, and what then is decided beside it."""
    first = pool.submit(held.broker.send, "t", messages(BULK))
    assert held.held.wait(WITHIN_S)
    return first, pool.submit(second)


def test_nobody_hears_of_a_frame_before_the_one_before_it_is_on_disk(
    held: Held, pool: ThreadPoolExecutor
) -> None:
    end = held.engine.log.end
    held.arm()
    first, second = one_after_the_other(
        held, pool, lambda: held.broker.send("t", messages(BULK, start=BULK))
    )
    assert held.followed.wait(WITHIN_S)

    assert held.engine.log.end == end
    assert held.broker.sql("SELECT * FROM messages").num_rows == 0
    assert not first.done()
    assert not second.done()
    held.let_go.set()

    assert first.result()["queue_offset"].to_pylist() == list(range(BULK))
    assert second.result()["queue_offset"].to_pylist() == list(range(BULK, 2 * BULK))
    assert held.bodies() == messages(2 * BULK)["body"].to_pylist()


class Overlapping(Held):
    """A broker whose next frame is decided when it is let go, and written beside the one after."""

    def step(self, name: str) -> None:
        if self.at and name == "staged" and not self.held.is_set():
            self.held.set()
            assert self.let_go.wait(WITHIN_S)
        elif self.at and name == "staged":
            self.followed.set()
        elif self.at and name == "before_write":
            assert self.followed.wait(WITHIN_S), "the next one is not decided meanwhile"


def test_what_has_queued_up_is_decided_while_the_frame_before_it_is_written(
    home: Path, pool: ThreadPoolExecutor, eventually: Eventually
) -> None:
    held = Overlapping(home)
    held.arm()
    writer = held.engine.writer
    sends = [held.prepared(messages(BULK, start=start)) for start in (0, BULK)]
    first = pool.submit(writer.submit_together, sends[:1])
    assert held.held.wait(WITHIN_S)
    second = pool.submit(writer.submit_together, sends[1:])
    eventually(lambda: not writer._queue.empty())
    held.let_go.set()

    assert first.result()[0].queue_offset.tolist() == list(range(BULK))
    assert second.result()[0].queue_offset.tolist() == list(range(BULK, 2 * BULK))
    held.broker.close()


@pytest.mark.parametrize(
    ("step", "stored"), [("before_write", 0), ("half_written", 0), ("written", BULK)]
)
def test_a_failed_write_fails_what_was_decided_after_it(
    held: Held, pool: ThreadPoolExecutor, step: str, stored: int
) -> None:
    held.arm(step, error="the disk fails")
    first, second = one_after_the_other(
        held, pool, lambda: held.broker.send("t", messages(BULK, start=BULK))
    )
    assert held.followed.wait(WITHIN_S)
    held.let_go.set()

    for answer in (first, second):
        with pytest.raises(StorageError):
            answer.result()
    assert held.bodies() == messages(stored)["body"].to_pylist()
    sent = held.broker.send("t", messages(2, start=stored))
    assert sent["queue_offset"].to_pylist() == [stored, stored + 1]
    assert held.bodies() == messages(stored + 2)["body"].to_pylist()


def test_an_answer_that_stores_nothing_fails_with_what_it_is_based_on(
    held: Held, pool: ThreadPoolExecutor
) -> None:
    held.broker.create_topic("once", queues=1, deduplicate="message_id")
    table = messages(BULK, message_id=[f"m{i}" for i in range(BULK)])
    decided = Event()
    held.arm(error="the disk fails")
    first = pool.submit(held.broker.send, "once", table)
    assert held.held.wait(WITHIN_S)
    again = Noted(held.prepared(table, "once"), decided)
    second = pool.submit(held.engine.submit, again)
    assert decided.wait(WITHIN_S)
    held.let_go.set()

    for answer in (first, second):
        with pytest.raises(StorageError):
            answer.result()
    sent = held.broker.send("once", table)
    assert sent["duplicate"].to_pylist() == [False] * BULK


@pytest.mark.parametrize("error", ["", "the disk fails"])
def test_a_new_log_file_waits_for_the_frames_before_it(
    held: Held, pool: ThreadPoolExecutor, error: str
) -> None:
    half = messages(BULK, body_bytes=1800)
    held.broker.send("t", messages(10))
    del held.steps[:]
    held.arm(error=error)
    first = pool.submit(held.broker.send, "t", half)
    assert held.held.wait(WITHIN_S)
    decided = Event()
    second = pool.submit(held.engine.submit, Noted(held.prepared(half), decided))
    assert decided.wait(WITHIN_S)
    assert "before_roll" not in held.steps
    held.let_go.set()

    if error:
        for answer in (first, second):
            with pytest.raises(StorageError):
                answer.result()
    else:
        assert first.result().num_rows == len(second.result().table()) == BULK
        assert held.steps.index("written") < held.steps.index("before_roll")
    kept = 10 + (0 if error else 2 * BULK)
    assert len(held.bodies()) == kept
    assert held.broker.send("t", half)["queue_offset"][0].as_py() == kept


def test_a_frame_that_cannot_be_staged_takes_none_before_it_along(
    held: Held, pool: ThreadPoolExecutor
) -> None:
    held.arm()
    spoiling = Unstageable(held.prepared(messages(5)))
    first, second = one_after_the_other(held, pool, lambda: held.engine.submit(spoiling))
    held.let_go.set()

    assert first.result().num_rows == BULK
    with pytest.raises(StorageError):
        second.result()
    assert held.bodies() == messages(BULK)["body"].to_pylist()
    assert held.broker.send("t", messages(1))["queue_offset"].to_pylist() == [BULK]


def test_a_posted_request_is_answered_once_it_is_on_disk(held: Held) -> None:
    answers: list[tuple[Any, BaseException | None]] = []
    told = Event()

    def done(answer: Any, error: BaseException | None) -> None:
        answers.append((answer, error))
        told.set()

    held.arm()
    held.engine.post(held.prepared(messages(1)), done)
    assert held.held.wait(WITHIN_S)
    assert not answers

    held.let_go.set()
    assert told.wait(WITHIN_S)
    assert answers[0][1] is None
    assert answers[0][0].queue_offset.tolist() == [0]
    assert held.bodies() == [b"0:"]


def test_a_posted_request_that_is_refused_is_told_why(held: Held) -> None:
    errors: list[BaseException | None] = []
    told = Event()

    def done(_: Any, error: BaseException | None) -> None:
        errors.append(error)
        told.set()

    prepared = held.prepared(messages(1))
    held.broker.delete_topic("t")
    held.engine.post(prepared, done)

    assert told.wait(WITHIN_S)
    assert isinstance(errors[0], TopicNotFoundError)


def test_who_cannot_hear_an_answer_harms_nobody(held: Held) -> None:
    def deaf(*_: object) -> None:
        raise ValueError("nobody is here")

    held.engine.post(held.prepared(messages(1)), deaf)
    held.broker.send("t", messages(1, start=1))

    assert held.bodies() == [b"0:", b"1:"]


def test_closing_answers_what_is_decided(held: Held, pool: ThreadPoolExecutor) -> None:
    held.arm()
    first, second = one_after_the_other(held, pool, lambda: held.broker.send("t", messages(BULK)))
    assert held.followed.wait(WITHIN_S)
    closing = pool.submit(held.broker.close)
    held.let_go.set()

    closing.result()
    assert first.result().num_rows == second.result().num_rows == BULK
    with pytest.raises(StorageError):
        held.broker.send("t", messages(1))


def test_a_request_that_came_in_before_the_end_is_answered(
    held: Held, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, told = held.engine.writer, Event()
    check, closing = writer._check_open, []

    def check_then_close() -> None:
        check()
        closing.append(pool.submit(writer.close))
        assert wait(closing, timeout=0.2).not_done, "it is closed with somebody on the way in"

    monkeypatch.setattr(writer, "_check_open", check_then_close)
    held.engine.post(held.prepared(messages(1)), lambda *_: told.set())

    closing[0].result(WITHIN_S)
    assert told.wait(WITHIN_S)
    monkeypatch.undo()
    with pytest.raises(StorageError):
        held.engine.post(held.prepared(messages(1)), lambda *_: None)


def test_who_cannot_hear_a_bell_harms_nobody(held: Held, pool: ThreadPoolExecutor) -> None:
    def deaf(_: object) -> None:
        raise ValueError("nobody is here")

    end = held.engine.wakeups.listen(deaf)
    for start in range(3):
        sent = pool.submit(held.engine.writer.submit_together, [held.prepared(messages(1))])
        assert sent.result(WITHIN_S)[0].queue_offset.tolist() == [start]
    end()


class Unreadable(Engine):
    """An engine that finds nothing any more when it looks at its disk again."""

    def _rebuild(self) -> Any:
        raise OSError("the disk is gone")


def test_what_cannot_be_rebuilt_takes_nothing_more(home: Path, pool: ThreadPoolExecutor) -> None:
    held = Held(home, engine=Unreadable)
    held.arm(error="the disk fails")
    first, second = one_after_the_other(held, pool, lambda: held.broker.send("t", messages(BULK)))
    assert held.followed.wait(WITHIN_S)
    held.let_go.set()

    for answer in (first, second):
        with pytest.raises(StorageError):
            answer.result()
    with pytest.raises(StorageError, match="store has failed"):
        held.broker.send("t", messages(1))
    held.broker.close()


@pytest.mark.parametrize("rows", [1, 250, 50_000])
def test_a_frame_is_counted_as_large_as_it_is(home: Path, rows: int) -> None:
    # Columns without values share their buffers, which the frame has for each of them.
    with Broker.open(
        home, upkeep="none", settings=Settings(log_file_bytes=MIB, reserve_bytes=MIB)
    ) as broker:
        broker.create_topic("t", queues=1)
        table = pa.table({"body": [os.urandom(5_000_000 // rows // 4)] * rows})
        for _ in range(3):
            broker.send("t", table)

        broker.engine.dispatched()

        assert broker.read("t", 0, offset=0, limit=3 * rows).num_rows == 3 * rows


@pytest.mark.parametrize("frames", [1, 2])
def test_the_writer_keeps_nothing_of_the_last_frames_it_wrote(
    held: Held, eventually: Eventually, frames: int
) -> None:
    body, before = os.urandom(MIB), pa.total_allocated_bytes()
    # More than one frame takes, so that the second thread writes the first of two.
    table = pa.table({"body": pa.array([body] * 17, pa.binary())})
    sends = [held.prepared(table) for _ in range(frames)]

    held.engine.writer.submit_together(sends)
    del table, sends

    eventually(lambda: pa.total_allocated_bytes() - before < MIB)
