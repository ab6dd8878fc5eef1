"""Small sends of many callers share a table and a frame, and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.publish import Send
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.rocketmq.decoding import Batch
from rmq_pipeline.rocketmq.sending import SMALL_ROWS, Coalescing, Outcome
from rmq_pipeline.settings import Settings
from tests.conformance import raw


class Counting(Bridge):
    """A bridge that remembers how many rows each send had."""

    rows: list[int]
    began: asyncio.Event

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        assert isinstance(request, Send)
        self.rows.append(len(request))
        self.began.set()
        broken = b"broken" in request.columns["body"].to_pylist()
        return super().submit(Broken() if broken else request)


class Broken(Request):
    """A request that fails in the writer with an unexpected error."""

    def decide(self, *_: object, **__: object) -> Decision:
        raise ZeroDivisionError


Sending = Callable[[Coalescing], Awaitable[list[Any]]]


@pytest.fixture
def sends(tmp_path: Path) -> Callable[[Sending], tuple[list[Any], list[int], Broker]]:
    """Runs a scenario; its answers, and the rows of each send that was made of it."""
    small = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)

    def run(scenario: Sending) -> tuple[list[Any], list[int], Broker]:
        broker = Broker.open(tmp_path / "home", upkeep="none", settings=small)
        for topic in ("t", "u"):
            broker.ensure_topic(topic, queues=1)

        async def go() -> tuple[list[Any], list[int]]:
            bridge = Counting(broker.engine, asyncio.get_running_loop())
            bridge.rows, bridge.began = [], asyncio.Event()
            answers = await scenario(Coalescing(bridge))
            bridge.close()
            return answers, bridge.rows

        answers, rows = asyncio.run(go())
        return answers, rows, broker

    return run


def batch(*bodies: bytes, **properties: Any) -> Batch:
    return Batch.of(
        [raw.message("t", body, message_id=body.decode(), **properties) for body in bodies]
    )


def stored(broker: Broker, topic: str = "t") -> list[bytes]:
    found: list[bytes] = broker.read(topic, 0, offset=0, limit=100).column("body").to_pylist()
    broker.close()
    return found


def test_sends_that_come_together_are_one(sends: Any) -> None:
    names = [f"{n}" for n in range(40)]

    answers, rows, broker = sends(
        lambda c: asyncio.gather(*(c.send("t", batch(name.encode())) for name in names))
    )

    assert rows == [40]
    assert [answer.message_id for answer in answers] == [[name] for name in names]
    assert [answer.queue_offset for answer in answers] == [[n] for n in range(40)]
    assert stored(broker) == [name.encode() for name in names]


def test_what_comes_during_a_send_shares_the_next(sends: Any) -> None:
    async def scenario(coalescing: Coalescing) -> list[Outcome]:
        first = asyncio.create_task(coalescing.send("t", batch(b"first")))
        bridge = coalescing._bridge
        assert isinstance(bridge, Counting)
        turns = bridge.engine.writer._turns
        turns.take(bulk=False)  # nothing is stored meanwhile
        try:
            await bridge.began.wait()
            others = [
                asyncio.create_task(coalescing.send("t", batch(str(n).encode()))) for n in range(5)
            ]
            await asyncio.sleep(0)  # each begins
            assert (bridge.rows, len(coalescing._waiting["t"])) == ([1], 5)
        finally:
            turns.decided()
            turns.written()
        return [await first, *await asyncio.gather(*others)]

    answers, rows, broker = sends(scenario)

    assert rows == [1, 5]
    assert [answer.queue_offset[0] for answer in answers] == list(range(6))
    assert stored(broker)[0] == b"first"


def test_one_that_is_refused_does_not_harm_the_others(sends: Any) -> None:
    requests = [batch(b"a", b"b"), batch(b"bad", tag="with|bar"), batch(b"c")]

    answers, rows, broker = sends(
        lambda c: asyncio.gather(*(c.send("t", one) for one in requests), return_exceptions=True)
    )

    assert rows == [2, 1]
    assert answers[0].message_id == ["a", "b"]
    assert isinstance(answers[1], errors.IllegalMessageTagError)
    assert answers[2].message_id == ["c"]
    assert stored(broker) == [b"a", b"b", b"c"]


def test_an_unexpected_error_is_the_answer_to_one_request_only(sends: Any) -> None:
    requests = [batch(b"a", b"b"), batch(b"broken"), batch(b"c")]

    answers, rows, broker = sends(
        lambda c: asyncio.gather(*(c.send("t", one) for one in requests), return_exceptions=True)
    )

    assert rows == [4, 2, 1, 1]
    assert answers[0].message_id == ["a", "b"]
    assert isinstance(answers[1], ZeroDivisionError)
    assert answers[2].message_id == ["c"]
    assert stored(broker) == [b"a", b"b", b"c"]


def test_a_request_is_stored_whole_or_not_at_all(sends: Any) -> None:
    half_bad = Batch.of([raw.message("t", b"good"), raw.message("t", b"bad", keys=[" "])])

    answers, _, broker = sends(
        lambda c: asyncio.gather(
            c.send("t", half_bad), c.send("t", batch(b"other")), return_exceptions=True
        )
    )

    assert isinstance(answers[0], errors.IllegalMessageKeyError)
    assert stored(broker) == [b"other"]


def test_a_large_request_is_a_send_of_its_own(sends: Any) -> None:
    many = [str(n).encode() for n in range(SMALL_ROWS + 1)]

    _, rows, broker = sends(
        lambda c: asyncio.gather(c.send("t", batch(b"small")), c.send("t", batch(*many)))
    )

    assert sorted(rows) == [1, SMALL_ROWS + 1]
    assert sorted(stored(broker)) == sorted([b"small", *many])


def test_topics_do_not_share(sends: Any) -> None:
    answers, rows, broker = sends(
        lambda c: asyncio.gather(
            c.send("t", batch(b"1")),
            c.send("u", batch(b"2")),
            c.send("nowhere", batch(b"3")),
            return_exceptions=True,
        )
    )

    assert rows == [1, 1]
    assert isinstance(answers[2], errors.TopicNotFoundError)
    assert stored(broker, "u") == [b"2"]


def test_a_caller_that_goes_leaves_the_others_alone(sends: Any) -> None:
    async def scenario(coalescing: Coalescing) -> list[Any]:
        gone = asyncio.create_task(coalescing.send("t", batch(b"gone")))
        stays = asyncio.create_task(coalescing.send("t", batch(b"stays")))
        await asyncio.sleep(0)
        gone.cancel()
        return list(await asyncio.gather(gone, stays, return_exceptions=True))

    answers, _, broker = sends(scenario)

    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1].message_id == ["stays"]
    # It may be stored: its caller has not heard that it was not.
    assert b"stays" in stored(broker)
