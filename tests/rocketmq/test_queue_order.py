"""Order by queue at this endpoint: attempts whose answers got lost, and clients that have gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rocketmq.consuming import EMPTY, Stand
from tests.waiting import until


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    yield stand
    stand.close()


@pytest.fixture
def line(stand: Stand) -> Stand:
    """A topic of one queue, and a group that keeps it in order."""
    stand.broker.create_topic("t", queues=1)
    stand.broker.create_group("g", order="queue")
    return stand


def test_the_later_call_of_an_attempt_keeps_what_it_was_given(line: Stand) -> None:
    one = line.consumer("one")
    cut_off = one.call("t", "g", attempt_id="x", batch=2, wait_ms=20_000)
    until(lambda: line.waiting() == 1)
    later = one.begin("t", "g", attempt_id="x", batch=2)
    cut_off.cancel()

    line.send("t", b"0", b"1", b"2")

    got = later.result(60)
    until(lambda: line.waiting() == 0)
    assert (got.bodies, got.attempts) == ([b"0", b"1"], [1, 1])
    assert line.consumer("two").receive("t", "g").code == EMPTY
    one.ack("t", "g", got.handles)
    assert one.receive("t", "g").bodies == [b"2"]


def test_the_later_call_of_an_attempt_hears_of_what_comes_beside_one_nobody_cut_off(
    line: Stand,
) -> None:
    one = line.consumer("one")
    earlier = one.begin("t", "g", attempt_id="x")
    later = one.begin("t", "g", attempt_id="x")

    line.send("t", b"0")

    assert later.result(60).bodies == [b"0"]
    assert earlier.result(60).code == EMPTY


def test_a_call_that_waits_for_its_group_is_the_earlier_one_still(
    line: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, groups = line.consumer("one"), line.context.groups
    ensure, begun, go_on = groups.ensure, threading.Event(), asyncio.Event()

    async def ensure_slowly(*args: Any) -> None:
        if not begun.is_set():
            begun.set()
            await go_on.wait()
        await ensure(*args)

    monkeypatch.setattr(groups, "ensure", ensure_slowly)
    earlier = line.pool.submit(one.receive, "t", "g", attempt_id="x")
    assert begun.wait(60)
    line.send("t", b"0")
    got = one.receive("t", "g", attempt_id="x")

    line.context.bridge.call_soon(go_on.set)

    assert earlier.result(60).code == EMPTY
    assert got.bodies == [b"0"]
    one.ack("t", "g", got.handles)


def test_an_attempt_of_another_client_is_another_one(line: Stand) -> None:
    line.send("t", b"0", b"1")
    got = line.consumer("one").receive("t", "g", attempt_id="x", batch=1)

    other = line.consumer("two").receive("t", "g", attempt_id="x")

    assert got.bodies == [b"0"]
    assert other.code == EMPTY


def test_the_batch_of_a_client_that_has_gone_comes_to_the_next_one(line: Stand) -> None:
    line.send("t", b"0", b"1", b"2")
    one, two = line.consumer("one"), line.consumer("two")
    one.heartbeat()
    assert one.receive("t", "g", batch=2, renewed=True).bodies == [b"0", b"1"]
    waiting = two.begin("t", "g")

    one.terminate()

    def is_heard() -> bool:
        line.clock.advance(1)
        return waiting.done()

    until(is_heard)
    got = waiting.result(60)
    assert (got.bodies, got.attempts) == ([b"0", b"1", b"2"], [2, 2, 1])
