"""The endpoint for RocketMQ clients, beside an empty server of the same service in the same run.

The clients, the empty server and the broker are a process each. What an official client gets of
the empty server is the limit of the row: gRPC and the client cost that much with no broker behind
them. A client that waits for each answer also waits for the disk, so its limit counts both.
``python -m benchmarks.grpc --help`` for the sizes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

from benchmarks.measured import Measurement, Row, run, synced_per_s
from rmq_pipeline.flight.client import Client

TOPICS: Final = ("sent", "received", "pushed", "latency", "bulk", "idle")
SECONDS: Final = 2.5
#: Empty server and broker take turns, so often.
ROUNDS: Final = 2
SHARE: Final = 0.75
#: More than a consumer takes in all rounds.
STORED_SECONDS: Final = 1.0
IDLE: Final = 500
IDLE_SECONDS: Final = 12.0
#: How long a listener has a message: acks come after the last consumer has it.
LISTENER_S: Final = 1.0
FRAME_BYTES: Final = 1536


class Lines:
    """A process that answers a line with a line of JSON."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def read(self) -> str:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} has ended.")
        return line

    def ask(self, question: Any = "") -> Any:
        """The answer to a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.read())

    def end(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def lines(*arguments: str, **environment: str) -> Iterator[Lines]:
    """Such a process, for the time of a block."""
    started = Lines(*arguments, **environment)
    try:
        yield started
    finally:
        started.end()


@dataclass(frozen=True)
class Measured:
    """Messages per second, and what one took of the server's processor."""

    rate: float
    cpu_us: float

    @classmethod
    def mean(cls, rounds: list[Self]) -> Self:
        """Of all rounds."""
        return cls(
            statistics.mean(one.rate for one in rounds),
            statistics.mean(one.cpu_us for one in rounds),
        )


@contextmanager
def broker(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """``rmq broker`` with a home of its own: where its endpoint is, and its process."""
    with tempfile.TemporaryDirectory(prefix="home-", dir=folder) as home:
        rmq = str(Path(sys.executable).with_name("rmq"))
        command = [rmq, "broker", "--home", home, "--grpc", "127.0.0.1:0", "--flight"]
        process = subprocess.Popen([*command, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            words = dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])
            with Client(words["flight"]) as client:
                for topic in TOPICS:
                    client.ensure_topic(topic)
            yield words["grpc"], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class Servers:
    """The client's process, and the two servers: the empty one and the broker."""

    load: Lines
    addresses: tuple[str, str]
    processes: tuple[psutil.Process, psutil.Process]

    @property
    def address(self) -> str:
        """The broker's."""
        return self.addresses[1]

    def ask(self, what: str, topic: str, *, seconds: float, server: int = 1) -> Any:
        """What the client measures of a server."""
        address = self.addresses[server]
        job = {"what": what, "address": address, "topic": topic, "seconds": seconds}
        return self.load.ask(job)

    def compare(self, what: str, topic: str, *, scale: float) -> tuple[Measured, Measured]:
        """The empty server and the broker, in turns."""
        found: tuple[list[Measured], list[Measured]] = ([], [])
        seconds = SECONDS * scale
        for _ in range(ROUNDS):
            for server, (process, rounds) in enumerate(zip(self.processes, found, strict=True)):
                before = _cpu_s(process)
                rate = self.ask(what, topic, seconds=seconds, server=server)
                used = _cpu_s(process) - before
                rounds.append(Measured(rate, used / (rate * seconds) * 1e6))
        return Measured.mean(found[0]), Measured.mean(found[1])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """All of them, for the time of a block."""
    with (
        tempfile.TemporaryDirectory(prefix="client-", dir=folder) as home,
        broker(folder) as (address, process),
        lines("benchmarks.empty_endpoint", address) as empty,
        # The client writes its log below the home of its user.
        lines("benchmarks.grpc_load", HOME=home) as load,
    ):
        addresses = (empty.read().strip(), address)
        yield Servers(load, addresses, (psutil.Process(empty.process.pid), process))


def rows_of(
    name: str, found: tuple[Measured, Measured], *, limit: float | None = None
) -> list[Row]:
    """The two servers' rates; the broker's beside the limit, the empty server's when left out."""
    empty, own = found
    return [
        Row(f"{name}: empty server", empty.rate, "msg/s"),
        Row(name, own.rate, "msg/s", SHARE, limit or empty.rate),
        Row(f"{name}: processor time, empty server", empty.cpu_us, "µs"),
        Row(f"{name}: processor time, broker", own.cpu_us, "µs"),
    ]


def sending(folder: Path, scale: float) -> list[Row]:
    """Official producers."""
    with servers(folder) as pair:
        disk = synced_per_s(folder, times=1000, size=FRAME_BYTES)
        rows = [Row("synced frames of one message", disk, "/s")]
        one = pair.compare("send_1", "sent", scale=scale)
        limit = 1 / (1 / one[0].rate + 1 / disk)
        rows += rows_of("send, official client, 1 thread", one, limit=limit)
        for what, name in (
            ("send_8", "send, official client, 8 threads"),
            ("send_async", "send_async, official client, 64 under way"),
        ):
            rows += rows_of(name, pair.compare(what, "sent", scale=scale))
    return rows


def consuming(folder: Path, scale: float) -> list[Row]:
    """Official consumers."""
    rows = []
    with servers(folder) as pair:
        for what, topic, name in (
            ("receive", "received", "SimpleConsumer, receive 32 and 32 acks"),
            ("push", "pushed", "PushConsumer, 20 threads"),
        ):
            pair.ask("bulk", topic, seconds=STORED_SECONDS)
            rows += rows_of(name, pair.compare(what, topic, scale=scale))
    return rows


def bulk(folder: Path, scale: float) -> list[Row]:
    """A raw stub with many messages a request."""
    with servers(folder) as pair:
        empty, own = pair.compare("bulk", "bulk", scale=scale)
    name = "send, raw stub, 256 a request, 4 under way"
    return [
        Row(f"{name}: empty server", empty.rate, "msg/s"),
        Row(name, own.rate, "msg/s", 60_000),
        Row(f"{name}: processor time, broker", own.cpu_us, "µs"),
    ]


def latency(folder: Path, scale: float) -> list[Row]:
    """From before a send until a push consumer's listener has it."""
    with servers(folder) as pair:
        p50, p99 = pair.ask("latency", "latency", seconds=10 * scale)
    return [
        Row("push latency at 200 msg/s, p50", p50, "ms", 10),
        Row("push latency at 200 msg/s, p99", p99, "ms", 50),
    ]


def idle(folder: Path, _: float) -> list[Row]:
    """Push consumers that wait, with heartbeats; and a message to every one of them."""
    with broker(folder) as (address, process):
        time.sleep(2)
        before = process.memory_info().rss
        with lines("benchmarks.grpc_idle", address, str(IDLE), "idle") as consumers:
            consumers.read()
            time.sleep(2)
            used, start = process.cpu_times(), time.perf_counter()
            time.sleep(IDLE_SECONDS)
            now, taken = process.cpu_times(), time.perf_counter() - start
            more = (process.memory_info().rss - before) / 1e6
            busy = (now.user + now.system - used.user - used.system) / taken
            consumers.ask(LISTENER_S)
            fanned = [consumers.ask(LISTENER_S) for _ in range(3)]
            at_once = [consumers.ask(0.0) for _ in range(3)]
    half, whole = (statistics.median(column) for column in zip(*fanned, strict=True))
    last = statistics.median(whole for _, whole in at_once)
    return [
        Row(f"{IDLE} idle push consumers: memory more", more, "MB", 150),
        Row(f"{IDLE} idle push consumers: of a core", busy * 100, "%", 5),
        Row(f"one message to {IDLE} groups, half of them", half, "ms"),
        Row(f"one message to {IDLE} groups, all of them", whole, "ms", 200),
        Row(f"one message to {IDLE} groups, all of them, acked at once", last, "ms"),
    ]


MEASUREMENTS: Final[dict[str, Measurement]] = {
    "sending": sending,
    "consuming": consuming,
    "bulk": bulk,
    "latency": latency,
    "idle": idle,
}

if __name__ == "__main__":
    sys.exit(
        run(MEASUREMENTS, title="The gRPC endpoint: 1 KiB bodies, sync flush", description=__doc__)
    )
