"""Sends to a broker whose commit log is in its home alone, or in a store too, in turns.

``python -m benchmarks.log_stores ADDRESS …`` takes empty databases, prefixes of buckets and streams
of NATS; the output names them by their place and scheme. Each turn measures all of them after each
other, because a busy machine changes from minute to minute.
"""

import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.replicating import engine_of
from rmq_pipeline.settings import Settings

TURNS: Final = 3
SENDS, BATCHES, BATCH = 100, 20, 1000
APPENDS, FRAME_BYTES = 200, 1500


def milliseconds(action: Callable[[int], object], times: int) -> float:
    """Median time of a call, which is told its number."""
    found = []
    for number in range(times):
        began = time.perf_counter()
        action(number)
        found.append((time.perf_counter() - began) * 1000)
    return statistics.median(found)


def measured(broker: Broker) -> tuple[float, float, float]:
    """Median of a single send in ms; messages/s in batches of one caller, and of four."""
    one = pa.table({"body": [secrets.token_bytes(1024)]})
    many = pa.table({"body": [secrets.token_bytes(1024)] * BATCH})

    def batches(_: int) -> None:
        for _ in range(BATCHES):
            broker.send("t", many)

    single = milliseconds(lambda _: broker.send("t", one), SENDS)
    rates = []
    for callers in (1, 4):
        began = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(batches, range(callers)))
        rates.append(callers * BATCHES * BATCH / (time.perf_counter() - began))
    return single, rates[0], rates[1]


def appending(address: str) -> float:
    """Median of an append to a store in ms, without a broker."""
    store = engine_of(address)(address, timeout_s=5.0, lease_s=60.0, home_format=1000)
    try:
        store.look()
        store.claim(seconds=None, force=True)
        last, frame = store.last(), secrets.token_bytes(FRAME_BYTES)
        end = last.end if last else 0
        return milliseconds(lambda n: store.append(end + n * FRAME_BYTES, frame), APPENDS)
    finally:
        store.close()


def named(address: str | None, number: int) -> str:
    """Return the name of a store in the output."""
    return f"{number} {address.partition('://')[0]}" if address else "local"


def main() -> None:
    """Print a line for each store and turn."""
    stores = [None, *sys.argv[1:]]
    folder = Path(tempfile.mkdtemp(prefix="log-stores-"))
    for number, address in enumerate(stores):
        with Broker.open(
            folder / str(number), upkeep="none", settings=Settings(log_store=address)
        ) as broker:
            broker.create_topic("t", queues=4)
    for turn in range(TURNS):
        for number, address in enumerate(stores):
            settings = Settings(log_store=address)
            with Broker.open(folder / str(number), upkeep="none", settings=settings) as broker:
                single, alone, four = measured(broker)
            name = named(address, number)
            print(f"{turn} {name:12} {single:6.1f} ms {alone:9,.0f}/s {four:9,.0f}/s", flush=True)
    for number, address in enumerate(sys.argv[1:], 1):
        print(f"append {named(address, number):12} {appending(address):6.1f} ms", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
