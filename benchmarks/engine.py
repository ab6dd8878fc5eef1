"""The broker's engine measured: 1 KiB random bodies, each answer after a sync.

The limit of a row is measured beside it: as many bytes as the row wrote, written as often to a file
of a commit log on the same disk. Most rows are bursts, and leave out what dispatch does afterwards;
the sustained ones go on for seconds, and end when all messages can be queried. In process the row
shares its interpreter with dispatch; through Flight the broker is a process of its own.
``python -m benchmarks.engine --help`` for the sizes.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from benchmarks.measured import (
    Bench,
    Measurement,
    Row,
    bodies,
    run,
    seconds,
    send_patiently,
    synced_per_s,
    with_broker,
)
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client

BODY_BYTES = 1024
BATCH = 1000
#: Different batches that are sent in turn.
BATCHES = 16
#: Callers of the rows that say so: what one prepares, another one's frame is written meanwhile.
CALLERS = 4
#: Receives that wait for the same messages, each in a thread.
WAITING = 500
#: A row is measured this often, and its median is told.
ROUNDS = 3
#: For how long sends are timed one by one; before --scale.
TIMED_S = 8
#: For how long a sustained row goes on; before --scale.
SUSTAINED_S = 10
#: Writes of their limit.
LIMIT_WRITES = 3000


def batch(n: int, *, groups: int = 0) -> pa.Table:
    """``n`` messages of random bytes; with groups, dealt in turn."""
    columns: dict[str, pa.Array] = {"body": bodies(n, BODY_BYTES)}
    if groups:
        columns["message_group"] = pa.array([f"group-{i % groups}" for i in range(n)])
    return pa.table(columns)


def single_sends(bench: Bench) -> Row:
    """One caller, one message at a time."""
    bench.broker.ensure_topic("single")
    tables = [batch(1) for _ in range(BATCHES)]

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
    tables = [batch(BATCH, groups=groups) for _ in range(BATCHES)]

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


def sustained_sends(bench: Bench, rows: int) -> Row:
    """One caller for seconds, until dispatch has read all."""
    topic = f"sustained-{rows}"
    bench.broker.ensure_topic(topic)
    tables = [batch(rows) for _ in range(BATCHES)]
    until, sent = time.perf_counter() + SUSTAINED_S * bench.scale, 0
    start = bench.broker.engine.log.end
    with seconds() as taken:
        while time.perf_counter() < until:
            send_patiently(bench.broker, topic, messages=tables[sent % BATCHES])
            sent += 1
        bench.settled()
    written = bench.broker.engine.log.end - start
    limit = synced_per_s(bench.folder, times=min(sent, LIMIT_WRITES), size=written // sent)
    return Row(f"send {rows:,}, sustained", sent * rows / taken[0], "msg/s", None, limit * rows)


def _rounds(bench: Bench, run: Callable[[int], None], *, times: int) -> tuple[float, float]:
    """The median rates per second of ``run`` and of its limit, measured in turn."""
    rates, limits = [], []
    for _ in range(ROUNDS):
        bench.settled()
        start = bench.broker.engine.log.end
        with seconds() as taken:
            run(times)
        rates.append(times / taken[0])
        written = bench.broker.engine.log.end - start
        bench.settled()
        limits.append(bench.limit(times, written))
    return float(np.median(rates)), float(np.median(limits))


def receive_and_ack(
    bench: Bench, *, limit: int, groups: int, target: float, by_queue: bool = False
) -> Row:
    """Receive full tables and ack them, one caller, until all messages are settled."""
    topic = f"received-{limit}-{groups}" + ("-by-queue" if by_queue else "")
    bench.broker.ensure_topic(topic, type="fifo" if groups else "normal")
    group = f"{topic}-group"
    order = "message_group" if groups else "queue" if by_queue else "none"
    bench.broker.ensure_group(group, order=order)
    tables = [batch(BATCH, groups=groups) for _ in range(BATCHES)]
    times = bench.count(1000 if limit < BATCH else 100)
    per_round = -(-times * limit // BATCH)

    def take(times: int) -> None:
        for _ in range(times):
            received = bench.broker.receive(group, topic, limit=limit)
            assert received.num_rows == limit, received.num_rows
            assert len(received["body"][limit - 1].as_py()) == BODY_BYTES
            bench.broker.ack(received)

    warm_up = 5
    for i in range(per_round * ROUNDS + warm_up * limit // BATCH + 10):
        send_patiently(bench.broker, topic, messages=tables[i % BATCHES])
    take(warm_up)
    rate, allowed = _rounds(bench, take, times=times)
    name = f"receive {limit:,} + ack {limit:,}" + (f", fifo {groups:,} groups" if groups else "")
    name += ", order by queue" if by_queue else ""
    return Row(name, rate * limit, "msg/s", target, allowed * limit / 2)


def mixed_sends(bench: Bench) -> Row:
    """Single sends beside a publisher of 1,000s, a consumer of 1,000s and SQL, p99."""
    broker = bench.broker
    for topic in ("mixed", "mixed-batches"):
        broker.ensure_topic(topic)
    broker.ensure_group("mixed-group")
    tables = [batch(BATCH) for _ in range(BATCHES)]
    one = [batch(1) for _ in range(BATCHES)]
    over = threading.Event()
    counts = {"published": 0, "consumed": 0, "queries": 0}

    def publish() -> None:
        while not over.is_set():
            send_patiently(
                broker, "mixed-batches", messages=tables[counts["published"] // BATCH % BATCHES]
            )
            counts["published"] += BATCH

    def consume() -> None:
        while not over.is_set():
            received = broker.receive("mixed-group", "mixed-batches", limit=BATCH, wait_ms=100)
            broker.ack(received)
            counts["consumed"] += received.num_rows

    def query() -> None:
        while not over.is_set():
            broker.sql("SELECT topic, count(*), max(stored_at_ms) FROM messages GROUP BY topic")
            counts["queries"] += 1

    threads = [threading.Thread(target=work) for work in (publish, consume, query)]
    for thread in threads:
        thread.start()
    p99 = _p99_ms(bench, lambda i: broker.send("mixed", one[i % BATCHES]))
    over.set()
    for thread in threads:
        thread.join()
    name = (
        f"send 1 beside {counts['published'] / TIMED_S / bench.scale:,.0f}/s published, "
        f"{counts['consumed'] / TIMED_S / bench.scale:,.0f}/s consumed, "
        f"{counts['queries']} queries: p99"
    )
    return Row(name, p99, "ms", 10)


def lone_sends(bench: Bench) -> Row:
    """Single sends of one caller and nothing beside it but dispatch, p99."""
    bench.broker.ensure_topic("lone")
    one = [batch(1) for _ in range(BATCHES)]
    p99 = _p99_ms(bench, lambda i: bench.broker.send("lone", one[i % BATCHES]))
    return Row("send 1, one caller: p99", p99, "ms")


def _p99_ms(bench: Bench, send: Callable[[int], object]) -> float:
    """How long a send takes at the 99th percentile; ``send`` gets its number."""
    taken: list[float] = []
    until = time.perf_counter() + TIMED_S * bench.scale
    while time.perf_counter() < until:
        start = time.perf_counter()
        send(len(taken))
        taken.append(time.perf_counter() - start)
    return float(np.quantile(taken, 0.99)) * 1000


def flight_sends(bench: Bench) -> Row:
    """Batches of 1,000 through the endpoint, from this process to the broker's."""
    home = bench.folder / "served"
    process.start(home, upkeep="none")
    try:
        with Client(home=home) as client:
            client.create_topic("batches")
            tables = [batch(BATCH) for _ in range(BATCHES)]
            rates = []
            for batches in (10, *[bench.count(120)] * ROUNDS):
                with seconds() as taken:
                    for i in range(batches):
                        client.send("batches", tables[i % BATCHES])
                rates.append(batches * BATCH / taken[0])
                client.sql("SELECT count(*) FROM messages")
    finally:
        process.stop(home)
    limit = bench.limit(120, 120 * BATCH * (BODY_BYTES + 100)) * BATCH
    return Row(f"send {BATCH:,} through Flight", float(np.median(rates[1:])), "msg/s", 1e5, limit)


def waited_for(bench: Bench) -> Row:
    """Messages sent one by one to many receives that wait, as a share of one that waits alone."""
    n = bench.count(1000)
    many, alone = (_handed_over(bench, receives, messages=n) for receives in (WAITING, 1))
    return Row(f"send 1 to {WAITING} waiting receives", many, "msg/s", 0.4, alone)


def _handed_over(bench: Bench, receives: int, *, messages: int) -> float:
    """Messages that are sent to waiting receives, and leased by them, per second."""
    topic = f"waited-{receives}"
    bench.broker.ensure_topic(topic)
    bench.broker.ensure_group("waiting")
    bench.broker.subscribe("waiting", topic)
    done = threading.Event()
    arrived = threading.Semaphore(0)

    def receive() -> None:
        while not done.is_set():
            found = bench.broker.receive("waiting", topic, wait_ms=5000)
            arrived.release(len(found)) if len(found) else None

    table = batch(1)
    with ThreadPoolExecutor(receives) as pool:
        for _ in range(receives):
            pool.submit(receive)
        time.sleep(1.0)
        with seconds() as taken:
            for _ in range(messages):
                bench.broker.send(topic, table)
            for _ in range(messages):
                arrived.acquire()
        done.set()
    return messages / taken[0]


MEASUREMENTS: dict[str, Callable[[Bench], Row]] = {
    "single": single_sends,
    "single-p99": lone_sends,
    "batch": lambda b: batch_sends(b, groups=0, callers=1, target=None),
    "batch-callers": lambda b: batch_sends(b, groups=0, callers=CALLERS, target=0.6),
    "batch-groups": lambda b: batch_sends(b, groups=1000, callers=1, target=None),
    "batch-groups-callers": lambda b: batch_sends(b, groups=1000, callers=CALLERS, target=0.6),
    "sustained-single": lambda b: sustained_sends(b, 1),
    "sustained-batch": lambda b: sustained_sends(b, BATCH),
    "receive-32": lambda b: receive_and_ack(b, limit=32, groups=0, target=25_000),
    "receive-1000": lambda b: receive_and_ack(b, limit=1000, groups=0, target=200_000),
    "fifo-32": lambda b: receive_and_ack(b, limit=32, groups=1000, target=15_000),
    "fifo-1000": lambda b: receive_and_ack(b, limit=1000, groups=1000, target=100_000),
    "by-queue-1000": lambda b: receive_and_ack(
        b, limit=1000, groups=0, target=100_000, by_queue=True
    ),
    "waiting": waited_for,
    "mixed": mixed_sends,
    "flight": flight_sends,
}


def _alone(measure: Callable[[Bench], Row]) -> Measurement:
    return with_broker(lambda bench: [measure(bench)])


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    measurements = {name: _alone(measure) for name, measure in MEASUREMENTS.items()}
    title = f"Engine: {BODY_BYTES:,} B bodies, sync flush"
    return run(measurements, title=title, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
