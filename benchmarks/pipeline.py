"""The pipeline measured: consumers drain a million messages, and answer a single one.

Windows are Spark's, as of ``@spark_consumer``, and on threads, as of ``@python_consumer``. The
broker is a process of its own, reached at its Flight endpoint. Spark is local[2] in this process;
its session is started and its Python workers are warm before a clock runs.
``python benchmarks/pipeline.py --help`` for the sizes.
"""

import argparse
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil
import pyarrow as pa

from rmq_pipeline.consumer import window as threads
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling import sink
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.spec import DEFAULT_BATCH_ROWS
from rmq_pipeline.spark import session
from rmq_pipeline.spark.consumer import BatchReport, ConsumerSpec, WindowReport, run_window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINK = pa.schema(
    [
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_group", pa.string()),
        ("born_at_ms", pa.int64()),
        ("body", pa.binary()),
    ]
)
COLUMNS = SINK.names
BODY_BYTES = 200
SEND_ROWS = 50_000
DRAINED_PER_S = 60_000
ANSWERED_WITHIN_S = 1.0
LATE_P99_MS = 50
ENGINES: Final = ("spark", "threads")
#: As @python_consumer has it.
THREAD_BATCH: Final = 20_000
#: Of the handler that waits: a call, as for an answer of another service.
WAIT_S: Final = 0.005
WAITING_THREADS: Final = 32


def copied(messages: pa.Table, _: pa.Table) -> Outcome:
    """The trivial handler: every message becomes a row of the sink."""
    return Outcome(rows=messages.select(COLUMNS))


def waited(messages: pa.Table, _: pa.Table) -> Outcome:
    """A handler that waits for somebody else, once a call."""
    time.sleep(WAIT_S)
    return Outcome(rows=messages.select(COLUMNS))


@dataclass(frozen=True)
class Bench:
    """What every measurement uses."""

    client: Client
    folder: Path
    #: Of Spark's engine.
    spark: "SparkSession | None" = None

    @property
    def engine(self) -> str:
        """What the windows are of."""
        return "threads" if self.spark is None else "spark"

    def consumer(self, topic: str, handler: Handler = copied) -> ConsumerSpec:
        """An ordered consumer of a new topic, with a sink."""
        self.client.create_topic(topic, type="fifo")
        self.client.create_group(f"{topic}-group", order="message_group")
        return ConsumerSpec(
            name=f"copied_{topic}",
            topic=topic,
            group=f"{topic}-group",
            handler=handler,
            order_by="message_group",
            sink=self.folder / topic,
            sink_schema=SINK,
            max_batch=THREAD_BATCH if self.spark is None else DEFAULT_BATCH_ROWS,
        )

    def window(
        self,
        spec: ConsumerSpec,
        *,
        idle_s: float,
        on_batch: Callable[[BatchReport], None],
        parallelism: int = 8,
    ) -> WindowReport:
        """A window of the consumer, until it is idle; parallelism: of threads."""
        if (spark := self.spark) is None:
            return threads.run_window(
                spec,
                self.client,
                owner="bench",
                idle_s=idle_s,
                on_batch=on_batch,
                parallelism=parallelism,
            )
        return run_window(
            spec,
            self.client,
            spark=lambda: spark,
            owner="bench",
            idle_s=idle_s,
            on_batch=on_batch,
        )

    def broker_mb(self) -> float:
        """Resident memory of the broker."""
        endpoint = Endpoint.read(self.folder / "home")
        assert endpoint is not None
        return float(psutil.Process(endpoint.pid).memory_info().rss / 1e6)


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="rmq-bench-", dir=arguments.folder))
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} cores")
    process.start(folder / "home", upkeep="none")
    met = True
    try:
        with Client(home=folder / "home") as client:
            if "spark" in arguments.engines:
                met &= report_spark(client, folder, arguments=arguments)
            if "threads" in arguments.engines:
                bench = Bench(client, folder)
                met &= report_engine(bench, arguments)
                report_waiting(bench, arguments.waiting)
            met &= report_scheduled(client, arguments.scheduled)
    finally:
        process.stop(folder / "home")
        shutil.rmtree(folder, ignore_errors=True)
    print("targets met" if met else "TARGETS MISSED")
    return 0 if met else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, nargs="*", default=[4_000, 200_000])
    parser.add_argument("--singles", type=int, default=20, help="messages one at a time")
    parser.add_argument("--scheduled", type=int, default=2_000, help="messages with a delay")
    parser.add_argument("--waiting", type=int, default=16_000, help="messages whose handler waits")
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES)
    parser.add_argument("--folder", type=Path, default=None, help="where to write: its disk counts")
    return parser.parse_args()


def report_spark(client: Client, folder: Path, *, arguments: argparse.Namespace) -> bool:
    """All of Spark's windows, in a session that is warm."""
    spark = session.start()
    print(f"spark {spark.version} local[2]")
    try:
        bench = Bench(client, folder, spark)
        started = time.perf_counter()
        drain(bench, topic="warm", messages=2_000, groups=500)
        print(f"first micro-batch of the session: {time.perf_counter() - started:.1f} s")
        return report_engine(bench, arguments)
    finally:
        spark.stop()


def report_engine(bench: Bench, arguments: argparse.Namespace) -> bool:
    """How fast an engine is, with many messages and with one."""
    met = True
    for groups in arguments.groups:
        met &= report_drain(bench, messages=arguments.messages, groups=groups)
    return met & report_single(bench, arguments.singles)


def report_waiting(bench: Bench, messages: int) -> None:
    """How well threads wait side by side: a message a group, a wait for each."""
    _, drained_s, _ = drain(
        bench,
        topic="waiting",
        messages=messages,
        groups=messages,
        handler=waited,
        parallelism=WAITING_THREADS,
    )
    calls = len(set(sink.read_sink(bench.folder / "waiting")["message_group"].to_pylist()))
    ideal_s = calls * WAIT_S / WAITING_THREADS
    print(
        f"threads: {messages:,} messages in {calls:,} groups, a wait of {WAIT_S * 1000:.0f} ms "
        f"for each group, {WAITING_THREADS} threads: {drained_s:.2f} s (ideal {ideal_s:.2f} s)"
    )


def report_drain(bench: Bench, *, messages: int, groups: int) -> bool:
    """How fast the messages are handled in order, settled and in the sink."""
    topic = f"drain-{bench.engine}-{groups}"
    sent_s, drained_s, report = drain(bench, topic=topic, messages=messages, groups=groups)
    rows, violations = order_in_sink(bench.folder / topic)
    rate = messages / drained_s
    print(
        f"{bench.engine}: {messages:,} messages of {BODY_BYTES} B in {groups:,} groups: sent at "
        f"{messages / sent_s:,.0f}/s, drained at {rate:,.0f}/s "
        f"(target in Spark {DRAINED_PER_S:,}); "
        f"{report.batches} micro-batches, {report.files} files, {report.bytes / 1e6:,.0f} MB, "
        f"{rows:,} rows, {violations} order violations; broker {bench.broker_mb():,.0f} MB"
    )
    fast_enough = rate >= DRAINED_PER_S or bench.spark is None
    return fast_enough and violations == 0 and rows == messages


def drain(
    bench: Bench,
    *,
    topic: str,
    messages: int,
    groups: int,
    handler: Handler = copied,
    parallelism: int = 8,
) -> tuple[float, float, WindowReport]:
    """Send, then drain in one window: seconds of both, the second up to the last settle."""
    spec = bench.consumer(topic, handler)
    random = np.random.default_rng(7)
    started = time.perf_counter()
    for start in range(0, messages, SEND_ROWS):
        n = min(SEND_ROWS, messages - start)
        bench.client.send(topic, _messages(random, n, groups=groups))
    sent_at = time.perf_counter()
    settled_at: list[float] = []
    report = bench.window(
        spec,
        idle_s=1.0,
        on_batch=lambda _: settled_at.append(time.perf_counter()),
        parallelism=parallelism,
    )
    return sent_at - started, settled_at[-1] - sent_at, report


def _messages(random: np.random.Generator, n: int, *, groups: int) -> pa.Table:
    offsets = np.arange(0, (n + 1) * BODY_BYTES, BODY_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(random.bytes(n * BODY_BYTES))]
    names = [f"group-{i}" for i in random.integers(0, groups, n)]
    return pa.table(
        {"body": pa.Array.from_buffers(pa.binary(), n, buffers), "message_group": names}
    )


def order_in_sink(folder: Path) -> tuple[int, int]:
    """Rows of a sink, and how many stand before an earlier message of their group."""
    rows = sink.read_sink(folder, columns=["message_group", "queue_offset"]).combine_chunks()
    groups = rows["message_group"].combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.argsort(groups, kind="stable")
    same = np.diff(groups[order]) == 0
    falls = np.diff(rows["queue_offset"].to_numpy()[order]) <= 0
    return rows.num_rows, int(np.sum(same & falls))


def report_single(bench: Bench, n: int) -> bool:
    """How long a running window takes from a send to the row in the sink."""
    topic = f"single-{bench.engine}"
    spec = bench.consumer(topic)
    done: queue.Queue[float] = queue.Queue()
    window = threading.Thread(
        target=bench.window,
        args=(spec,),
        kwargs={"idle_s": 3.0, "on_batch": lambda _: done.put(time.perf_counter())},
    )
    window.start()
    seconds = []
    for i in range(n + 1):
        sent_at = time.perf_counter()
        bench.client.send(topic, pa.table({"body": [b"one"], "message_group": [f"g{i % 3}"]}))
        seconds.append(done.get(timeout=60) - sent_at)
    window.join()
    # The first one waits for the window to open.
    p50, worst = np.median(seconds[1:]), max(seconds[1:])
    print(
        f"{bench.engine}: one message in a running window: p50 {p50:.3f} s, longest of {n} "
        f"{worst:.2f} s "
        f"(target {ANSWERED_WITHIN_S} s)"
    )
    return bool(worst <= ANSWERED_WITHIN_S)


def report_scheduled(client: Client, n: int) -> bool:
    """How late a running delivery window is."""
    client.create_topic("later", type="delay")
    now_ms = time.time_ns() // 1_000_000
    due = np.random.default_rng(11).integers(now_ms + 2_000, now_ms + 12_000, n)
    client.send("later", pa.table({"body": [b"x"] * n, "deliver_at_ms": due}))
    delivered = 0
    while delivered < n:
        delivered += client.deliver_scheduled(wait_ms=5_000)["delivered"]
    late = np.concatenate([_lateness(client, queue_id) for queue_id in range(8)])
    p50, p99 = np.quantile(late, [0.5, 0.99])
    print(
        f"{n:,} scheduled messages in a running window: late p50 {p50:.0f} ms, p99 {p99:.0f} ms "
        f"(target {LATE_P99_MS} ms), longest {late.max()} ms, early {int(np.sum(late < 0))}"
    )
    return len(late) == n and p99 <= LATE_P99_MS and bool(late.min() >= 0)


def _lateness(client: Client, queue_id: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    messages = client.read("later", queue_id, offset=0, limit=100_000)
    late: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        messages["stored_at_ms"].to_numpy() - messages["deliver_at_ms"].to_numpy()
    )
    return late


if __name__ == "__main__":
    sys.exit(main())
