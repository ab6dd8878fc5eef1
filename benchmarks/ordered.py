"""Consumers in a Python process, through the table endpoint, against a broker process.

One queue, and work that takes 5 ms a message, which is what 16 workers could do in 3.1 s if nothing
else took time: so much is the ideal of each row, or the time of its longest key where that is more.
Times are from before ``start`` until the broker knows of the last message.
``python -m benchmarks.ordered --help`` for the sizes.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from benchmarks.measured import BODY_BYTES, Measurement, Row, bodies, run
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client

WORKERS: Final = 16
MESSAGES: Final = 10_000
WORK_S: Final = 0.005
HANG_S: Final = 10.0
#: How much longer than the ideal it may take; and than without the key that hangs.
ALLOWED: Final = 1.10
ALLOWED_HUNG: Final = 1.05
#: Messages of one worker or queue, which has nobody to share with.
ALONE: Final = 500
NOTHING: Final = 200_000
NOTHING_PER_S: Final = 30_000
BATCH: Final = 32


@dataclass
class Run:
    """A consumer at work, from its start to its last message."""

    client: Client
    topic: str
    group: str
    messages: int
    keys: int
    started: float = 0.0
    #: When each key's last message was done.
    ended: dict[str, float] = field(default_factory=dict)

    def elapsed(self, keys: Sequence[str] = ()) -> float:
        """Until the last message (of these keys) was done."""
        return max(self.ended[key] for key in keys or self.ended) - self.started


@contextmanager
def broker(folder: Path) -> Iterator[Client]:
    """A broker in a process of its own."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=folder))
    try:
        process.start(home, upkeep="self")
        with Client(home=home) as client:
            yield client
    finally:
        process.stop(home)
        shutil.rmtree(home, ignore_errors=True)


def prepared(client: Client, messages: int, *, keys: int, order: str = "message_group") -> Run:
    """One queue of messages whose keys come in turns."""
    name = f"k{keys}-{order}-{messages}-{time.monotonic_ns()}"
    client.create_topic(name, type="fifo", queues=1)
    client.create_group(name, order=order)
    groups = [f"key-{i % keys}" for i in range(messages)]
    for start in range(0, messages, 10_000):
        stop = min(start + 10_000, messages)
        table = pa.table({"body": bodies(stop - start), "message_group": groups[start:stop]})
        client.send(name, table)
    return Run(client, name, name, messages, keys)


def consume(job: Run, work: Callable[[Sequence[ReceivedMessage]], None], **settings: Any) -> Run:
    """Let a consumer do its work on all messages, until the broker knows of each."""
    lock, done = threading.Lock(), threading.Event()
    left = [job.messages]

    def listener(messages: Sequence[ReceivedMessage], _context: object) -> str:
        work(messages)
        now = time.perf_counter()
        with lock:
            left[0] -= len(messages)
            for message in messages:
                job.ended[message.message_group or ""] = now
            if not left[0]:
                done.set()
        return "success"

    settings = {"threads": WORKERS, "start_from": "first", **settings}
    consumer = PushConsumer(job.client, job.group, **settings).subscribe(job.topic)
    job.started = time.perf_counter()
    with consumer.listen(listener):
        done.wait()
    unread = job.client.sql(f"SELECT sum(lag) FROM lag WHERE consumer_group = '{job.group}'")
    assert unread.column(0)[0].as_py() == 0, unread
    return job


def sleep_each(messages: Sequence[ReceivedMessage]) -> None:
    """The work: 5 ms a message."""
    for _ in messages:
        time.sleep(WORK_S)


def ideal_s(messages: int, keys: int) -> float:
    """What the workers need when nothing else takes time."""
    return WORK_S * max(messages / WORKERS, -(-messages // keys))


def threads_alone(folder: Path, scale: float) -> list[Row]:
    """16 threads that sleep as often, without any consumer: what the machine makes of 5 ms."""
    del folder
    each = int(MESSAGES * scale) // WORKERS

    def sleep() -> None:
        for _ in range(each):
            time.sleep(WORK_S)

    threads = [threading.Thread(target=sleep) for _ in range(WORKERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    name = f"{WORKERS} threads that only sleep, {each * WORKERS:,} times"
    return [Row(name, taken, "s", None, ideal_s(each * WORKERS, WORKERS))]


def by_key(keys: int, *, order: str = "message_group") -> Measurement:
    """A consumer by key, with so many keys."""

    def measure(folder: Path, scale: float) -> list[Row]:
        messages = max(keys, int((MESSAGES if keys >= 8 else ALONE) * scale))
        with broker(folder) as client:
            consume(prepared(client, WORKERS, keys=WORKERS, order=order), sleep_each, order="key")
            job = consume(
                prepared(client, messages, keys=keys, order=order), sleep_each, order="key"
            )
        name = f"by key, {keys:,} keys, {messages:,} messages, group of order {order}"
        ideal = ideal_s(messages, keys)
        return [Row(name, job.elapsed(), "s", round(ALLOWED * ideal, 3), ideal)]

    return measure


def by_queue(folder: Path, scale: float) -> list[Row]:
    """The same in the order of the queue: one worker, whatever the number of keys."""
    messages = int(ALONE * scale)
    with broker(folder) as client:
        job = consume(prepared(client, messages, keys=1000), sleep_each, order="queue")
    taken = job.elapsed()
    name = f"by queue, 1,000 keys, {messages:,} messages (of 10,000: {20 * taken:.0f} s)"
    return [Row(name, taken, "s", None, WORK_S * messages)]


def one_hangs(folder: Path, scale: float) -> list[Row]:
    """One key of 1,000 hangs for 10 s in its first message, beside a run in which none does."""
    messages = int(MESSAGES * scale)
    hung = "key-7"
    first = threading.Lock()

    def hang(given: Sequence[ReceivedMessage]) -> None:
        if given[0].message_group == hung and first.acquire(blocking=False):
            time.sleep(HANG_S)
        sleep_each(given)

    others = [f"key-{i}" for i in range(1000) if f"key-{i}" != hung]
    with broker(folder) as client:
        clean = consume(prepared(client, messages, keys=1000), sleep_each, order="key")
        stuck = consume(prepared(client, messages, keys=1000), hang, order="key")
    clean_s, stuck_s = clean.elapsed(others), stuck.elapsed(others)
    name = "by key, one of 1,000 keys hangs 10 s: the others"
    return [
        Row("by key, the same without one that hangs", clean_s, "s"),
        Row(name, stuck_s, "s", round(ALLOWED_HUNG * clean_s, 3), clean_s),
        Row("by key, the key that hangs", stuck.elapsed([hung]), "s"),
    ]


def nothing(order: str, *, group_order: str) -> Measurement:
    """A listener that does nothing, with batches of 32."""

    def measure(folder: Path, scale: float) -> list[Row]:
        messages = int(NOTHING * scale)
        with broker(folder) as client:
            job = prepared(client, messages, keys=1000, order=group_order)
            consume(job, lambda _: None, order=order, batch=BATCH)
        name = f"a listener that does nothing, {order}, group of order {group_order}"
        return [Row(name, messages / job.elapsed(), "messages/s", NOTHING_PER_S)]

    return measure


MEASUREMENTS: Final[dict[str, Measurement]] = {
    "threads": threads_alone,
    **{f"key-{keys}": by_key(keys) for keys in (1000, 1, 8, 16, 20, 100)},
    "key-1000-none": by_key(1000, order="none"),
    "queue": by_queue,
    "hung": one_hangs,
    "nothing": nothing("concurrently", group_order="none"),
    "nothing-queue": nothing("queue", group_order="none"),
    "nothing-key": nothing("key", group_order="message_group"),
}

if __name__ == "__main__":
    raise SystemExit(
        run(
            MEASUREMENTS,
            title=f"Ordered consumers, bodies of {BODY_BYTES} B",
            description=__doc__,
        )
    )
