"""Sends beside backups of a live home: their latency, and how long dispatch waits for a snapshot.

python -m benchmarks.backup [seconds]
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.flight.client import Client

RMQ = str(Path(sys.executable).with_name("rmq"))
#: 2,000 messages/s of 1 KiB.
BATCH, EVERY_S = 20, 0.01
FIELDS = pa.schema([schema.SEND.field("body")])


def main() -> None:
    """Measure quiet seconds, then seconds beside one backup after the other."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as folder:
        home, backups = Path(folder) / "home", Path(folder) / "backup"
        serve = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0", "--grpc", "none"]
        serve += ["--set", "seal_after_ms=5000"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as broker:
            assert broker.stdout is not None
            broker.stdout.readline()
            with Client(home=home) as client:
                client.create_topic("orders", queues=4)
                report("no backup", sent(client, seconds))
                over = threading.Event()
                taken: list[dict[str, float]] = []
                backing = threading.Thread(
                    target=back_up, args=(home, backups), kwargs={"over": over, "taken": taken}
                )
                backing.start()
                report("backups", sent(client, seconds))
                over.set()
                backing.join()
                for each in taken:
                    print({name: each[name] for name in sorted(each)})
                print("state.duckdb", (home / "state.duckdb").stat().st_size)
            broker.terminate()


def sent(client: Client, seconds: float) -> list[float]:
    """Send at the rate; return the latency of each call in ms."""
    bodies = pa.table({"body": [os.urandom(1024) for _ in range(BATCH)]}, schema=FIELDS)
    took, end = [], time.monotonic() + seconds
    while (started := time.monotonic()) < end:
        client.send("orders", bodies)
        took.append(1000 * (time.monotonic() - started))
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - started)))
    return took


def back_up(
    home: Path, backups: Path, *, over: threading.Event, taken: list[dict[str, float]]
) -> None:
    """Back up again and again; every third time to a new destination, with a new snapshot."""
    number = 0
    while not over.is_set():
        started = time.monotonic()
        to = backups / str(number // 3)
        command = [RMQ, "backup", str(to), "--home", str(home), "--json"]
        said = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        names = ("is_new_snapshot", "waited_ms", "written_bytes", "bytes")
        taken.append({"s": round(time.monotonic() - started, 2)} | {n: said[n] for n in names})
        number += 1


def report(name: str, took: list[float]) -> None:
    """Print the quantiles."""
    p50, p99, most = (float(np.quantile(took, q)) for q in (0.5, 0.99, 1.0))
    print(f"{name}: {len(took)} sends, p50 {p50:.2f} ms, p99 {p99:.1f} ms, max {most:.0f} ms")


if __name__ == "__main__":
    main()
