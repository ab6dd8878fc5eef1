"""How fast a range of sealed messages is replayed through Spark, once its session has started.

Messages of 200 B in 4,000 message groups, by a handler that makes a row of each; the replay of
another hour before it has started Spark's workers. ``python -m benchmarks.log --only replaying``.
"""

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa

from benchmarks.measured import Row
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark import session
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.run import replay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MILLION = 1_000_000
BODY_BYTES = 200
GROUPS = 4_000
ROUNDS = 3
BATCH = 100_000
HOUR_MS = 3_600_000
TARGET = 300_000.0
TOPIC, GROUP = "replayed", "readers"
SINK = pa.schema(
    [
        ("message_group", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("body", pa.binary()),
        ("born_at_ms", pa.int64()),
    ]
)
STATE = pa.schema([("seen", pa.int64())])


def rows_of(messages: pa.Table, _: pa.Table) -> Outcome:
    """A row of each message."""
    return Outcome(rows=messages.select(SINK.names))


def counted(messages: pa.Table, state: pa.Table) -> Outcome:
    """A row of each message, and how many the group had."""
    seen = state["seen"][0].as_py() if state.num_rows else 0
    after = pa.table([pa.array([seen + messages.num_rows], pa.int64())], schema=STATE)
    return Outcome(rows=messages.select(SINK.names), state=after)


def replaying(folder: Path, scale: float) -> list[Row]:
    """Messages a second, without and with state."""
    settings = Settings(reserve_bytes=1 << 20, seal_after_ms=0)
    folder = folder / "replaying"
    messages = max(1_000, int(MILLION * scale))
    with Broker.open(folder / "home", upkeep="none", settings=settings) as broker:
        fill(broker, messages)
        spark = session.start()
        # From here on hours of hour 1 are replayed; hour 0 has a tenth of the messages.
        rows = []
        for name, handler, state in (("", rows_of, None), (", keyed state", counted, STATE)):
            spec = ConsumerSpec(
                name="replayed",
                topic=TOPIC,
                group=GROUP,
                handler=handler,
                order_by="message_group",
                state=state,
                sink=folder / "sink",
                sink_schema=SINK,
            )
            run(spec, broker, spark=spark, folder=folder, hour=0)
            rates = []
            for i in range(ROUNDS):
                started = time.monotonic()
                report = run(spec, broker, spark=spark, folder=folder / str(i), hour=1)
                assert report.messages == report.rows == messages
                rates.append(messages / (time.monotonic() - started))
                shutil.rmtree(folder / str(i))
            target = None if state else TARGET
            what = f"replay {messages:,} sealed messages of {BODY_BYTES} B{name}"
            rows.append(Row(what, float(np.median(rates)), "msg/s", target))
        spark.stop()
    shutil.rmtree(folder)
    return rows


def run(
    spec: ConsumerSpec, broker: Broker, *, spark: "SparkSession", folder: Path, hour: int
) -> ReplayReport:
    """Replay an hour into a side sink."""
    plan = ReplayPlan(
        spec=spec,
        from_ms=hour * HOUR_MS,
        to_ms=(hour + 1) * HOUR_MS,
        mode="side_sink",
        replay_id="bench",
        folder=folder / "replays",
        side_sink=folder / "side",
    )
    return replay(plan, cast(Client, broker), spark=lambda: spark)


def fill(broker: Broker, messages: int) -> None:
    """Messages of hour 1, and a tenth of them of hour 0, all sealed."""
    broker.create_topic(TOPIC, type="fifo", queues=8, partition_time="born")
    broker.create_group(GROUP, order="message_group")
    for hour, n in ((0, messages // 10), (1, messages)):
        for start in range(0, n, BATCH):
            count = min(BATCH, n - start)
            names = np.arange(start, start + count) % GROUPS
            sent = {
                "body": [os.urandom(BODY_BYTES) for _ in range(count)],
                "message_group": [f"group-{name}" for name in names.tolist()],
                "born_at_ms": pa.array(hour * HOUR_MS + np.arange(count) % HOUR_MS, pa.int64()),
            }
            broker.send(TOPIC, pa.table(sent))
    while broker.seal(limit_bytes=1 << 30)["segments"]:
        pass
