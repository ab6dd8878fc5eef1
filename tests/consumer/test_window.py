"""Windows on threads: which calls are made side by side, and what they leave.

What windows of either engine promise is in tests/spark/test_window.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import FIRST_ROWS, ThreadEngine, run_window
from rmq_pipeline.handling import window as windows
from rmq_pipeline.handling.batch import cut
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.handler import RESULT, Handler, Outcome
from rmq_pipeline.handling.pace import Pace
from rmq_pipeline.handling.results import WindowReport
from rmq_pipeline.handling.sink import read_sink, sink_files
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.window import LENGTH_S
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_MAX_S
from rmq_pipeline.settings import Settings

TOPIC, GROUP = "steps", "walkers"
SINK = pa.schema(
    [("message_group", pa.string()), ("queue_offset", pa.int64()), ("born_at_ms", pa.int64())]
)
#: Longer than anything here takes.
LONG_S = 30.0

Run = Callable[..., WindowReport]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=3)
        broker.create_group(GROUP, order="message_group", max_attempts=3, backoff_ms=[1])
        yield broker


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Run:
    def once(handler: Handler, **settings: Any) -> WindowReport:
        spec = ConsumerSpec(
            name="walkers",
            topic=TOPIC,
            group=GROUP,
            handler=handler,
            order_by="message_group",
            sink=tmp_path / "sink",
            sink_schema=SINK,
        )
        return run_window(spec, broker, **{"owner": "test", "idle_s": 0.2, **settings})

    return once


def send(broker: Broker, n: int, *, groups: int) -> None:
    names = [f"g{i % groups}" for i in range(n)]
    columns = {"body": [b"x"] * n, "message_group": names, "born_at_ms": [0] * n}
    broker.send(TOPIC, pa.table(columns))


def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages windows ask brokers for, from now on."""
    asked: list[int] = []
    receive = Broker.receive

    def noting(self: Broker, *args: Any, limit: int, **how: Any) -> pa.Table:
        asked.append(limit)
        return receive(self, *args, limit=limit, **how)

    monkeypatch.setattr(Broker, "receive", noting)
    return asked


def kept(messages: pa.Table, _: pa.Table) -> Outcome:
    return Outcome(rows=messages.select(SINK.names))


def test_groups_are_handled_side_by_side(broker: Broker, run: Run) -> None:
    send(broker, 4, groups=4)
    together = threading.Barrier(4, timeout=LONG_S)

    def meet(messages: pa.Table, state: pa.Table) -> Outcome:
        together.wait()
        return kept(messages, state)

    report = run(meet, parallelism=4)

    assert (report.acked, report.retried) == (4, 0)


def test_a_group_is_with_one_thread_at_a_time_and_in_order(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    send(broker, 600, groups=7)
    handling: set[str] = set()
    overlaps: list[str] = []

    def watched(messages: pa.Table, state: pa.Table) -> Outcome:
        group = messages["message_group"][0].as_py()
        if group in handling:
            overlaps.append(group)
        handling.add(group)
        outcome = kept(messages, state)
        handling.discard(group)
        return outcome

    report = run(watched, parallelism=8)

    assert (report.acked, overlaps) == (600, [])
    rows = read_sink(tmp_path / "sink").to_pylist()
    for group in {row["message_group"] for row in rows}:
        offsets = [row["queue_offset"] for row in rows if row["message_group"] == group]
        assert offsets == sorted(offsets)


def test_threads_share_a_file(broker: Broker, run: Run, tmp_path: Path) -> None:
    send(broker, FIRST_ROWS, groups=FIRST_ROWS)

    report = run(kept, parallelism=8)

    assert (report.batches, report.files, report.rows) == (1, 1, FIRST_ROWS)
    assert sink_files(tmp_path / "sink").num_rows == 1


@pytest.mark.parametrize("batch_s", [60.0, 0.0])
def test_a_window_begins_with_few_and_takes_more_of_what_is_quickly_done(
    broker: Broker, run: Run, monkeypatch: pytest.MonkeyPatch, batch_s: float
) -> None:
    """A run that is ended before its batch is settled leaves nothing: the next begins again."""
    monkeypatch.setattr(windows, "BATCH_S", batch_s)
    send(broker, FIRST_ROWS + 40, groups=FIRST_ROWS + 40)
    asked = asked_of(monkeypatch)

    report = run(kept, parallelism=8)

    assert report.acked == FIRST_ROWS + 40
    assert asked[0] == FIRST_ROWS
    if batch_s:
        assert max(asked) >= 8 * FIRST_ROWS
    else:  # with no time for a batch it comes down to a message for each thread
        assert (min(asked), max(asked)) == (8, FIRST_ROWS)


@pytest.mark.parametrize("each_s", [0.001, 0.05, 1.0, WINDOW_MAX_S / 100, WINDOW_MAX_S / 33])
def test_a_run_lives_to_settle_what_it_took_in(each_s: float) -> None:
    """Of one message group, whose messages are one thread's, one after the other."""
    pace, now_s, settled = Pace(20_000, first=FIRST_ROWS), 0.0, 0
    flying = [pace.limit, pace.limit]

    while flying and now_s <= WINDOW_MAX_S:
        batch = flying.pop(0)
        now_s += batch * each_s
        settled += batch
        pace.handled(batch, batch * each_s)
        if now_s < LENGTH_S:
            flying.append(pace.limit)

    assert not flying
    assert now_s <= WINDOW_MAX_S
    assert settled >= min(LENGTH_S / each_s, 2 * FIRST_ROWS)


def test_failures_at_once_say_nothing_of_how_long_a_message_takes(
    broker: Broker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of(monkeypatch)
    send(broker, 2 * FIRST_ROWS, groups=2 * FIRST_ROWS)

    def away(messages: pa.Table, _: pa.Table) -> Outcome:
        if messages["queue_offset"][0].as_py() % 2:
            raise ConnectionError("the database is away")
        places = messages.select(["queue_id", "queue_offset"])
        retry = pa.array(["retry"] * messages.num_rows)
        return Outcome(results=places.append_column(RESULT.field("outcome"), retry))

    report = run(away)

    assert (report.acked, report.dead_lettered) == (0, 2 * FIRST_ROWS)
    assert max(asked) == FIRST_ROWS


def test_what_one_thread_keeps_lives_as_long_as_the_window(broker: Broker, run: Run) -> None:
    made = threading.local()
    connections: list[int] = []

    def connected(messages: pa.Table, state: pa.Table) -> Outcome:
        if not hasattr(made, "connection"):
            made.connection = object()
            connections.append(threading.get_ident())
        return kept(messages, state)

    send(broker, 200, groups=100)
    run(connected, parallelism=3)

    assert 1 <= len(connections) <= 3


def test_once_it_is_to_stop_no_further_part_is_begun(broker: Broker) -> None:
    send(broker, 400, groups=400)
    received = broker.receive(GROUP, TOPIC, limit=400, invisible_duration_ms=60_000)
    stopping = threading.Event()
    calls: list[int] = []

    def stop(messages: pa.Table, _: pa.Table) -> Outcome:
        calls.append(messages.num_rows)
        stopping.set()
        return Outcome()

    with ThreadEngine(2) as engine:
        (batch,) = cut(received, number=0, batches=1, parts=engine.parts(400), ordered=True)
        task = engine.task(Work(Rules(stop), batch, None, sink=None, epoch=1), stopping)
        with pytest.raises(CancelledError):
            task()

    # A part for each thread at most.
    assert 1 <= len(calls) <= 2 * 400 / batch.parts


def test_nothing_works_any_more_when_the_window_was_interrupted(broker: Broker, run: Run) -> None:
    send(broker, 40_000, groups=10_000)
    working = threading.active_count()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kept, on_batch=interrupt)

    assert threading.active_count() <= working


def test_a_group_that_fails_holds_no_other(broker: Broker, run: Run, tmp_path: Path) -> None:
    send(broker, 30, groups=3)

    def picky(messages: pa.Table, state: pa.Table) -> Outcome:
        if messages["message_group"][0].as_py() == "g1":
            raise SystemExit("not this one")
        return kept(messages, state)

    report = run(picky, length_s=LONG_S, parallelism=2)

    groups = read_sink(tmp_path / "sink")["message_group"].to_pylist()
    assert (groups.count("g0"), groups.count("g1"), groups.count("g2")) == (10, 0, 10)
    assert report.retried > 0
