"""A window on a Spark Connect server, which may be anywhere: nothing goes by a file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.spark.cluster import run_windows

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

#: Two parts of 2 MiB: more than a row takes where files can be used.
MESSAGES, BODY_BYTES = 512, 8_192


def test_a_window_works_through_spark_connect(tmp_path: Path) -> None:
    small = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=small) as broker:
        for topic in ("orders", "later"):
            broker.create_topic(topic, queues=2, type="mixed")
        broker.create_group("kept")
        bodies = sorted(f"on{i:0{BODY_BYTES}}".encode() for i in range(MESSAGES))
        broker.send("orders", pa.table({"body": bodies}))
        window = {
            "topic": "orders",
            "group": "kept",
            "handler": "tests.spark.handlers:echoed",
            "publishes": ["later"],
            "owner": "test",
            "idle_s": 0.5,
        }

        with FlightServer(broker) as server:
            (report,) = run_windows(
                flight=server.address, settings={"spark.remote": "local[2]"}, windows=[window]
            )

        assert (report["acked"], report["published"]) == (MESSAGES, {"later": MESSAGES})
