"""A sink has each row once, whatever happens to tasks on a cluster, and to their copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from tests.free_address import free_address
from tests.spark.cluster import Cluster, run_windows
from tests.spark.sink_home import bodies_in, counting, next_window, on_disk, opened

if TYPE_CHECKING:
    from tests.conftest import Eventually

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.slow]

#: Enough for two tasks.
MESSAGES = 1_200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
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


# Killed workers and JVMs are in test_sink_kills, too, with one executor.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults",
    [("raises", "hangs"), pytest.param(("dies", "kills_executor"), marks=pytest.mark.long)],
)
def test_every_row_is_there_once_when_tasks_fail_die_lose_their_executor_or_have_copies(
    tmp_path: Path, cluster: Cluster, eventually: Eventually, faults: tuple[str, ...]
) -> None:
    cluster.wait(eventually)
    with opened(tmp_path / "home") as broker:
        assert_each_row_once(broker, tmp_path, cluster=cluster, faults=faults)


def assert_each_row_once(
    broker: Broker, folder_of_all: Path, *, cluster: Cluster, faults: tuple[str, ...]
) -> None:
    sent = sorted([b"slow", *(f"{i:04}".encode() for i in range(1, MESSAGES))])
    for fault in faults:
        broker.create_topic(fault, queues=2)
        broker.create_group(fault)
        broker.send(fault, pa.table({"body": sent, "born_at_ms": [0] * MESSAGES}))

    with FlightServer(broker) as server:
        windows = [
            {
                "topic": fault,
                "group": fault,
                "sink": str(folder_of_all / fault),
                "handler": f"tests.spark.faulty:{fault}",
                "owner": "test",
                "idle_s": 0.5,
            }
            for fault in faults
        ]
        settings = {**cluster.settings(), **SPECULATION}
        reports = run_windows(flight=server.address, settings=settings, windows=windows)

    for fault, report in zip(faults, reports, strict=True):
        folder = folder_of_all / fault
        assert (report["acked"], report["files"], report["lost"]) == (MESSAGES, 2, 0), fault
        assert bodies_in(folder) == sent, fault
        named = counting(broker, fault)
        unnamed = on_disk(folder) - named
        assert len(unnamed) >= FAULTS[fault], fault
        assert next_window(broker, folder, fault) == len(unnamed), fault
        assert on_disk(folder) == named, fault
        assert bodies_in(folder) == sent, fault
