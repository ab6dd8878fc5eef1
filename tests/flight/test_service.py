"""The threads of calls: as many as there are calls, and no longer than there are. And refusals."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rmq_pipeline import errors
from rmq_pipeline.flight import service
from rmq_pipeline.flight.sql_endpoint import SqlEndpoint
from rmq_pipeline.flight.threads import Threads
from rmq_pipeline.limits import FlightLimits
from tests.flight.exchange import refusal
from tests.waiting import until


@pytest.mark.parametrize("text", ["x", "%", "é", "😀", "\0"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_refusal_before_the_end_of_a_call_fits_into_its_status(text: str, size: int) -> None:
    named = text * size

    def refuse(_: service.Call) -> Iterator[bytes]:
        error = errors.TopicNotFoundError(named, remedy=named)
        error.more = named  # type: ignore[attr-defined]
        raise error

    sql = SqlEndpoint(cast(Any, None), service.Room(FlightLimits()), silent_s=1)
    served = service.Service(
        "127.0.0.1:0",
        exchange=refuse,
        sign_in=lambda _: "",
        sql=sql,
        announce=lambda _: b"",
        certificate=None,
    )
    try:
        found = refusal(f"127.0.0.1:{served.port}", b"{}", [("messages", bytes(8 << 20))])
    finally:
        served.shutdown()

    assert isinstance(found, errors.TopicNotFoundError)
    assert named.startswith(found.message)
    assert len(found.message) >= min(size, 50)


def test_calls_have_a_thread_each_which_ends_when_it_is_idle() -> None:
    threads, together = Threads(idle_s=0.05), threading.Barrier(20)
    used: set[threading.Thread] = set()

    def task() -> int:
        used.add(threading.current_thread())
        return together.wait(20)

    for _ in range(3):
        found = [threads.submit(task) for _ in range(20)]
        assert sorted(future.result(20) for future in found) == list(range(20))

    threads.wait(20)
    assert len(used) >= 20
    until(lambda: not any(thread.is_alive() for thread in used))
    assert threads.submit(lambda: 7).result(20) == 7


def test_a_task_that_fails_tells_its_future() -> None:
    threads = Threads()

    assert isinstance(threads.submit(lambda: 1 // 0).exception(20), ZeroDivisionError)
    assert threads.submit(lambda: 7).result(20) == 7


def test_a_thread_that_does_not_start_raises_nothing_and_loses_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        waiting = threads.submit(lambda: 7)
    following = threads.submit(lambda: 8)

    assert (waiting.result(20), following.result(20)) == (7, 8)
    threads.wait(20)
    assert threads.submit(lambda: 9).result(20) == 9
