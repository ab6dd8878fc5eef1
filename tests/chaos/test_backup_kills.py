"""Backups while messages come, and kill -9 of a backup: a restored second is what was that second.

RMQ_CHAOS_BACKUPS sets how many backups are killed (1).
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.text import parse_ms
from tests.cli.conftest import RMQ, Served, end, process, serve
from tests.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("RMQ_CHAOS_BACKUPS", "1"))
VIEWS = ("in_flight", "retrying", "parked", "progress", "waiting", "lag")
#: 2,000 messages/s.
BATCH, EVERY_S = 20, 0.01


class Traffic(threading.Thread):
    """Sends at a rate, receives, and acks two thirds."""

    def __init__(self, home: Path) -> None:
        super().__init__(name="traffic")
        self._home, self._over = home, threading.Event()
        #: Number of messages that were answered.
        self.answered = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(home=self._home) as client:
                for turn in range(1_000_000):
                    if self._over.wait(EVERY_S):
                        return
                    self._send(client)
                    if turn % 10 == 0:
                        got = client.receive("billing", "orders", limit=100)
                        receipts = got["receipt_handle"].to_pylist()
                        client.ack(receipts[: 2 * len(receipts) // 3])
        except BaseException as error:  # noqa: BLE001 - told by stop
            self.failure = error

    def _send(self, client: Client) -> None:
        numbers = range(self.answered, self.answered + BATCH)
        rows = {
            "body": [os.urandom(200) for _ in numbers],
            "message_id": [f"m{n}" for n in numbers],
        }
        fields = pa.schema([schema.SEND.field(name) for name in rows])
        client.send("orders", pa.table(rows, schema=fields))
        self.answered += BATCH

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    served = serve(
        home, "--grpc", "none", "--set", "log_file_bytes=2097152", "--set", "seal_after_ms=1000"
    )
    yield served
    end(served)


def test_a_restored_second_is_what_it_was(served: Served, tmp_path: Path) -> None:
    home, folder = served.home, tmp_path / "backup"
    with Client(home=home) as client:
        client.create_topic("orders", queues=4)
        client.create_group("billing")
        client.subscribe("billing", "orders")
        first = backed_up(home, folder)
        traffic = Traffic(home)
        traffic.start()
        try:
            for kill in range(KILLS):
                until(partial(has_answered, traffic, 2_000 * (kill + 1)))
                killed(home, folder)
            before = traffic.answered
            last = backed_up(home, folder)
        finally:
            traffic.stop()
        moment_ms = quiet_ms(client, last["latest"], first["last_frame"])
        then = {view: asked(client, f"{view}_at({timestamp(moment_ms)})") for view in VIEWS}
        count = stored_until(client, moment_ms)

        whole, second = tmp_path / "whole", tmp_path / "second"
        for command in (
            (str(folder), str(whole)),
            (str(folder), str(second), "--to-time", str(moment_ms)),
        ):
            done = process(RMQ, "restore", *command)
            assert done.returncode == 0, done.stderr

    with Broker.open(second, upkeep="none") as broker:
        assert stored_until(broker, moment_ms + 10_000_000) == count > 0
        for view in VIEWS:
            assert asked(broker, f"{view}_at({timestamp(moment_ms)})") == then[view], view
    with Broker.open(whole, upkeep="none") as broker:
        found = broker.sql("SELECT message_id FROM messages")["message_id"].to_pylist()
        assert {f"m{n}" for n in range(before)} <= set(found)
        assert len(found) == len(set(found))
        bodies = sum(
            broker.read("orders", queue, offset=0, limit=100_000).num_rows for queue in range(4)
        )
        assert bodies == len(found)


def has_answered(traffic: Traffic, number: int) -> bool:
    return traffic.answered > number


def backed_up(home: Path, folder: Path) -> dict[str, Any]:
    done = process(RMQ, "backup", str(folder), "--home", str(home), "--keep", "20", "--json")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def killed(home: Path, folder: Path) -> None:
    """Kill a backup in the middle: once it has written something, or at its first moments."""
    before = files(folder)
    command = [RMQ, "backup", str(folder), "--home", str(home)]
    backup = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: files(folder) != before or backup.poll() is not None)
    backup.send_signal(signal.SIGKILL)
    backup.wait()


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def quiet_ms(client: Client, latest: str, earliest: str) -> int:
    """Return a ms of the middle in which nothing happened, nor in the next one."""
    times = client.sql(
        "SELECT DISTINCT ms FROM (SELECT stored_at_ms AS ms FROM messages"
        " UNION ALL SELECT at_ms AS ms FROM events)"
    )["ms"].to_pylist()
    bounds = [parse_ms(latest), parse_ms(earliest)]
    middle = (min(bounds) + max(bounds)) // 2
    taken = set(times)
    return next(ms for ms in range(middle, middle + 5_000) if not {ms, ms + 1} & taken)


def timestamp(ms: int) -> str:
    return f"make_timestamptz({ms * 1000})"


def asked(source: Client | Broker, query: str) -> list[str]:
    rows = source.sql(f"FROM {query}").to_pylist()
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


def stored_until(source: Client | Broker, ms: int) -> int:
    query = f"SELECT count(*) AS n FROM messages WHERE stored_at_ms <= {ms}"
    (row,) = source.sql(query).to_pylist()
    return int(row["n"])
