"""Long polls that are cut off, or over, while they owe others a look: the others are woken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker.decide.settle_each import Renew
from rmq_pipeline.broker.work import receive
from rmq_pipeline.broker.work.receive import load_missing
from rmq_pipeline.rocketmq.leases import LEASE_MS
from tests.rocketmq.consuming import EMPTY, Stand
from tests.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=1)
    yield stand
    stand.close()


class Gate:
    """Stops a function once it is armed, until it is opened."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(30)
        return self._function(*args, **kwargs)


def test_a_poll_that_is_cut_off_while_it_looks_wakes_another(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stand.consumer("one"), stand.consumer("other")
    cut_off = one.call("t", "g", sql="a = 'b'", wait_ms=20_000)
    until(lambda: stand.waiting() == 1)
    poll = other.begin("t", "g", sql="a = 'b'")
    gate = Gate(load_missing)
    monkeypatch.setattr(receive, "load_missing", gate)
    stand.send("t", b"1", properties=[[("a", "b")]])
    assert gate.reached.wait(30)

    cut_off.cancel()
    until(lambda: stand.endpoint._service._streams == 1)
    gate.opened.set()

    assert poll.result(60).bodies == [b"1"]


@pytest.mark.parametrize("leaves", ["cut off", "over"])
def test_a_poll_that_knows_when_a_lease_ends_wakes_another_when_it_leaves(
    stand: Stand, leaves: str
) -> None:
    one, other, third = (stand.consumer(name) for name in ("one", "other", "third"))
    first = one.begin("t", "g", invisible_ms=10_000)
    leaving = other.call("t", "g", wait_ms=20_000 if leaves == "cut off" else 5_000)
    until(lambda: stand.waiting() == 2)
    poll = third.begin("t", "g")
    stand.send("t", b"1")
    assert first.result(60).bodies == [b"1"]  # and is heard of no more
    until(lambda: stand.waiting() == 2)

    if leaves == "cut off":
        leaving.cancel()
        until(lambda: stand.waiting() == 1)
        stand.clock.advance(10_001)
    else:
        stand.clock.advance(5_000)
        assert next(leaving).status.code == EMPTY
        until(lambda: stand.waiting() == 1)
        stand.clock.advance(5_001)

    # It has 10 s left of its own.
    assert poll.result(60).bodies == [b"1"]


def test_a_repeated_attempt_that_is_cut_off_gives_its_messages_back(stand: Stand) -> None:
    one, other = stand.consumer("one"), stand.consumer("other")
    stand.send("t", b"1")
    # Its answer is lost on its way.
    assert one.receive("t", "g", attempt_id="x", renewed=True).bodies == [b"1"]
    writer = stand.broker.engine.writer
    write = writer._write
    gate = Gate(write)
    writer._write = lambda frame: (  # type: ignore[method-assign]
        gate if any(isinstance(p.request, Renew) for p in frame.pending) else write
    )(frame)
    again = one.call("t", "g", attempt_id="x", renewed=True)
    assert gate.reached.wait(30)

    again.cancel()
    until(lambda: stand.endpoint._service._streams == 0)
    gate.opened.set()

    until(lambda: not len(stand.context.leases))
    stand.pass_time(2 * LEASE_MS, one)
    assert other.receive("t", "g", renewed=True).bodies == [b"1"]
