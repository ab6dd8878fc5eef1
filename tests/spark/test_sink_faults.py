"""A sink has each row once, whatever happens to tasks, their copies, windows and partitions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.lake import publication, readers
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark import sink
from rmq_pipeline.spark.consumer import ConsumerSpec, run_window
from tests.spark.cluster import ROOT, Cluster
from tests.spark.handlers import SINK, placed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TOPIC, GROUP = "steps", "walkers"
#: Enough for two tasks.
MESSAGES = 1_200
HOUR = "1970-01-01T00"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, queues=2)
        broker.create_group(GROUP)
        yield broker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sink"


def send(broker: Broker, *bodies: bytes) -> None:
    columns = {"body": list(bodies), "born_at_ms": [0] * len(bodies)}
    broker.send(TOPIC, pa.table(columns))


def bodies_in(folder: Path) -> list[bytes]:
    return sorted(readers.sink_table(folder, columns=["body"])["body"].to_pylist())


def on_disk(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("hour=*/*.parquet")}


def counting(broker: Broker, group: str = GROUP) -> set[str]:
    return set(broker.sink_files(group)["path"].to_pylist())


def next_window(broker: Broker, folder: Path, group: str = GROUP) -> int:
    """A window that finds nothing to do; how many files it swept."""

    def no_spark() -> SparkSession:
        raise AssertionError("there is nothing to do")

    report = run_window(spec(folder, group), broker, spark=no_spark, owner="next", idle_s=0.1)
    assert report.ended == "idle"
    return report.swept_files


def spec(folder: Path, group: str = GROUP) -> ConsumerSpec:
    return ConsumerSpec(
        name=group,
        topic=TOPIC if group == GROUP else group,
        group=group,
        handler=placed,
        sink=folder,
        sink_schema=SINK,
        sink_offsets=True,
    )


# ------------------------------------------------------------------------------ tasks on a cluster


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, free_address: Callable[[], str]
) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster") / "spark", address=free_address()) as cluster:
        yield cluster


#: What goes wrong in the first attempt of each of two tasks, and how many files that leaves behind.
FAULTS: dict[str, int] = {"raises": 2, "dies": 2, "kills_executor": 2, "hangs": 1}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "3s",
}


@pytest.mark.timeout(900)
def test_every_row_is_there_once_when_tasks_fail_die_lose_their_executor_or_have_copies(
    broker: Broker, tmp_path: Path, cluster: Cluster, eventually: Eventually
) -> None:
    cluster.wait(eventually)
    sent = sorted([b"slow", *(f"{i:04}".encode() for i in range(1, MESSAGES))])
    for fault in FAULTS:
        broker.create_topic(fault, queues=2)
        broker.create_group(fault)
        broker.send(fault, pa.table({"body": sent, "born_at_ms": [0] * MESSAGES}))

    with FlightServer(broker) as server:
        windows = [
            {
                "topic": fault,
                "group": fault,
                "sink": str(tmp_path / fault),
                "handler": f"tests.spark.faulty:{fault}",
                "owner": "test",
                "idle_s": 0.5,
            }
            for fault in FAULTS
        ]
        settings = {**cluster.settings(), **SPECULATION}
        reports = run_windows(flight=server.address, settings=settings, windows=windows)

    for (fault, left_behind), report in zip(FAULTS.items(), reports, strict=True):
        folder = tmp_path / fault
        assert (report["acked"], report["files"], report["lost"]) == (MESSAGES, 2, 0), fault
        assert bodies_in(folder) == sent, fault
        named = counting(broker, fault)
        unnamed = on_disk(folder) - named
        assert len(unnamed) >= left_behind, fault
        assert next_window(broker, folder, fault) == len(unnamed), fault
        assert on_disk(folder) == named, fault
        assert bodies_in(folder) == sent, fault


def run_windows(**how: Any) -> list[dict[str, Any]]:
    """Windows in a process of its own; their reports."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.window_process", json.dumps(how)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# ----------------------------------------------------------------------------- replaced partitions


def stage_replacement(folder: Path, *bodies: bytes) -> pa.Table:
    columns = {
        "message_group": [None] * len(bodies),
        "body": list(bodies),
        "step": [0] * len(bodies),
        "born_at_ms": [0] * len(bodies),
    }
    return sink.stage(
        folder,
        pa.table(columns, schema=SINK),
        partition_time="born_at_ms",
        epoch=0,
        batch=0,
        prefix="replay",
    )


@pytest.mark.parametrize("published_first", ["settle", "replacement"])
def test_a_partition_is_replaced_beside_a_living_window(
    broker: Broker, folder: Path, spark: SparkSession, published_first: str
) -> None:
    send(broker, b"1", b"2")
    run_window(spec(folder), broker, spark=lambda: spark, owner="before", idle_s=0.2)
    send(broker, b"3")
    meanwhile = Meanwhile(broker, folder, first=published_first)

    report = run_window(spec(folder), meanwhile, spark=lambda: spark, owner="run", idle_s=0.2)
    meanwhile.publish_late()

    assert report.acked == 1
    assert bodies_in(folder) == [b"3", b"ONE", b"TWO"]
    files = readers.sink_paths(folder)
    assert {str(Path(path).relative_to(folder)) for path in files} == counting(broker)
    assert next_window(broker, folder) == 0
    send(broker, b"4")
    run_window(spec(folder), broker, spark=lambda: spark, owner="after", idle_s=0.2)
    assert bodies_in(folder) == [b"3", b"4", b"ONE", b"TWO"]


class Meanwhile:
    """The verbs of a broker, with a partition replaced before a settle, by somebody who is slow.

    The replacement is published at once, or only when the window is over.
    """

    def __init__(self, broker: Broker, folder: Path, *, first: str) -> None:
        self._broker, self._folder, self._first = broker, folder, first
        self._add = stage_replacement(folder, b"ONE", b"TWO")
        self._answer: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def settle(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Settle, a moment after the hour was replaced."""
        if not self._answer:
            self._answer = self._broker.replace_sink_files(
                GROUP,
                replacement_id="replay",
                add=self._add,
                remove=sorted(counting(self._broker)),
                partitions=[HOUR],
            )
            if self._first == "replacement":
                self.publish_late()
        return self._broker.settle(*args, **named)

    def publish_late(self) -> None:
        """Let readers see the replacement."""
        publication.publish_version(
            self._broker,
            GROUP,
            sink=self._folder,
            version=self._answer["version"],
            add=self._add,
            remove=self._answer["removed"],
        )


def test_a_window_killed_between_settle_and_manifest_is_published_by_the_next(
    broker: Broker, folder: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    send(broker, b"1", b"2")
    with monkeypatch.context() as patch:
        patch.setattr("rmq_pipeline.spark.publication.publish_version", die)
        with pytest.raises(KilledError):
            run_window(spec(folder), broker, spark=lambda: spark, owner="dead", idle_s=0.2)
    before = readers.sink_paths(folder)

    swept = next_window(broker, folder)

    assert (before, swept) == ([], 0)
    assert bodies_in(folder) == [b"1", b"2"]
