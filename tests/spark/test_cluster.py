"""A window on a cluster whose workers share neither a folder nor modules with the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, NamedTuple
from zipfile import ZipFile

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.free_address import free_port
from tests.spark import hosts
from tests.spark.cluster import Cluster, run_windows
from tests.spark.hosts import Hosts

if TYPE_CHECKING:
    from tests.conftest import Eventually

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not hosts.can_be_made(), reason="only root makes network namespaces"),
]

HANDLER = """
    import pyarrow as pa
    from rmq_pipeline.handling.handler import Outcome

    def forward(messages: pa.Table, state: pa.Table) -> Outcome:
        return Outcome(publish={"onward": messages.select(["body"])})
"""
SMALL = Settings(reserve_bytes=1024 * 1024)
#: Two parts of 4 MiB, far more than a row takes where files can be used.
MESSAGES, BODY_BYTES = 1_024, 8_192


class Apart(NamedTuple):
    """A cluster, and what only the driver has."""

    cluster: Cluster
    #: Its home, and the project with the handler.
    folder: Path
    #: The project again, as the file that Spark sends to its workers.
    archive: Path


@pytest.fixture
def apart(tmp_path: Path, eventually: Eventually) -> Iterator[Apart]:
    folder = tmp_path / "driver"
    project = folder / "shop"
    project.mkdir(parents=True)
    (project / "shop_handlers.py").write_text(dedent(HANDLER))
    archive = folder / "shop.zip"
    with ZipFile(archive, "w") as written:
        written.write(project / "shop_handlers.py", "shop_handlers.py")
    with Hosts(hidden=folder) as network:
        address = f"{network.here}:{free_port()}"
        workers = network.commands
        with Cluster(tmp_path / "spark", address=address, workers=workers) as cluster:
            cluster.wait(eventually)
            yield Apart(cluster, folder, archive)


def test_a_window_hands_over_its_messages_and_its_modules(apart: Apart) -> None:
    with Broker.open(apart.folder / "home", upkeep="none", settings=SMALL) as broker:
        for topic in ("orders", "onward"):
            broker.create_topic(topic, queues=2)
        broker.create_group("forwarding")
        bodies = sorted(f"{i:0{BODY_BYTES}}".encode() for i in range(MESSAGES))
        broker.send("orders", pa.table({"body": bodies}))

        report = forwarded(broker, apart)

        assert (report["acked"], report["published"]) == (MESSAGES, {"onward": MESSAGES})
        broker.create_group("readers")
        assert sorted(drained(broker)) == bodies


def forwarded(broker: Broker, apart: Apart) -> dict[str, object]:
    """The report of a window that forwards all orders."""
    window = {
        "topic": "orders",
        "group": "forwarding",
        "handler": "shop_handlers:forward",
        "publishes": ["onward"],
        "owner": "test",
        "idle_s": 0.5,
    }
    with FlightServer(broker) as server:
        (report,) = run_windows(
            # As `rmq up` sets it for a Spark of this machine.
            {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(apart.folder / "shop")},
            flight=server.address,
            settings={**apart.cluster.settings(), "spark.submit.pyFiles": str(apart.archive)},
            windows=[window],
        )
    return report


def drained(broker: Broker) -> Iterator[bytes]:
    while (found := broker.receive("readers", "onward", limit=MESSAGES)).num_rows:
        yield from found["body"].to_pylist()
