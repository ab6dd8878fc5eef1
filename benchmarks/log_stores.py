"""Sends to a broker whose commit log is in its home alone, or in a store too, in turns.

``python -m benchmarks.log_stores`` starts the stores on this machine: PostgreSQL, alone and with a
synchronous standby, SeaweedFS, and NATS, alone and with three servers. RabbitMQ and NATS JetStream
take the same sends directly. With addresses of empty databases, prefixes of buckets and streams of
NATS it measures those. Each turn measures all of them after each other, because a busy machine
changes from minute to minute.
"""

import contextlib
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa

from benchmarks.peers.driver import Driver, Kind
from benchmarks.peers.drivers.jetstream import JetStream
from benchmarks.peers.drivers.rabbitmq import RabbitMQ
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.replicating import engine_of
from rmq_pipeline.settings import Settings
from tests.log_stores import BucketLogs
from tests.nats_server import NatsCluster, NatsServer
from tests.object_store import ObjectStore
from tests.postgres_server import PostgresServer

TURNS: Final = 3
SENDS, BATCHES, BATCH = 100, 20, 1000
APPENDS = 100
#: Frames that are appended without a broker: of a single send, and of a batch.
FRAMES_BYTES: Final = (1500, 1_060_000)
#: Peers that take the same sends, over TCP; the broker is in this process.
_PEERS: Final[dict[str, type[Driver]]] = {"rabbitmq": RabbitMQ, "jetstream": JetStream}
_FOLDERS: Final = ("primary", "standby", "alone", "bucket", "one", "three")


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


def appending(address: str, frame_bytes: int) -> float:
    """Median of an append to a store in ms, without a broker."""
    store = engine_of(address)(address, timeout_s=5.0, lease_s=60.0, home_format=1000)
    try:
        store.look()
        store.claim(seconds=None, force=True)
        last, frame = store.last(), secrets.token_bytes(frame_bytes)
        end = last.end if last else 0
        return milliseconds(lambda n: store.append(end + n * frame_bytes, frame), APPENDS)
    finally:
        store.close()


def named(address: str | None, number: int) -> str:
    """Return the name of a store in the output."""
    return f"{number} {address.partition('://')[0]}" if address else "local"


def started(folder: Path, stack: contextlib.ExitStack) -> list[str]:
    """Start a server of each kind; return the addresses of empty logs in them."""
    primary, standby, alone, bucket, one, three = (folder / name for name in _FOLDERS)
    for each in (primary, standby, alone, bucket, one, three):
        each.mkdir(parents=True)
    single, first = PostgresServer(alone), PostgresServer(primary)
    stack.callback(single.stop)
    stack.callback(first.stop)
    second = PostgresServer(standby, follows=first)
    stack.callback(second.stop)
    database = first.new_database()
    first.commit_at_standby()
    objects = ObjectStore(bucket)
    stack.callback(objects.stop)
    os.environ.update(objects.environment)
    server = NatsServer(one)
    server.start()
    stack.callback(server.stop)
    cluster = NatsCluster(three)
    stack.callback(cluster.stop)
    return [
        single.new_database(),
        database,
        BucketLogs(objects).new(),
        f"nats://{server.address}/log?replicas=1",
        f"nats://{cluster.hosts}/log",
    ]


def directly(driver: Driver, folder: Path) -> tuple[float, float]:
    """Median of a single send to a peer in ms; messages/s in batches of one caller."""
    folder.mkdir(parents=True)
    try:
        driver.start(folder)
        driver.create("t", ["g"], kind=Kind.PLAIN)
        connection = driver.connect()
        bodies = [secrets.token_bytes(1024)] * BATCH
        single = milliseconds(lambda _: connection.send("t", bodies[:1]), SENDS)
        began = time.perf_counter()
        for _ in range(BATCHES):
            connection.send("t", bodies)
        rate = BATCHES * BATCH / (time.perf_counter() - began)
        connection.close()
    finally:
        driver.stop()
    return single, rate


def main() -> None:
    """Print a line for each store and turn."""
    folder = Path(tempfile.mkdtemp(prefix="log-stores-"))
    with contextlib.ExitStack() as stack:
        given = sys.argv[1:] or started(folder / "servers", stack)
        measure(given, folder, directly_too=not sys.argv[1:])
    shutil.rmtree(folder)


def measure(addresses: Sequence[str], folder: Path, *, directly_too: bool) -> None:
    """Print the figures of the stores at these addresses, and of a home alone."""
    stores = [None, *addresses]
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
        for name, peer in _PEERS.items() if directly_too else ():
            if (missing := peer.missing()) is not None:
                print(f"{turn} {name:12} {missing}", flush=True)
                continue
            single, alone = directly(peer(), folder / f"{name}-{turn}")
            print(f"{turn} {name:12} {single:6.1f} ms {alone:9,.0f}/s", flush=True)
    for number, address in enumerate(addresses, 1):
        small, large = (appending(address, each) for each in FRAMES_BYTES)
        print(f"append {named(address, number):12} {small:6.1f} ms {large:6.1f} ms", flush=True)


if __name__ == "__main__":
    main()
