"""Calls of a listener, and who is told of them (semantics §6.8)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rmq_pipeline.consumer.listener import (
    ALL,
    Answer,
    Call,
    Calling,
    ConcurrentContext,
    Hook,
    Hooks,
    Result,
    Status,
)
from tests.consumer.pieces import QUEUE, Work, held_queue, received

CONTEXT = ConcurrentContext(QUEUE)


def call(
    listener: Work,
    *hooks: Hook,
    timeout_ms: int = 60_000,
    n: int = 1,
    context: ConcurrentContext = CONTEXT,
) -> Answer:
    calling = Calling(
        listener, group="g", hooks=Hooks(hooks), failed=Result.LATER, timeout_ms=timeout_ms
    )
    return calling(received(held_queue(), range(7, 7 + n)), context)


class Odd:
    """Like a table: whether it is equal to something, it cannot say; nor what it is."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("the truth of a table is ambiguous")

    def __repr__(self) -> str:
        raise OSError("the table is closed")


class Seen:
    """A hook that remembers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def before(self, call: Call) -> None:
        self.calls.append(call)

    def after(self, call: Call) -> None:
        self.calls.append(call)


class Broken:
    """A hook that fails."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def before(self, call: Call) -> None:
        raise self._error(f"before {call.group}")

    def after(self, call: Call) -> None:
        raise self._error(f"after {call.group}")


@pytest.mark.parametrize(
    ("said", "result", "status"),
    [
        (Result.SUCCESS, Result.SUCCESS, Status.SUCCESS),
        ("success", Result.SUCCESS, Status.SUCCESS),
        (Result.LATER, Result.LATER, Status.FAILED),
        ("reconsume_later", Result.LATER, Status.FAILED),
        ("suspend", Result.SUSPEND, Status.FAILED),
        ("commit", Result.COMMIT, Status.SUCCESS),
        ("rollback", Result.ROLLBACK, Status.FAILED),
        (None, Result.LATER, Status.RETURNED_NONE),
    ],
)
def test_what_a_listener_returns_is_understood(said: Any, result: Result, status: Status) -> None:
    answer = call(lambda *_: said)

    assert (answer.result, answer.status) == (result, status)


def test_an_exception_is_a_failure_with_its_reason() -> None:
    def listener(_messages: Any, _context: Any) -> Any:
        raise KeyError("gate 7")

    answer = call(listener)

    assert (answer.result, answer.status) == (Result.LATER, Status.EXCEPTION)
    assert (answer.reason, answer.error_type) == ("'gate 7'", "KeyError")


def test_an_exception_without_a_text_has_its_name_for_a_reason() -> None:
    def listener(_messages: Any, _context: Any) -> Any:
        raise ValueError

    assert call(listener).reason == "ValueError"


def test_something_else_is_a_failure_that_says_what_may_be_returned() -> None:
    answer = call(lambda *_: True)

    assert (answer.result, answer.status) == (Result.LATER, Status.EXCEPTION)
    assert "the listener returned True: return one of success, reconsume_later" in answer.reason


def test_something_that_cannot_be_compared_is_a_failure_like_any_other() -> None:
    answer = call(lambda *_: Odd())

    assert (answer.result, answer.status) == (Result.LATER, Status.EXCEPTION)
    assert "the listener returned a value of type Odd: return one of success" in answer.reason


def test_a_setting_that_cannot_be_compared_is_a_failure_and_taken_back() -> None:
    context = ConcurrentContext(QUEUE)

    def listener(_messages: Any, context: Any) -> str:
        context.ack_index = Odd()
        return "success"

    answer = call(listener, context=context)

    assert (answer.result, answer.status) == (Result.LATER, Status.EXCEPTION)
    assert answer.reason == (
        "the listener set ack_index to a value of type Odd: set a whole number"
    )
    assert context.ack_index == ALL


def test_a_call_that_takes_too_long_is_timed_out_whatever_it_says() -> None:
    answer = call(lambda *_: "success", timeout_ms=0)

    assert answer.status is Status.TIME_OUT


def test_a_failure_is_logged_with_topic_queue_offset_and_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def listener(_messages: Any, _context: Any) -> Any:
        raise ValueError("gate 7 is shut")

    with caplog.at_level(logging.WARNING):
        call(listener, n=2)

    (record,) = [each for each in caplog.records if each.name == Calling.__module__]
    assert record.getMessage() == (
        "listener of group g: exception, topic flights, queue 0, offset 7 (2 messages), attempt 1:"
        " gate 7 is shut"
    )
    assert record.exc_info is not None


def test_hooks_are_told_before_and_after() -> None:
    seen = Seen()

    call(lambda *_: "reconsume_later", seen, n=2)

    before, after = seen.calls
    assert (before.group, before.queue, len(before.messages)) == ("g", QUEUE, 2)
    assert (before.status, after.status, after.succeeded) == (None, Status.FAILED, False)
    assert after.took_ms > 0


def test_hooks_hear_of_exceptions() -> None:
    seen = Seen()

    def listener(_messages: Any, _context: Any) -> Any:
        raise ValueError("no")

    call(listener, seen)

    assert seen.calls[1].status is Status.EXCEPTION
    assert isinstance(seen.calls[1].error, ValueError)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError])
def test_a_hook_that_raises_is_logged_and_stops_nothing(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()

    answer = call(lambda *_: "success", Broken(error), seen)

    assert answer.status is Status.SUCCESS
    assert len(seen.calls) == 2
    assert [r.getMessage() for r in caplog.records if "of group g failed" in r.getMessage()] != []
