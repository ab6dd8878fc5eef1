"""kill -9 during a redrive, of the broker and of the process that redrives: the same end state.

RMQ_CHAOS_REDRIVE_KILLS sets how often each (3).
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import serving
from rmq_pipeline.redriving import Plan, Report, manifest, redrive
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually
from tests.free_address import free_address

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("RMQ_CHAOS_REDRIVE_KILLS", "3"))
RMQ = str(Path(sys.executable).with_name("rmq"))
TOPIC, GROUP, ID = "orders", "billing", "the-fix"
#: Message groups, and messages: enough to last for all kills at this rate.
GROUPS, RATE = 20, 200.0


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


def make_dead_letters(client: Client, n: int) -> None:
    """A topic with n dead letters of its group, and as many messages that follow them."""
    client.ensure_topic(TOPIC, type="fifo", queues=4)
    client.ensure_group(GROUP, order="message_group", max_attempts=1_000, backoff_ms=[0])
    for half in range(2):
        numbers = range(half * n, half * n + n)
        rows = {
            "body": [b"%d" % i for i in numbers],
            "message_group": [f"g{i % GROUPS}" for i in numbers],
        }
        client.send(TOPIC, pa.table(rows))
        left = n * (1 - half)
        while left:
            got = client.receive(GROUP, TOPIC, limit=n)
            client.forward_to_dead_letter_queue(got, reason="no price")
            left -= got.num_rows


class Consumer:
    """Consumes through the kills, in order of each message group."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.over = threading.Event()
        #: Message group -> numbers in the order they first came, of those redriven.
        self.came: dict[str, list[int]] = defaultdict(list)
        self.thread = threading.Thread(target=self.consume)

    def consume(self) -> None:
        with Client(home=self.home) as client:
            while not self.over.is_set():
                try:
                    got = client.receive(
                        GROUP, TOPIC, limit=50, wait_ms=200, invisible_duration_ms=500
                    )
                    for group, body in zip(
                        got["message_group"].to_pylist(), got["body"].to_pylist(), strict=True
                    ):
                        if int(body) not in self.came[group]:
                            self.came[group].append(int(body))
                    if got.num_rows:
                        client.ack(got)
                except RocketMQError:  # the broker is away, or the lease has ended meanwhile
                    self.over.wait(0.01)


@contextmanager
def consuming(home: Path) -> Iterator[Consumer]:
    consumer = Consumer(home)
    consumer.thread.start()
    try:
        yield consumer
    finally:
        consumer.over.set()
        consumer.thread.join()


def assert_redriven_once(client: Client, consumer: Consumer, n: int) -> None:
    rows = manifest(client, ID).to_pylist()
    assert sorted(row["dead_letter_offset"] for row in rows) == list(range(n))
    assert {row["outcome"] for row in rows} == {"acked"}
    assert len({(row["queue_id"], row["queue_offset"]) for row in rows}) == n
    [dead] = client.describe_topic(f"%DLQ%{GROUP}")["offsets"]
    assert dead["max_offset"] == n
    for numbers in consumer.came.values():
        redriven = [number for number in numbers if number < n]
        assert redriven == sorted(redriven)
    assert sum(len(numbers) for numbers in consumer.came.values()) == 2 * n


def test_a_redrive_goes_on_through_kills_of_the_broker(
    zygote: Zygote, home: Path, eventually: Eventually
) -> None:
    n, dice, address = int(KILLS * RATE * 1.5), random.Random(1), free_address()
    pid = zygote.ask(serve=str(home), flight=address)
    eventually(lambda: serving(home))
    reports: list[Report] = []
    with Client(home=home) as client:
        make_dead_letters(client, n)

        def run() -> None:
            with Client(home=home) as driver:
                plan = Plan(group=GROUP, rate_per_s=RATE, patience_s=120)
                redrive(driver, plan, redrive_id=ID, on_progress=reports.append)

        driving = threading.Thread(target=run)
        with consuming(home) as consumer:
            driving.start()
            for _ in range(KILLS):
                before = len(reports)
                eventually(lambda n=before: len(reports) > n or not driving.is_alive())
                assert driving.is_alive()
                consumer.over.wait(dice.uniform(0, 0.2))
                os.kill(pid, signal.SIGKILL)
                assert zygote.ask(reap=pid) == -signal.SIGKILL
                pid = zygote.ask(serve=str(home), flight=address)
            driving.join()
            eventually(lambda: sum(map(len, consumer.came.values())) == 2 * n, within_s=60)

        assert (reports[-1].status, reports[-1].redriven) == ("done", n)
        assert_redriven_once(client, consumer, n)
    os.kill(pid, signal.SIGTERM)
    assert zygote.ask(reap=pid) == 0


def test_a_redrive_goes_on_after_kills_of_its_own_process(
    zygote: Zygote, home: Path, eventually: Eventually
) -> None:
    n, dice = int(KILLS * RATE / 2), random.Random(2)
    pid = zygote.ask(serve=str(home), flight=free_address())
    eventually(lambda: serving(home))
    command = [RMQ, "dead-letters", "redrive", GROUP, "--id", ID, "--home", str(home)]
    command += ["--rate", str(RATE), "--json"]
    with Client(home=home) as client:
        make_dead_letters(client, n)
        with consuming(home) as consumer:
            for _ in range(KILLS):
                before = manifest(client, ID).num_rows
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                eventually(
                    lambda p=process, n=before: (
                        p.poll() is not None or manifest(client, ID).num_rows > n
                    )
                )
                consumer.over.wait(dice.uniform(0, 0.1))
                process.kill()
                process.wait()
            assert subprocess.run(command, check=False, capture_output=True).returncode == 0
            eventually(lambda: sum(map(len, consumer.came.values())) == 2 * n, within_s=60)

        assert_redriven_once(client, consumer, n)
    os.kill(pid, signal.SIGTERM)
    assert zygote.ask(reap=pid) == 0
