"""Windows on a real broker, in Spark and on threads: what is settled, published and in the sink."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer import window
from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.handling import sink
from rmq_pipeline.handling import window as windows
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import BatchReport, ConsumerSpec, WindowReport, run_window
from tests.spark.handlers import SINK, STATE, deadly, kept, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC, GROUP = "steps", "walkers"
HOUR_MS = 3_600_000
Run = Callable[..., WindowReport]


class Meddler:
    """The broker's verbs, with something done around the first call of one of them."""

    def __init__(
        self, broker: Broker, verb: str, meddle: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._broker, self._verb, self._meddle = broker, verb, meddle
        self.done = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._broker, name)
        if name != self._verb or self.done:
            return real

        def once(*args: Any, **named: Any) -> Any:
            self.done = True
            return self._meddle(lambda: real(*args, **named))

        return once


class KilledError(BaseException):
    """Stands for the end of the process at this point."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker with an ordered topic and group, and a topic for published messages."""
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=3)
        broker.create_topic("later", type="delay")
        broker.create_group(GROUP, order="message_group", max_attempts=2, backoff_ms=[1])
        yield broker


@pytest.fixture
def spec(tmp_path: Path) -> ConsumerSpec:
    return consumer(tmp_path)


def consumer(folder: Path, **changes: Any) -> ConsumerSpec:
    settings: dict[str, Any] = {
        "name": "numbered_steps",
        "topic": TOPIC,
        "group": GROUP,
        "handler": numbered,
        "order_by": "message_group",
        "state": STATE,
        "sink": folder / "sink",
        "sink_schema": SINK,
        "publishes": ("later",),
    }
    return ConsumerSpec(**{**settings, **changes})


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.spark), "threads"])
def engine(request: pytest.FixtureRequest) -> Run:
    """``run_window`` of either engine."""
    if request.param == "threads":
        return window.run_window
    spark: SparkSession = request.getfixturevalue("spark")
    return partial(run_window, spark=lambda: spark)


@pytest.fixture
def run(broker: Broker, spec: ConsumerSpec, engine: Run) -> Run:
    """``run(…)``: one window until it has been idle for a moment."""

    def once(**changes: Any) -> WindowReport:
        settings = {"owner": "test", "idle_s": 0.2, **changes}
        verbs = settings.pop("verbs", broker)
        return engine(settings.pop("spec", spec), verbs, **settings)

    return once


def send(broker: Broker, *bodies: str, groups: int = 3) -> None:
    """Messages of the groups g0, g1, … in turn, born an hour after one another."""
    n = len(bodies)
    columns = {
        "body": [body.encode() for body in bodies],
        "message_group": [f"g{i % groups}" for i in range(n)],
        "born_at_ms": [i * HOUR_MS for i in range(n)],
    }
    broker.send(TOPIC, pa.table(columns))


def steps(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """What the sink holds: message group -> (step, body) by step."""
    found = defaultdict(list)
    for row in sink.read_sink(folder / "sink").to_pylist():
        found[row["message_group"]].append((row["step"], row["body"].decode()))
    return {group: sorted(rows) for group, rows in sorted(found.items())}


def expected(*bodies: str, groups: int = 3) -> dict[str, list[tuple[int, str]]]:
    """What the sink should hold once these were sent and handled."""
    return {
        f"g{g}": list(enumerate(bodies[g::groups], start=1)) for g in range(groups) if bodies[g:]
    }


def lag(broker: Broker) -> int:
    (row,) = broker.sql(
        f"SELECT sum(lag)::BIGINT AS n FROM lag WHERE topic = '{TOPIC}'"
    ).to_pylist()
    return int(row["n"] or 0)


def files_on_disk(folder: Path) -> set[str]:
    return {str(p.relative_to(folder / "sink")) for p in (folder / "sink").rglob("*.parquet")}


def no_spark() -> NoReturn:
    raise AssertionError("Spark is started for messages only")


def test_everything_is_settled_in_order_and_in_the_sink(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    bodies = [str(i) for i in range(60)]
    send(broker, *bodies)
    reports: list[BatchReport] = []

    report = run(on_batch=reports.append)

    assert steps(tmp_path) == expected(*bodies)
    assert lag(broker) == 0
    assert (report.ended, report.acked, report.rows, report.files) == ("idle", 60, 60, 60)
    assert sum(r.acked for r in reports) == 60
    listed = sink.sink_files(tmp_path / "sink")
    assert set(listed["path"].to_pylist()) == files_on_disk(tmp_path)
    assert listed["partition"][0].as_py().startswith("1970-01-0")
    state = broker.keyed_state(GROUP, TOPIC)
    assert state is not None
    assert sorted(state["steps"].to_pylist()) == [20, 20, 20]


def test_state_goes_on_from_window_to_window(broker: Broker, run: Run, tmp_path: Path) -> None:
    first, second = [str(i) for i in range(6)], [str(i) for i in range(6, 12)]
    send(broker, *first)
    run()
    send(broker, *second)

    report = run()

    assert report.epoch == 2
    assert steps(tmp_path) == expected(*first, *second)


def test_a_job_is_for_as_many_messages_as_pay_for_it(
    broker: Broker, run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "BATCH_S", 0.0)  # whatever they take is too long
    asked: list[int] = []
    receive = Broker.receive

    def noting(self: Broker, *args: Any, limit: int, **how: Any) -> pa.Table:
        asked.append(limit)
        return receive(self, *args, limit=limit, **how)

    monkeypatch.setattr(Broker, "receive", noting)
    send(broker, "0", "1", "2")

    run()

    assert asked[-1] == (500 if "spark" in request.node.callspec.id else 8)


@pytest.mark.parametrize("max_batch", [1, 10_000])
def test_the_size_of_micro_batches_changes_nothing(
    broker: Broker, run: Run, tmp_path: Path, max_batch: int
) -> None:
    bodies = ["0", "1", "bad 2", "3", "4", "5", "6", "7", "8", "9"]
    send(broker, *bodies)

    report = run(spec=consumer(tmp_path, max_batch=max_batch))

    # Two attempts, then the dead letters: the group goes on without it.
    assert {g: [b for _, b in rows] for g, rows in steps(tmp_path).items()} == {
        "g0": ["0", "3", "6", "9"],
        "g1": ["1", "4", "7"],
        "g2": ["5", "8"],
    }
    assert (report.acked, report.retried, report.dead_lettered) == (9, 1, 1)
    (dead,) = broker.sql("SELECT reason, error_type, run_id FROM dead_letters").to_pylist()
    assert list(dead.values()) == ["ValueError: bad 2", "ValueError", "test"]


def test_published_messages_are_stored_with_the_settle(broker: Broker, run: Run) -> None:
    send(broker, "on 0", "1", "on 2", "3")

    report = run()

    assert report.published == {"later": 2}
    (row,) = broker.sql("SELECT count(*) AS n FROM scheduled").to_pylist()
    assert row["n"] == 2


def test_without_messages_spark_is_not_started(broker: Broker, spec: ConsumerSpec) -> None:
    report = run_window(spec, broker, spark=no_spark, owner="test", idle_s=0.05)

    assert (report.ended, report.batches) == ("idle", 0)


def test_a_window_ends_when_its_time_is_over(broker: Broker, spec: ConsumerSpec) -> None:
    report = run_window(spec, broker, spark=no_spark, owner="test", length_s=0.05)

    assert report.ended == "length"


def test_a_window_that_finds_the_group_taken_yields(broker: Broker, spec: ConsumerSpec) -> None:
    broker.open_window(spec.window, owner="another", duration_ms=60_000)

    report = run_window(spec, broker, spark=no_spark, owner="test")

    assert (report.ended, report.yielded_to) == ("yielded", "another")


def test_a_fenced_window_settles_nothing_and_leaves_no_files(
    broker: Broker, run: Run, spec: ConsumerSpec, tmp_path: Path
) -> None:
    bodies = [str(i) for i in range(9)]
    send(broker, *bodies)

    def taken_over(settle: Callable[[], Any]) -> Any:
        broker.open_window(spec.window, owner="another", duration_ms=1, takeover=True)
        return settle()

    fenced = run(verbs=Meddler(broker, "settle", taken_over))

    assert (fenced.ended, fenced.acked) == ("fenced", 0)
    assert files_on_disk(tmp_path) == set()
    assert run(takeover=True).acked == 9
    assert steps(tmp_path) == expected(*bodies)


def test_ended_receipts_bring_everything_again(broker: Broker, run: Run, tmp_path: Path) -> None:
    bodies = [str(i) for i in range(9)]
    send(broker, *bodies)

    def reset(settle: Callable[[], Any]) -> Any:
        broker.reset_offset(GROUP, TOPIC, to_earliest=True)
        return settle()

    report = run(verbs=Meddler(broker, "settle", reset))

    assert (report.lost, report.acked, report.ended) == (1, 9, "idle")
    assert steps(tmp_path) == expected(*bodies)
    assert files_on_disk(tmp_path) == set(sink.sink_files(tmp_path / "sink")["path"].to_pylist())


def test_a_lost_receive_brings_everything_again(broker: Broker, run: Run, tmp_path: Path) -> None:
    bodies = [str(i) for i in range(9)]
    send(broker, *bodies)

    def lose(receive: Callable[[], Any]) -> Any:
        assert receive().num_rows == 9
        raise BrokerUnavailableError

    report = run(verbs=Meddler(broker, "receive", lose))

    assert (report.lost, report.acked) == (1, 9)
    assert steps(tmp_path) == expected(*bodies)


def test_a_window_killed_before_its_settle_leaves_nothing(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    bodies = [str(i) for i in range(9)]
    send(broker, *bodies)

    def die(_: Callable[[], Any]) -> NoReturn:
        raise KilledError

    with pytest.raises(KilledError):
        run(verbs=Meddler(broker, "settle", die))
    assert len(files_on_disk(tmp_path)) == 9

    report = run(takeover=True)

    assert (report.swept_files, report.acked) == (9, 9)
    assert steps(tmp_path) == expected(*bodies)
    assert len(files_on_disk(tmp_path)) == 9


def test_a_window_killed_after_its_settle_is_published_by_the_next(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    bodies = [str(i) for i in range(9)]
    send(broker, *bodies)

    def die(settle: Callable[[], Any]) -> NoReturn:
        settle()
        raise KilledError

    with pytest.raises(KilledError):
        run(verbs=Meddler(broker, "settle", die))
    assert steps(tmp_path) == {}

    report = run(takeover=True)

    assert (report.batches, report.swept_files) == (0, 0)
    assert steps(tmp_path) == expected(*bodies)


def test_a_settle_answered_too_late_is_not_done_twice(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    send(broker, *[str(i) for i in range(9)])

    def twice(settle: Callable[[], Any]) -> Any:
        first = settle()
        assert settle() == first
        return first

    report = run(verbs=Meddler(broker, "settle", twice))

    assert (report.acked, report.rows) == (9, 9)
    assert sink.read_sink(tmp_path / "sink").num_rows == 9


@pytest.mark.spark
def test_a_message_that_kills_its_worker_fails_alone(
    broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    send(broker, "0", "1", "2", "3", "kill 4", "5", "6", "7", "8")

    spec = consumer(tmp_path, handler=deadly)
    report = run_window(spec, broker, spark=lambda: spark, owner="test", idle_s=0.2)

    assert {g: [b for _, b in rows] for g, rows in steps(tmp_path).items()} == {
        "g0": ["0", "3", "6"],
        "g1": ["1", "7"],
        "g2": ["2", "5", "8"],
    }
    assert (report.acked, report.retried, report.dead_lettered) == (8, 1, 1)
    assert lag(broker) == 0
    dead = broker.sql("SELECT reason FROM dead_letters").to_pylist()
    assert [row["reason"] for row in dead] == ["The Python worker died."]


def test_unordered_messages_fail_one_by_one(broker: Broker, run: Run, tmp_path: Path) -> None:
    broker.create_topic("events")
    broker.create_group("keepers", max_attempts=2, backoff_ms=[1])
    broker.send("events", pa.table({"body": [b"0", b"bad", b"2", b"3"]}))

    report = run(
        spec=consumer(
            tmp_path,
            topic="events",
            group="keepers",
            order_by=None,
            state=None,
            handler=kept,
            publishes=(),
        )
    )

    assert (report.acked, report.retried, report.dead_lettered) == (3, 1, 1)
    assert sorted(sink.read_sink(tmp_path / "sink")["body"].to_pylist()) == [b"0", b"2", b"3"]
