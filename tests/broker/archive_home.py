"""A home with many small segments, and what is in its archive without a broker."""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.archive import manifest
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.archiving import compact, expire
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.storage import place as root
from tests.broker.sealed_home import MIB, messages, open_broker

#: Segments of about 30 kB each: a few of them are large.
SMALL = {"compact_target_bytes": 200_000, "compact_min_inputs": 4, "replaced_grace_ms": 60_000}
HOUR_MS = 3_600_000
#: A part of what ``fill`` makes.
KEPT_BYTES = 320_000


def opened(home: Path, clock: ManualClock | None = None, **settings: Any) -> Broker:
    """A broker without background work, with a small archive."""
    return open_broker(home, clock, **{**SMALL, **settings})


def fill(broker: Broker, *, turns: int = 12, topic: str = "t", queues: int = 2) -> None:
    """So many segments for each queue, an hour apart."""
    broker.ensure_topic(topic, queues=queues)
    clock = broker.engine.clock
    assert isinstance(clock, ManualClock)
    for turn in range(turns):
        keys = [[f"k{turn}", f"u{turn}-{i}"] for i in range(40)]
        broker.send(topic, messages(40, start=40 * turn, body_bytes=1000, keys=keys))
        clock.advance(HOUR_MS)
        seal(broker.engine, limit_bytes=1 << 30, window=None)


def by_manifest(home: Path, topic: str = "t") -> list[Path]:
    """The files that the manifest of a topic lists."""
    archive = root.opened(home / "topics")
    (topic_id,) = archive.folders(topic)
    entries = manifest.read(archive, f"{topic}/{topic_id}").files
    return [home / "topics" / topic / topic_id / entry["path"] for entry in entries]


def by_glob(home: Path, topic: str = "t") -> list[Path]:
    """The files that a glob finds."""
    return sorted((home / "topics" / topic).glob("*/queue_id=*/*.parquet"))


def offsets_in(paths: list[Path]) -> dict[int, list[int]]:
    """The offsets of each queue in these files, in order."""
    found: dict[int, list[int]] = {}
    for path in paths:
        queue_id = int(path.parent.name.removeprefix("queue_id="))
        table = pq.ParquetFile(path).read(columns=["queue_offset"])
        found.setdefault(queue_id, []).extend(table["queue_offset"].to_pylist())
    return {queue_id: sorted(offsets) for queue_id, offsets in sorted(found.items())}


def kept(broker: Broker, topic: str = "t") -> dict[int, list[int]]:
    """The offsets of each queue that the broker has."""
    offsets = broker.describe_topic(topic)["offsets"]
    return {o["queue_id"]: list(range(o["min_offset"], o["max_offset"])) for o in offsets}


def everything(broker: Broker, topic: str = "t") -> pa.Table:
    """All messages of a topic."""
    offsets = broker.describe_topic(topic)["offsets"]
    parts = [
        broker.read(topic, o["queue_id"], offset=o["min_offset"], limit=100_000) for o in offsets
    ]
    return pa.concat_tables(parts).combine_chunks()


def main(home: str, step: str, count: str) -> None:
    """Compact and expire a home, and die in the given step when it comes that time."""
    steps: Counter[str] = Counter()

    def fault(name: str) -> None:
        steps[name] += 1
        if name == step and steps[name] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    with opened(Path(home), replaced_grace_ms=0) as broker:
        seal(broker.engine, limit_bytes=MIB, window=None)
        compact(broker.engine, topic=None, limit_bytes=1 << 40, window=None, fault=fault)
        broker.alter_topic("t", retention_bytes=KEPT_BYTES)
        expire(broker.engine, window=None, fault=fault)
    sys.stdout.write(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
