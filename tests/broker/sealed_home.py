"""A home with every kind of message, and what a reader finds in its folders without a broker."""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import schema
from rmq_pipeline.archive import manifest
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage import place as root
from rmq_pipeline.topic import SCHEDULE_TOPIC

MIB = 1 << 20
#: Small log files, and everything is old enough to be sealed at once.
SMALL = {"log_file_bytes": MIB, "reserve_bytes": MIB, "seal_after_ms": 0}
DELAY_MS = 600_000


def open_broker(home: Path, clock: ManualClock | None = None, **settings: Any) -> Broker:
    """A broker without background work."""
    chosen = Settings(**{**SMALL, **settings})
    return Broker.open(home, clock=clock or ManualClock(), upkeep="none", settings=chosen)


def messages(n: int, *, start: int = 0, body_bytes: int = 0, **columns: list[Any]) -> pa.Table:
    """Messages numbered from ``start`` on; bodies do not compress."""
    fields = [schema.SEND.field("body"), *(schema.SEND.field(name) for name in columns)]
    bodies = [str(i).encode() + b":" + os.urandom(body_bytes) for i in range(start, start + n)]
    return pa.table([bodies, *columns.values()], schema=pa.schema(fields))


def fill(broker: Broker, *, rounds: int = 8) -> None:
    """Plain, ordered, delayed and dead messages, those of a deleted topic, and a group's events."""
    broker.create_topic("plain", queues=3)
    broker.create_topic("ordered", type="fifo", queues=2)
    broker.create_topic("late", type="delay", queues=1)
    broker.create_topic("gone", queues=1)
    broker.create_group("readers", max_attempts=1)
    for i in range(rounds):
        tags, keys = [f"t{k % 3}" for k in range(60)], [[f"k{k}"] for k in range(60)]
        broker.send("plain", messages(60, start=60 * i, body_bytes=4000, tag=tags, keys=keys))
        groups = {"message_group": [f"g{k % 7}" for k in range(50)]}
        broker.send("ordered", messages(50, start=50 * i, body_bytes=500, **groups))
        due = {"deliver_at_ms": [broker.engine.clock.now_ms() + DELAY_MS] * 5}
        broker.send("late", messages(5, start=5 * i, body_bytes=100, **due))
        broker.send("gone", messages(5, body_bytes=100))
        got = broker.receive("readers", "plain", limit=40)
        broker.ack(got["receipt_handle"].to_pylist()[2:])
        broker.forward_to_dead_letter_queue(got["receipt_handle"].to_pylist()[:2], reason="odd")
    broker.delete_topic("gone")


def stored(broker: Broker) -> dict[str, list[pa.Table]]:
    """Every topic's messages as the broker reads them, queue by queue."""
    found = {}
    for topic in broker.list_topics()["name"].to_pylist():
        offsets = broker.describe_topic(topic)["offsets"]
        found[topic] = [
            broker.read(topic, row["queue_id"], offset=row["min_offset"], limit=100_000)
            for row in offsets
        ]
    return found


def folders(home: Path) -> dict[str, Path]:
    """Where the segments of each topic are, but for SCHEDULE_TOPIC_XXXX, which has no clients."""
    found = {folder.parent.name: folder for folder in (home / "topics").glob("*/*")}
    found.pop(SCHEDULE_TOPIC, None)
    return found


def read_folder(folder: Path) -> pa.Table:
    """A topic as plain DuckDB reads it, in the columns and the order of the broker."""
    names = ", ".join(schema.READ.names)
    query = (
        f"SELECT {names} FROM read_parquet('{folder}/*/*.parquet', hive_partitioning = true) "
        "ORDER BY queue_id, queue_offset"
    )
    with duckdb.connect() as connection:
        return connection.sql(query).to_arrow_table().cast(schema.READ)


def assert_folders_hold(home: Path, expected: dict[str, list[pa.Table]]) -> None:
    """Folders and manifests say exactly what was published."""
    found = folders(home)
    assert set(found) == {topic for topic, queues in expected.items() if sum(map(len, queues))}
    for topic, folder in found.items():
        whole = pa.concat_tables(expected[topic])
        assert read_folder(folder).equals(whole.combine_chunks()), topic
        archive = root.opened(folder.parents[1])
        entries = manifest.read(archive, f"{folder.parent.name}/{folder.name}").files
        listed = [folder / entry["path"] for entry in entries]
        assert sorted(folder / each["name"] for each in entries) == sorted(folder.glob("q*/*"))
        assert sorted(listed) == sorted(folder.glob(".segments/*/*.kept")), topic
        assert len(list(folder.glob(".segments/*/*"))) == 2 * len(listed), topic
        assert sum(pq.read_metadata(path).num_rows for path in listed) == whole.num_rows


def events(broker: Broker, home: Path) -> Counter[tuple[int, int, int]]:
    """How often each event is there, in event Parquet or in DuckDB: (position, row, at_ms)."""
    table = broker.sql('SELECT "position", "row", at_ms FROM events')
    kept = sum(pq.read_metadata(file).num_rows for file in (home / "events").iterdir())
    left = broker.engine.database._root.sql("SELECT count(*) FROM store.events").fetchall()[0][0]
    assert kept + left == table.num_rows
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def seal_all(broker: Broker, fault: Callable[[str], None] | None = None) -> dict[str, int]:
    """Seal a little at a time until nothing is left; the sum of the reports."""
    total: Counter[str] = Counter()
    while True:
        report = seal(broker.engine, limit_bytes=MIB, window=None, fault=fault)
        total.update(report)
        if not report["segments"]:
            return dict(total)


def main(home: str, step: str, count: str) -> None:
    """Seal a home, and die in the given step when it comes for the ``count``th time."""
    steps: Counter[str] = Counter()

    def fault(name: str) -> None:
        steps[name] += 1
        if name == step and steps[name] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    with open_broker(Path(home), snapshot_events=100) as broker:
        seal_all(broker, fault)
    print(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
