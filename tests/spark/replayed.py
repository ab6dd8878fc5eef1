"""A consumer group on a real broker that runs in windows and is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.handling.sink import read_sink, sink_files
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import ConsumerSpec, run_window
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.run import replay
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import below
from tests.spark.handlers import SINK, STATE, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC, GROUP = "steps", "walkers"
HOUR_MS = 3_600_000


@contextmanager
def replayed_broker(home: Path, **changes: Any) -> Iterator[Broker]:
    """A broker with an ordered topic and group, and a topic for published messages."""
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=1 << 20, seal_after_ms=0, **changes)
    with Broker.open(home, upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=3, partition_time="born")
        broker.create_topic("later", type="delay")
        broker.create_group(GROUP, order="message_group", max_attempts=2, backoff_ms=[1])
        yield broker


class Consumer:
    """A group that runs in windows and replays."""

    def __init__(self, broker: Broker, folder: Path, spark: SparkSession) -> None:
        self.broker, self.folder, self._spark = broker, folder, spark
        #: Told of every step of a replay.
        self.on_progress: Callable[[str, dict[str, Any]], None] = lambda _what, _facts: None

    def spec(self, **changes: Any) -> ConsumerSpec:
        settings: dict[str, Any] = {
            "name": "numbered_steps",
            "topic": TOPIC,
            "group": GROUP,
            "handler": numbered,
            "order_by": "message_group",
            "state": STATE,
            "sink": below(self.folder, "sink"),
            "sink_schema": SINK,
            "publishes": ("later",),
        }
        return ConsumerSpec(**{**settings, **changes})

    def send(self, *bodies: str, hour: int, groups: int = 3) -> None:
        """Messages of the groups g0, g1, … in turn, all born in one hour."""
        n = len(bodies)
        columns = {
            "body": [body.encode() for body in bodies],
            "message_group": [f"g{i % groups}" for i in range(n)],
            "born_at_ms": [hour * HOUR_MS + i for i in range(n)],
        }
        self.broker.send(TOPIC, pa.table(columns))

    def consume(self, **changes: Any) -> None:
        """A window until there is nothing more."""
        run_window(
            self.spec(**changes),
            self.broker,
            spark=lambda: self._spark,
            owner="test",
            idle_s=0.3,
        )

    def again(self, first: int, end: int, **changes: Any) -> ReplayReport:
        """Replay the hours [first, end)."""
        spec = {k: v for k, v in changes.items() if k in ConsumerSpec.__dataclass_fields__}
        plan = {k: v for k, v in changes.items() if k not in spec}
        settings: dict[str, Any] = {
            "mode": "replace",
            "replay_id": "test",
            "folder": below(self.folder, "replays"),
            **plan,
        }
        return replay(
            ReplayPlan(
                spec=self.spec(**spec), from_ms=first * HOUR_MS, to_ms=end * HOUR_MS, **settings
            ),
            self.broker,  # type: ignore[arg-type]  # it has the client's verbs
            spark=lambda: self._spark,
            on_progress=self.on_progress,
        )

    def rows(self, folder: str = "sink") -> list[tuple[str, int, str]]:
        """What a sink holds: message group, step, body."""
        found = read_sink(below(self.folder, folder)).to_pylist()
        return sorted((r["message_group"], r["step"], r["body"].decode()) for r in found)

    def files(self) -> dict[str, list[tuple[str, bytes]]]:
        """The files that count, by partition, with what is in them."""
        found: dict[str, list[tuple[str, bytes]]] = {}
        for row in sink_files(below(self.folder, "sink")).to_pylist():
            content = at(below(self.folder, "sink")).read(row["path"])
            found.setdefault(row["partition"], []).append((row["path"], content))
        return found

    def progress(self) -> list[dict[str, Any]]:
        """Where the group is."""
        found: list[dict[str, Any]] = self.broker.sql(
            "SELECT * FROM progress ORDER BY ALL"
        ).to_pylist()
        return found
