"""Memory and start-up of a broker with a long history.

Five million stored messages (bodies of 100 bytes), two consumer groups that have read nothing, one
with 100,000 messages in flight, and one after five million acks. The home is built through the
broker's Flight endpoint, in batches; then the broker is stopped, started again and looked at: as it
is, and once with a million scheduled messages that wait for their time.
``python benchmarks/memory.py --help`` for the sizes.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.measured import Row
from rmq_pipeline import limits
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import DispatchBehindError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client

BODY_BYTES = 100
BATCH = 20_000
TOPIC = "stored"
GROUPS = ("idle-1", "idle-2", "busy", "done")
MEMORY_MB = 700
START_S = 5.0
#: What a million scheduled messages may cost, against none.
PENDING_FACTOR = 2.0
PENDING = "pending"
START = "start, process and all"
MEMORY = "memory after the start"


def main() -> int:
    """Build, measure, print; the exit code says whether the targets were met."""
    arguments = _arguments()
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix=".rmq-memory-", dir=arguments.home or Path.cwd()))
    home = folder / "home"
    rows = []
    try:
        process.start(home, upkeep="none")
        with Client(home=home) as client:
            build(client, arguments.messages, in_flight=arguments.in_flight, console=console)
            rows.append(Row("memory after building it", resident_mb(home), "MB", MEMORY_MB))
        process.stop(home)
        rows.extend(started(home, arguments.messages, in_flight=arguments.in_flight))
        rows.extend(pending(home, arguments.pending, none=rows))
        rows.append(Row("disk: log", _megabytes(home / "log"), "MB"))
        rows.append(Row("disk: database", _megabytes(home / "state.duckdb"), "MB"))
    finally:
        process.stop(home)
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        facts = [{**asdict(row), "met": row.met} for row in rows]
        print(json.dumps({"rows": facts, "load": os.getloadavg()}, indent=2))
    else:
        Console().print(_table(rows, arguments.messages))
    return 0 if all(row.met for row in rows) else 1


def build(client: Client, messages: int, *, in_flight: int, console: Console) -> None:
    """Fill the home."""
    client.create_topic(TOPIC)
    for group in GROUPS:
        client.create_group(group)
        client.subscribe(group, TOPIC)
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        sent = bar.add_task("sent", total=messages)
        for start in range(0, messages, BATCH):
            _send(client, min(BATCH, messages - start))
            bar.advance(sent, min(BATCH, messages - start))
        acked = bar.add_task("acked", total=messages)
        while not bar.tasks[acked].finished:
            received = client.receive("done", TOPIC, limit=limits.RECEIVE_ROWS)
            client.ack(received.select(["receipt_handle"]))
            bar.advance(acked, received.num_rows)
        leased = bar.add_task("leased", total=in_flight)
        while left := int(bar.tasks[leased].remaining or 0):
            received = client.receive(
                "busy", TOPIC, limit=left, invisible_duration_ms=limits.INVISIBLE_MAX_MS
            )
            bar.advance(leased, received.num_rows)


def _send(client: Client, n: int, *, topic: str = TOPIC, due_ms: np.ndarray | None = None) -> None:
    offsets = np.arange(0, (n + 1) * BODY_BYTES, BODY_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(n * BODY_BYTES))]
    messages = pa.table({"body": pa.Array.from_buffers(pa.binary(), n, buffers)})
    if due_ms is not None:
        messages = messages.append_column("deliver_at_ms", pa.array(due_ms))
    while True:
        try:
            client.send(topic, messages)
        except DispatchBehindError:
            time.sleep(0.1)
        else:
            return


def started(home: Path, messages: int, *, in_flight: int) -> list[Row]:
    """Start the broker again: how long that takes, and what memory it takes, idle and in use."""
    start = time.perf_counter()
    process.start(home)
    seconds = time.perf_counter() - start
    idle_mb = resident_mb(home)
    with Client(home=home) as client:
        assert client.due()["groups"]["busy"]["topics"][TOPIC]["unsettled"] == in_flight
        lag = client.sql("SELECT consumer_group, sum(lag)::BIGINT AS lag FROM lag GROUP BY ALL")
        expected = dict.fromkeys(GROUPS, messages) | {"done": 0}
        assert dict(zip(*lag.to_pydict().values(), strict=True)) == expected
        for group in ("idle-1", "idle-2"):
            received = client.receive(group, TOPIC, limit=1000)
            assert received.num_rows
            client.ack(received)
    return [
        Row(START, seconds, "s", START_S),
        Row(MEMORY, idle_mb, "MB", MEMORY_MB),
        Row("memory after a query and receives", resident_mb(home), "MB", MEMORY_MB),
    ]


def pending(home: Path, messages: int, *, none: list[Row]) -> list[Row]:
    """The same with scheduled messages that wait for their time, months ahead.

    Args:
        none: what was measured without them.
    """
    known = {row.name: row.value for row in none}
    ahead_ms = 90 * 24 * 3600 * 1000
    with Client(home=home) as client:
        client.create_topic(PENDING, type="delay")
        due_ms = int(time.time() * 1000) + ahead_ms
        random = np.random.default_rng(1)
        for start in range(0, messages, BATCH):
            n = min(BATCH, messages - start)
            _send(client, n, topic=PENDING, due_ms=due_ms + random.integers(0, ahead_ms, n))
        client.sql("SELECT count(*) FROM scheduled")
    process.stop(home)
    start_s = time.perf_counter()
    process.start(home)
    seconds = time.perf_counter() - start_s
    memory_mb = resident_mb(home)
    with Client(home=home) as client:
        assert client.status()["scheduled"] == messages
    what = f"{messages:,} scheduled pending"
    return [
        Row(f"start, {what}", seconds, "s", START_S),
        Row(f"memory, {what}", memory_mb, "MB", MEMORY_MB),
        Row("start, against none pending", seconds / known[START], "×", PENDING_FACTOR),
        Row("memory, against none pending", memory_mb / known[MEMORY], "×", PENDING_FACTOR),
    ]


def resident_mb(home: Path) -> float:
    """Resident memory of the home's broker."""
    endpoint = Endpoint.read(home)
    assert endpoint is not None
    return float(psutil.Process(endpoint.pid).memory_info().rss / 1e6)


def _megabytes(path: Path) -> float:
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(file.stat().st_blocks * 512 for file in files) / 1e6


def _table(rows: list[Row], messages: int) -> Table:
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    title = f"{messages:,} stored messages of {BODY_BYTES} B, {os.cpu_count()} cores"
    table = Table(title=title, caption=f"Load average {load}.")
    for name in ("measured", "value", "target", ""):
        table.add_column(name, justify="left" if name == "measured" else "right")
    for row in rows:
        target = "" if row.target is None else f"≤ {row.target:g} {row.unit}"
        verdict = "" if row.target is None else "[green]met[/]" if row.met else "[red]missed[/]"
        digits = {"s": 1, "×": 2}.get(row.unit, 0)
        table.add_row(row.name, f"{row.value:,.{digits}f} {row.unit}", target, verdict)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--in-flight", type=int, default=100_000)
    parser.add_argument("--pending", type=int, default=1_000_000, help="scheduled messages")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--home", type=Path, default=None, help="where to write: its disk counts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
