"""kill -9 of run workers, of Spark and of the broker: every message is in the sink, and once.

A run worker is killed (its Spark ends by itself, later), or its JVM (driver and executor), or a
Python worker of it, or the broker; more messages come in all the while. RMQ_CHAOS_SINK_KILLS sets
how often something is killed (2), RMQ_CHAOS_SINK_MESSAGES of how many messages (4,000). The sink is
in a bucket of an S3 server; `make chaos` tries a folder, too, with more kills.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import deltalake
import numpy as np
import polars as pl
import psutil
import pyarrow as pa
import pytest

from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import serving
from rmq_pipeline.lake import compaction, readers
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Address
from tests.chaos.floor import pause
from tests.chaos.zygote import ROOT, Zygote
from tests.conftest import Eventually
from tests.free_address import free_address
from tests.object_store import ObjectStore

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.timeout(7200),
]

KILLS = int(os.environ.get("RMQ_CHAOS_SINK_KILLS", "2"))
MESSAGES = int(os.environ.get("RMQ_CHAOS_SINK_MESSAGES", "4000"))
TOPIC, GROUP = "steps", "walkers"
#: Messages of a micro-batch: a kill finds something half done wherever it falls.
MAX_BATCH: Final = 1_000
#: How long something lives after it was seen at work, at most.
LIFE_S: Final = 2.0
#: What is killed, and how often of a hundred.
VICTIMS: Final = {"broker": 40, "python": 25, "jvm": 15, "run": 20}
WINDOW: Final = "upkeep/compact_sinks"


class Runs:
    """Run workers, one at work and one whose Spark is up already, to take its place."""

    def __init__(self, folder: Path, *, address: str, sink: Address) -> None:
        self._folder, self._address, self._sink = folder, address, sink
        self._log = (folder / "runs.log").open("wb")
        self._count = 0
        self._next = self._begin()
        self.now = self._next
        self.take_over()

    def _begin(self) -> tuple["subprocess.Popen[bytes]", Path]:
        self._count += 1
        ready = self._folder / f"ready-{self._count}"
        window = {
            "topic": TOPIC,
            "group": GROUP,
            "sink": str(self._sink),
            "handler": "tests.spark.handlers:placed",
            "owner": f"run-{self._count}",
            "max_batch": MAX_BATCH,
            "idle_s": 5.0,
            # The one before is dead: its lease need not be waited for.
            "takeover": True,
        }
        how = {
            "flight": self._address,
            "settings": {},
            "windows": [window],
            "ready": str(ready),
        }
        command = [sys.executable, "-m", "tests.spark.window_process", json.dumps(how)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )
        return process, ready

    def take_over(self) -> None:
        """Let the next one begin its window, and prepare another."""
        process, ready = self.now = self._next
        give_up_at = time.monotonic() + 240
        while not ready.exists():
            assert process.poll() is None, "a run worker does not start"
            assert time.monotonic() < give_up_at, "Spark does not start"
            pause(0.01)
        assert process.stdin is not None
        process.stdin.close()  # its turn has come
        self._next = self._begin()

    def is_over(self) -> bool:
        """Whether the one at work has ended."""
        return self.now[0].poll() is not None

    def victims(self, kind: str) -> list[psutil.Process]:
        """The processes of the run at work that a kill of this kind means."""
        try:
            run = psutil.Process(self.now[0].pid)
            below = run.children(recursive=True)
            if kind == "run":
                return [run]
            if kind == "jvm":
                return [each for each in below if each.name() == "java"]
            return [each for each in below if each.name().startswith("python")][-1:]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End both."""
        for process, _ in (self.now, self._next):
            if process.stdin is not None:
                process.stdin.close()
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    is_killed(child)
                process.kill()
            process.wait()
        self._log.close()


def is_killed(process: psutil.Process) -> bool:
    """Kill it; not when it has come to its end by itself."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


class Feed:
    """Sends messages bit by bit, each until it is known to be stored, and once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self._go_on = threading.Event()
        self._allowed = 0
        self.sent = 0
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        while self.sent < MESSAGES and not self._stop.is_set():
            if self.sent == self._allowed:
                self._go_on.wait()
                self._go_on.clear()
                continue
            numbers = np.arange(self.sent, min(self.sent + MAX_BATCH, self._allowed))
            messages = pa.table(
                {
                    "body": [str(n).encode() for n in numbers],
                    "message_id": [f"m{n}" for n in numbers],
                    "message_group": [f"g{n % 500}" for n in numbers],
                    "born_at_ms": numbers % 3 * 3_600_000,
                }
            )
            try:
                self._client.send(TOPIC, messages)
            except BusyError:
                # Sent or not: the topic drops what is sent again under the same id.
                continue
            self.sent += len(numbers)

    def allow(self, messages: int) -> None:
        """Send so many in all."""
        self._allowed = messages
        self._go_on.set()

    def stop(self) -> None:
        """Send no more."""
        self._stop.set()
        self._go_on.set()
        self._thread.join()


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.long), "bucket"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "folder":
        return tmp_path / "sink"
    store: ObjectStore = request.getfixturevalue("object_store")
    return store.uri("killed")


def test_every_message_is_in_the_sink_once_after_kills(
    zygote: Zygote, home: Path, tmp_path: Path, sink: Address, eventually: Eventually, seed: int
) -> None:
    dice, address, began = random.Random(seed), free_address(), time.monotonic()
    killed = Counter[str]()
    broker = zygote.ask(serve=str(home), flight=address)
    eventually(lambda: serving(home))
    with Client(address) as client:
        client.create_topic(TOPIC, type="fifo", queues=4, deduplicate="message_id")
        client.create_group(GROUP, order="message_group")
        runs, feed = Runs(tmp_path, address=address, sink=sink), Feed(client)
        try:
            while killed.total() < KILLS:
                # A share of the messages for each kill: when it comes some of it is in flight.
                share = MESSAGES * killed.total() // KILLS
                feed.allow(MESSAGES * (killed.total() + 1) // KILLS)
                eventually(lambda share=share: is_beyond(client, share, runs=runs), within_s=600)
                if runs.is_over():
                    runs.take_over()
                    continue
                pause(dice.uniform(0, LIFE_S))
                (kind,) = dice.choices(list(VICTIMS), list(VICTIMS.values()))
                if kind == "broker":
                    os.kill(broker, signal.SIGKILL)
                    assert zygote.ask(reap=broker) == -signal.SIGKILL
                    broker = zygote.ask(serve=str(home), flight=address)
                    killed[kind] += 1
                elif sum(map(is_killed, runs.victims(kind))):
                    killed[kind] += 1
                    if kind in ("jvm", "run"):
                        eventually(runs.is_over, within_s=600)
                        runs.take_over()
            killed_s = time.monotonic() - began
            while acked(client) < MESSAGES:
                eventually(lambda: is_beyond(client, MESSAGES - 1, runs=runs), within_s=600)
                if runs.is_over():
                    runs.take_over()
            eventually(runs.is_over, within_s=120)
        finally:
            feed.stop()
            runs.close()

        sweep(client, sink)
        lost, twice = compared(sink)
        print(
            f"{MESSAGES} messages, {KILLS} kills {dict(killed)} in {killed_s:.0f} s (seed {seed}):"
            f" {lost} lost, {twice} rows twice, {client.sink_files(GROUP).num_rows} files"
        )
        assert (lost, twice) == (0, 0)
        assert_tidy(client, sink)
    os.kill(broker, signal.SIGTERM)
    assert zygote.ask(reap=broker) == 0


def is_beyond(client: Client, share: int, *, runs: Runs) -> bool:
    """Return True if more than that is settled, or no window is at work."""
    pause(0.1)
    return runs.is_over() or acked(client) > share


def acked(client: Client) -> int:
    """Rows that count: one for each message that was settled."""
    answer = client.sql(
        f"SELECT sum(rows)::BIGINT FROM sink_files WHERE consumer_group = '{GROUP}'"
    )
    return int(answer.column(0)[0].as_py() or 0)


def sweep(client: Client, sink: Address) -> None:
    """What the next window and the next compaction do with what dead ones have left."""
    from rmq_pipeline.handling.window import Publication

    window = f"consumer/{GROUP}"
    opened = client.open_window(window, owner="last", duration_ms=60_000, takeover=True)
    Publication(client, group=GROUP, folder=sink).finish_previous(epoch=opened["epoch"])
    opened = client.open_window(WINDOW, owner="last", duration_ms=60_000)
    rules = compaction.Rules(quiet_ms=0, grace_ms=0)
    compaction.compact(client, GROUP, sink=sink, window=(WINDOW, opened["epoch"]), rules=rules)


def compared(sink: Address) -> tuple[int, int]:
    """How many messages are not in the sink, and how many rows it has too many."""
    found = Counter(readers.sink_table(sink, columns=["body"])["body"].to_pylist())
    lost = sum(str(n).encode() not in found for n in range(MESSAGES))
    return lost, sum(found.values()) - len(found)


def assert_tidy(client: Client, sink: Address) -> None:
    """Readers see what the broker lists, nothing else is there, and each row is of its message."""
    counting: Any = client.sink_files(GROUP)["path"].to_pylist()
    below = f"{sink}/"
    assert {path.removeprefix(below) for path in readers.sink_paths(sink)} == set(counting)
    assert set(at(sink).matching("hour=*/*")) == set(counting)
    options = {"AWS_ALLOW_HTTP": "true"} if isinstance(sink, str) else None
    table = deltalake.DeltaTable(sink, storage_options=options)
    assert {uri.removeprefix(below) for uri in table.file_uris()} == set(counting)
    assert pl.scan_delta(table).select(pl.len()).collect().item() == MESSAGES
    rows = readers.sink_table(sink, columns=["queue_id", "queue_offset"])
    places = rows.group_by(["queue_id", "queue_offset"]).aggregate([])
    assert places.num_rows == MESSAGES
