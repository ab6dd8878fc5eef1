"""What it costs to start a consumer, and how soon it then has a message: a process of each kind.

A broker process with both endpoints, in which the first message waits already. Timed
from before the process is made until its listener was called, or its window has settled; with the
memory of the process at that moment, and the processor's seconds it took, those of its children
included. Then single messages follow, each timed from before its send.
``python -m benchmarks.starting --help`` for the kinds and the number of trials.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome

Done = Callable[[], None]
#: Between single messages.
PAUSE_S: Final = 0.1


def nothing(_: pa.Table, __: pa.Table) -> Outcome:
    """A handler that leaves nothing."""
    return Outcome()


def push(endpoint: Endpoint, name: str, *, done: Done) -> None:
    """A PushConsumer of this library."""
    from rmq_pipeline.consumer.push_consumer import PushConsumer

    def listener(_messages: object, _context: object) -> str:
        done()
        return "success"

    with Client(endpoint.flight) as client:
        consumer = PushConsumer(client, name, start_from="first").subscribe(name)
        with consumer.listen(listener):
            threading.Event().wait()


def pull(endpoint: Endpoint, name: str, *, done: Done) -> None:
    """A PullConsumer of this library."""
    from rmq_pipeline.consumer.pull_consumer import PullConsumer

    with Client(endpoint.flight) as client, PullConsumer(client, name, start_from="first") as pulls:
        pulls.subscribe(name)
        while True:
            if len(pulls.poll()):
                done()


def _spec(name: str) -> Any:
    from rmq_pipeline.handling.spec import ConsumerSpec

    return ConsumerSpec(name=name, topic=name, group=name, handler=nothing)


def threads(endpoint: Endpoint, name: str, *, done: Done) -> None:
    """A window on threads, outside Dagster."""
    from rmq_pipeline.consumer.window import run_window

    with Client(endpoint.flight) as client:
        run_window(_spec(name), client, owner=name, on_batch=lambda _: done())


def spark(endpoint: Endpoint, name: str, *, done: Done) -> None:
    """A window in Spark, outside Dagster."""
    from rmq_pipeline.spark import session
    from rmq_pipeline.spark.consumer import run_window

    with Client(endpoint.flight) as client:
        started = session.start
        run_window(_spec(name), client, spark=started, owner=name, on_batch=lambda _: done())


def rocketmq(endpoint: Endpoint, name: str, *, done: Done) -> None:
    """A push consumer of RocketMQ's own Python client."""
    from rocketmq import (
        ClientConfiguration,
        ConsumeResult,
        Credentials,
        FilterExpression,
        MessageListener,
        PushConsumer,
    )

    class Listener(MessageListener):  # type: ignore[misc]
        def consume(self, _: object) -> ConsumeResult:
            done()
            return ConsumeResult.SUCCESS

    configuration = ClientConfiguration(endpoint.grpc, Credentials())
    PushConsumer(configuration, name, Listener(), {name: FilterExpression()}).startup()
    threading.Event().wait()


KINDS: Final = {each.__name__: each for each in (push, pull, threads, spark, rocketmq)}


@dataclass(frozen=True)
class Trial:
    """One process."""

    seconds: float
    cpu_s: float
    megabytes: float
    #: Of the messages after the first.
    latencies_ms: list[float]


def be(kind: str, endpoint: Endpoint, *, name: str) -> None:
    """The process that is measured: it prints moments, and with the first what it has taken."""
    told = False

    def done() -> None:
        nonlocal told
        facts = {"at_s": time.time()}
        if not told:
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            times = [one.cpu_times() for one in family]
            facts["cpu_s"] = sum(t.user + t.system for t in times)
            facts["megabytes"] = sum(one.memory_info().rss for one in family) / 1e6
            told = True
        print(json.dumps(facts), flush=True)

    KINDS[kind](endpoint, name, done=done)


def started(kind: str, home: Path, *, number: int, singles: int) -> Trial:
    """Start one, send it messages, and kill it."""
    name = f"{kind}-{number}"
    command = [sys.executable, "-m", "benchmarks.starting", "--be", kind, name, str(home)]
    with Client(home=home) as client:
        client.create_topic(name, queues=1)
        client.create_group(name)
        client.subscribe(name, name)
        client.send(name, pa.table({"body": [b"x"]}))
        began_s = time.time()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            family = [psutil.Process(child.pid)]
            try:
                first = json.loads(child.stdout.readline())
                family += family[0].children(recursive=True)
                latencies_ms = []
                for _ in range(singles):
                    time.sleep(PAUSE_S)
                    sent_s = time.time()
                    client.send(name, pa.table({"body": [b"x"]}))
                    at_s = json.loads(child.stdout.readline())["at_s"]
                    latencies_ms.append((at_s - sent_s) * 1000)
            finally:
                for one in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
    return Trial(first["at_s"] - began_s, first["cpu_s"], first["megabytes"], latencies_ms)


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.be:
        kind, name, home = arguments.be
        endpoint = Endpoint.read(Path(home))
        assert endpoint is not None
        be(kind, endpoint, name=name)
        return
    folder = Path(tempfile.mkdtemp(prefix="rmq-starting-", dir=arguments.folder))
    home = folder / "home"
    process.start(home, upkeep="none")
    try:
        rows = {
            kind: [
                started(kind, home, number=n, singles=arguments.singles)
                for n in range(arguments.trials)
            ]
            for kind in arguments.kinds
        }
    finally:
        process.stop(home)
        shutil.rmtree(folder, ignore_errors=True)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    table = Table(title=f"Starting, {os.cpu_count()} cores: medians", caption=f"Load {load}")
    columns = ("kind", "n", "s", "longest s", "s of the processor", "MB", "then p50 ms", "p99 ms")
    for column in columns:
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, trials in rows.items():
        seconds = [each.seconds for each in trials]
        latencies_ms = [ms for each in trials for ms in each.latencies_ms]
        p50_ms, p99_ms = np.quantile(latencies_ms, [0.5, 0.99])
        table.add_row(
            kind,
            str(len(trials)),
            f"{np.median(seconds):.2f}",
            f"{max(seconds):.2f}",
            f"{np.median([each.cpu_s for each in trials]):.1f}",
            f"{np.median([each.megabytes for each in trials]):.0f}",
            f"{p50_ms:.1f}",
            f"{p99_ms:.1f}",
        )
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--singles", type=int, default=20, help="messages after the first")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    parser.add_argument("--be", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
