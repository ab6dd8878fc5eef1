"""The log as a table, measured: sealing, finding, reading far back, replaying, bytes on disk.

A measurement is a function in MEASUREMENTS: it gets a folder and the scale, opens homes of its own
in it, and answers rows. ``python -m benchmarks.log --help`` for the sizes.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measured import Measurement, Row, bodies, run, send_patiently
from benchmarks.replay import replaying
from rmq_pipeline.broker import Broker
from rmq_pipeline.settings import Settings

MILLION = 1_000_000
#: Messages that look-ups are among; as many are few.
MANY = 10 * MILLION
FEW = 100_000
QUEUES = 8
BATCH = 50_000
#: A message of a feed: a JSON text of about this many bytes, and a key of its own.
FEED_BYTES = 100
LOOK_UPS = 25
RECEIVES = 200
RECEIVED = 32
ALL_BYTES = 1 << 50


@contextmanager
def opened(folder: Path, name: str) -> Iterator[Broker]:
    """A broker of its own, everything of which is old enough to be sealed; it goes afterwards."""
    settings = Settings(seal_after_ms=0)
    home = folder / name
    try:
        with Broker.open(home, upkeep="none", settings=settings) as broker:
            yield broker
    finally:
        shutil.rmtree(home, ignore_errors=True)


def feed(first: int, n: int) -> pa.Table:
    """Messages of a feed, each with its number as key."""
    numbers = range(first, first + n)
    keys = pa.array([f"key-{number}" for number in numbers])
    random = np.random.default_rng(first)
    values = random.integers(0, MILLION, (n, 3))
    bodies = [
        b'{"carrier":"UA","flight":%d,"origin":"EWR","delay":%d,"distance":%d,"number":%09d}'
        % (*row, number)
        for number, row in zip(numbers, values.tolist(), strict=True)
    ]
    padded = [body.ljust(FEED_BYTES) for body in bodies]
    lists = pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32)), keys)
    return pa.table({"body": pa.array(padded, pa.binary()), "keys": lists})


def milliseconds(action: Callable[[int], object], times: int) -> list[float]:
    """How long each of so many calls took; it is told which one it is."""
    found = []
    for at in range(times):
        start = time.perf_counter()
        action(at)
        found.append((time.perf_counter() - start) * 1000)
    return found


def sealing(folder: Path, scale: float) -> list[Row]:
    """Sealing 1 KiB messages that do not compress, and merging what that gives."""
    n = int(600_000 * scale) // BATCH * BATCH or BATCH
    with opened(folder, "sealing") as broker:
        broker.create_topic("t", queues=QUEUES)
        for _ in range(n // BATCH):
            send_patiently(broker, "t", messages=pa.table({"body": bodies(BATCH, 1024)}))
        broker.engine.dispatched()
        start = time.perf_counter()
        report = broker.seal(limit_bytes=ALL_BYTES)
        seconds = time.perf_counter() - start
        assert report["rows"] == n, report
        start = time.perf_counter()
        merged = broker.compact(limit_bytes=ALL_BYTES)
        merging = time.perf_counter() - start
    rows = [
        Row(f"seal {n:,} messages of 1 KiB", n / seconds, "msg/s", 200_000),
        Row("segments of 1 KiB, a message", report["bytes"] / n, "B"),
    ]
    if merged["inputs"]:
        rate = merged["bytes_before"] / merging / 2**20
        rows.append(Row(f"merge {merged['inputs']} of its segments", rate, "MiB/s"))
    return rows


def looking_up(folder: Path, scale: float) -> list[Row]:
    """Look-ups and receives among few messages and among many."""
    few, many = max(int(FEW * scale), 2 * BATCH), max(int(MANY * scale), 4 * BATCH)
    with opened(folder, "few") as small, opened(folder, "many") as large:
        filled = [_fill(broker, n) for broker, n in ((small, few), (large, many))]
        rows = _look_ups(large, many, report=filled[1])
        one, other = _receives_ms([(small, few), (large, many)])
    return [
        *rows,
        Row(f"receive {RECEIVED}, {few:,} stored, p50", one, "ms"),
        Row(f"receive {RECEIVED}, {many:,} stored, p50", other, "ms"),
        Row(f"the same, as a share of that with {few:,}", other / one, "×", 1.2),
    ]


def _fill(broker: Broker, n: int) -> dict[str, int]:
    broker.create_topic("t", queues=QUEUES)
    for first in range(0, n, BATCH):
        send_patiently(broker, "t", messages=feed(first, min(BATCH, n - first)))
    report = broker.seal(limit_bytes=ALL_BYTES)
    assert report["rows"] == n, report
    return report


def _look_ups(broker: Broker, n: int, *, report: dict[str, int]) -> list[Row]:
    random = np.random.default_rng(7)
    numbers = random.integers(0, n, LOOK_UPS).tolist()
    ids: list[str] = []

    def by_key(at: int) -> None:
        (found,) = broker.find("t", key=f"key-{numbers[at]}", with_body=True).to_pylist()
        assert b'"number":%09d' % numbers[at] in found["body"]
        ids.append(found["message_id"])

    def by_id(at: int) -> None:
        assert broker.find("t", message_id=ids[at])["keys"].to_pylist() == [[f"key-{numbers[at]}"]]

    keys = milliseconds(by_key, LOOK_UPS)
    found_ids = milliseconds(by_id, LOOK_UPS)
    bounds = broker.sql("SELECT min(stored_at_ms) AS a, max(stored_at_ms) AS b FROM messages")
    first, last = bounds["a"][0].as_py(), bounds["b"][0].as_py()
    moments = random.integers(first, last, LOOK_UPS).tolist()

    def by_time(at: int) -> None:
        offset = broker.offset_at("t", at % QUEUES, at_ms=moments[at])
        (row,) = broker.read("t", at % QUEUES, offset=offset, limit=1)["stored_at_ms"].to_pylist()
        assert row >= moments[at]

    def offsets(at: int) -> None:
        broker.offset_at("t", at % QUEUES, at_ms=moments[at])

    by_time(0)
    times = milliseconds(offsets, LOOK_UPS)
    index = sum(file.stat().st_size for file in broker.engine.home.topics.rglob("*.index"))
    among = f"among {n:,}"
    return [
        Row(f"find a key {among}, p50", statistics.median(keys), "ms", 100),
        Row(f"find a key {among}, the slowest of {LOOK_UPS}", max(keys), "ms"),
        Row(f"find a message id {among}, p50", statistics.median(found_ids), "ms", 100),
        Row(f"offset by time {among}, p50", statistics.median(times), "ms", 10),
        Row(f"offset by time {among}, the slowest of {LOOK_UPS}", max(times), "ms"),
        Row(f"body of a feed, {n:,} messages", FEED_BYTES, "B"),
        Row("its message in the log's memory", report["raw_bytes"] / n, "B"),
        Row("its message in segments", report["bytes"] / n, "B"),
        Row("its message in their index", index / n, "B"),
    ]


def _receives_ms(brokers: list[tuple[Broker, int]]) -> list[float]:
    """The median receive of a group that reads the end of the topic, of each broker in turn."""
    back = 2 * RECEIVES * RECEIVED // QUEUES
    taken: list[list[float]] = [[] for _ in brokers]
    for broker, n in brokers:
        broker.create_group("g")
        for queue_id in range(QUEUES):
            broker.reset_offset("g", "t", to_offset=max(0, n // QUEUES - back), queue_id=queue_id)
    for turn in range(RECEIVES // 10):
        for (broker, _), found in zip(brokers, taken, strict=True):

            def receive(_: int, broker: Broker = broker) -> None:
                assert broker.receive("g", "t", limit=RECEIVED).num_rows == RECEIVED

            some = milliseconds(receive, 10)
            # The first ones load what the others find loaded.
            found.extend(some if turn else [])
    return [statistics.median(found) for found in taken]


MEASUREMENTS: dict[str, Measurement] = {
    "sealing": sealing,
    "looking-up": looking_up,
    "replaying": replaying,
}


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    return run(MEASUREMENTS, title="The log as a table", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
