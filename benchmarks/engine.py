"""The broker's engine measured: 1 KiB random bodies, each answer after a sync.

The limit of a row is measured beside it: as many bytes as the row wrote to the commit log, appended
to a new file of the same disk and synced (fdatasync) as often. In process the row shares its
interpreter with dispatch; through Flight the broker is a process of its own.
``python benchmarks/engine.py --help`` for the sizes.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import DispatchBehindError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.serve import SWITCH_INTERVAL_S, calm_garbage_collection

BODY_BYTES = 1024
BATCH = 1000
#: Different batches that are sent in turn.
BATCHES = 16
#: Callers of the rows that say so: what one prepares, another one's frame is written meanwhile.
CALLERS = 4
#: A row is measured this often, and its median is told.
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One line of the result; rates are per second, and ``limit`` is one unless said otherwise."""

    name: str
    value: float
    unit: str
    #: At least this, or at most for milliseconds; as a share of the limit when it is below 1; None:
    #: told for comparison.
    target: float | None
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        """The share of the limit."""
        return self.value / self.limit if self.limit else None

    @property
    def met(self) -> bool:
        """Whether the target was."""
        if self.target is None:
            return True
        if self.unit == "ms":
            return self.value <= self.target
        return (self.ratio or 0.0 if self.target < 1 else self.value) >= self.target


@dataclass(frozen=True)
class Bench:
    """What every measurement uses."""

    folder: Path
    broker: Broker
    #: Everything is measured this many times as long.
    scale: float

    def count(self, n: int) -> int:
        """How many of something, at this scale."""
        return max(1, int(n * self.scale))

    def limit(self, times: int, written: int) -> float:
        """Appends of ``written`` bytes in so many parts, each synced: per second."""
        path = self.folder / "limit"
        data = os.urandom(max(1, written // times))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with _seconds() as seconds:
                for _ in range(times):
                    os.write(descriptor, data)
                    os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()
        return times / seconds[0]

    def settled(self) -> None:
        """Dispatch has nothing left to do that would be counted with the next measurement."""
        self.broker.engine.dispatched()


@contextmanager
def _seconds() -> Iterator[list[float]]:
    """How long the block took, once it is over."""
    taken: list[float] = []
    start = time.perf_counter()
    yield taken
    taken.append(time.perf_counter() - start)


def bodies(n: int, *, groups: int = 0) -> pa.Table:
    """``n`` messages of random bytes; with groups, dealt in turn."""
    offsets = np.arange(0, (n + 1) * BODY_BYTES, BODY_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(n * BODY_BYTES))]
    columns = {"body": pa.Array.from_buffers(pa.binary(), n, buffers)}
    if groups:
        columns["message_group"] = pa.array([f"group-{i % groups}" for i in range(n)])
    return pa.table(columns)


def single_sends(bench: Bench) -> Row:
    """One caller, one message at a time."""
    bench.broker.ensure_topic("single")
    tables = [bodies(1) for _ in range(BATCHES)]

    def send(times: int) -> None:
        for i in range(times):
            bench.broker.send("single", tables[i % BATCHES])

    send(100)
    rate, limit = _rounds(bench, send, times=bench.count(3000))
    return Row("send 1, one caller", rate, "msg/s", 2000, limit)


def batch_sends(bench: Bench, *, groups: int, callers: int, target: float | None) -> Row:
    """Batches of 1,000, as a share of the limit."""
    topic = f"batches-{groups}"
    bench.broker.ensure_topic(topic, type="fifo" if groups else "normal")
    tables = [bodies(BATCH, groups=groups) for _ in range(BATCHES)]

    def send_some(times: int) -> None:
        for i in range(times):
            bench.broker.send(topic, tables[i % BATCHES])

    def send(times: int) -> None:
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(send_some, [times // callers] * callers))

    send(10 * callers)
    rate, limit = _rounds(bench, send, times=bench.count(120) // callers * callers)
    name = f"send {BATCH:,}" + (f", {groups:,} message groups" if groups else "")
    name += f", {callers} callers" if callers > 1 else ", one caller"
    return Row(name, rate * BATCH, "msg/s", target, limit * BATCH)


def _rounds(bench: Bench, run: Callable[[int], None], *, times: int) -> tuple[float, float]:
    """The median rates per second of ``run`` and of its limit, measured in turn."""
    rates, limits = [], []
    for _ in range(ROUNDS):
        bench.settled()
        start = bench.broker.engine.log.end
        with _seconds() as seconds:
            run(times)
        rates.append(times / seconds[0])
        written = bench.broker.engine.log.end - start
        bench.settled()
        limits.append(bench.limit(times, written))
    return float(np.median(rates)), float(np.median(limits))


def receive_and_ack(bench: Bench, *, limit: int, groups: int, target: float) -> Row:
    """Receive full tables and ack them, one caller, until all messages are settled."""
    topic = f"received-{limit}-{groups}"
    bench.broker.ensure_topic(topic, type="fifo" if groups else "normal")
    group = f"{topic}-group"
    bench.broker.ensure_group(group, order="message_group" if groups else "none")
    tables = [bodies(BATCH, groups=groups) for _ in range(BATCHES)]
    times = bench.count(1000 if limit < BATCH else 100)
    per_round = -(-times * limit // BATCH)

    def take(times: int) -> None:
        for _ in range(times):
            received = bench.broker.receive(topic, group, limit=limit)
            assert received.num_rows == limit, received.num_rows
            assert len(received["body"][limit - 1].as_py()) == BODY_BYTES
            bench.broker.ack(received)

    warm_up = 5
    for i in range(per_round * ROUNDS + warm_up * limit // BATCH + 10):
        _patiently(bench.broker, topic, messages=tables[i % BATCHES])
    take(warm_up)
    rate, allowed = _rounds(bench, take, times=times)
    name = f"receive {limit:,} + ack {limit:,}" + (f", fifo {groups:,} groups" if groups else "")
    return Row(name, rate * limit, "msg/s", target, allowed * limit / 2)


def _patiently(broker: Broker | Client, topic: str, *, messages: pa.Table) -> None:
    """Send, and wait for dispatch when it is behind."""
    while True:
        try:
            broker.send(topic, messages)
        except DispatchBehindError:
            time.sleep(0.05)
        else:
            return


def mixed_sends(bench: Bench) -> Row:
    """Single sends beside a publisher of 1,000s, a consumer of 1,000s and SQL, p99."""
    broker = bench.broker
    for topic in ("mixed", "mixed-batches"):
        broker.ensure_topic(topic)
    broker.ensure_group("mixed-group")
    tables = [bodies(BATCH) for _ in range(BATCHES)]
    one = [bodies(1) for _ in range(BATCHES)]
    over = threading.Event()
    counts = {"published": 0, "consumed": 0, "queries": 0}

    def publish() -> None:
        while not over.is_set():
            _patiently(
                broker, "mixed-batches", messages=tables[counts["published"] // BATCH % BATCHES]
            )
            counts["published"] += BATCH

    def consume() -> None:
        while not over.is_set():
            received = broker.receive("mixed-batches", "mixed-group", limit=BATCH, wait_ms=100)
            broker.ack(received)
            counts["consumed"] += received.num_rows

    def query() -> None:
        while not over.is_set():
            broker.sql("SELECT topic, count(*), max(stored_at_ms) FROM messages GROUP BY topic")
            counts["queries"] += 1

    threads = [threading.Thread(target=work) for work in (publish, consume, query)]
    for thread in threads:
        thread.start()
    seconds: list[float] = []
    until = time.perf_counter() + 8 * bench.scale
    while time.perf_counter() < until:
        start = time.perf_counter()
        broker.send("mixed", one[len(seconds) % BATCHES])
        seconds.append(time.perf_counter() - start)
    over.set()
    for thread in threads:
        thread.join()
    name = (
        f"send 1 beside {counts['published'] / 8 / bench.scale:,.0f}/s published, "
        f"{counts['consumed'] / 8 / bench.scale:,.0f}/s consumed, {counts['queries']} queries: p99"
    )
    return Row(name, float(np.quantile(seconds, 0.99)) * 1000, "ms", 10)


def flight_sends(bench: Bench) -> Row:
    """Batches of 1,000 through the door, from this process to the broker's."""
    home = bench.folder / "served"
    process.start(home, upkeep="none")
    try:
        with Client(home=home) as client:
            client.create_topic("batches")
            tables = [bodies(BATCH) for _ in range(BATCHES)]
            rates = []
            for batches in (10, *[bench.count(120)] * ROUNDS):
                with _seconds() as seconds:
                    for i in range(batches):
                        client.send("batches", tables[i % BATCHES])
                rates.append(batches * BATCH / seconds[0])
                client.sql("SELECT count(*) FROM messages")
    finally:
        process.stop(home)
    limit = bench.limit(120, 120 * BATCH * (BODY_BYTES + 100)) * BATCH
    return Row(f"send {BATCH:,} through Flight", float(np.median(rates[1:])), "msg/s", 1e5, limit)


MEASUREMENTS: dict[str, Callable[[Bench], Row]] = {
    "single": single_sends,
    "batch": lambda b: batch_sends(b, groups=0, callers=1, target=None),
    "batch-callers": lambda b: batch_sends(b, groups=0, callers=CALLERS, target=0.6),
    "batch-groups": lambda b: batch_sends(b, groups=1000, callers=1, target=None),
    "batch-groups-callers": lambda b: batch_sends(b, groups=1000, callers=CALLERS, target=0.6),
    "receive-32": lambda b: receive_and_ack(b, limit=32, groups=0, target=25_000),
    "receive-1000": lambda b: receive_and_ack(b, limit=1000, groups=0, target=200_000),
    "fifo-32": lambda b: receive_and_ack(b, limit=32, groups=1000, target=15_000),
    "fifo-1000": lambda b: receive_and_ack(b, limit=1000, groups=1000, target=100_000),
    "mixed": mixed_sends,
    "flight": flight_sends,
}


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    arguments = _arguments()
    # As in the broker's process: what a busy thread and the collector cost everyone else.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    calm_garbage_collection()
    folder = Path(tempfile.mkdtemp(prefix=".rmq-bench-", dir=arguments.home or Path.cwd()))
    console = Console(stderr=True)
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console)
    rows = []
    try:
        # The callers are threads, as those of a door: the main thread has signals to handle.
        with ThreadPoolExecutor(1) as caller, bar:
            task = bar.add_task("")
            for name in arguments.only or MEASUREMENTS:
                bar.update(task, description=name)
                with Broker.open(folder / name, upkeep="none") as broker:
                    bench = Bench(folder, broker, arguments.scale)
                    rows.append(caller.submit(MEASUREMENTS[name], bench).result())
                shutil.rmtree(folder / name)
                if not arguments.json:
                    bar.console.print(_line(rows[-1]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load = os.getloadavg()
    if arguments.json:
        facts = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps({"rows": facts, "cores": os.cpu_count(), "load": load}, indent=2))
    else:
        Console().print(_table(rows, load))
    return 0 if all(row.met for row in rows) else 1


def _line(row: Row) -> str:
    return f"{'✓' if row.met else '✗'} {row.name}: {row.value:,.1f} {row.unit}"


def _table(rows: list[Row], load: tuple[float, float, float]) -> Table:
    title = f"Engine: {BODY_BYTES:,} B bodies, sync flush, {os.cpu_count()} cores"
    table = Table(title=title, caption=f"Load average {', '.join(f'{x:.1f}' for x in load)}.")
    for name in ("measured", "value", "target", "limit", "ratio", ""):
        table.add_column(name, justify="left" if name == "measured" else "right")
    for row in rows:
        relation = "≤" if row.unit == "ms" else "≥"
        share = row.target is not None and row.target < 1
        target = f"{row.target:.1f} × limit" if share else f"{row.target or 0:,.0f}"
        verdict = "[green]met[/]" if row.met else "[red]missed[/]"
        table.add_row(
            row.name,
            f"{row.value:,.1f} ms" if row.unit == "ms" else f"{row.value:,.0f}/s",
            f"{relation} {target}" if row.target else "",
            f"{row.limit:,.0f}/s" if row.limit else "",
            f"{row.ratio:.2f}" if row.ratio else "",
            verdict if row.target else "",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--only", nargs="*", choices=MEASUREMENTS, help="some measurements")
    parser.add_argument("--scale", type=float, default=1.0, help="measure so many times as long")
    parser.add_argument("--home", type=Path, default=None, help="where to write: its disk counts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
