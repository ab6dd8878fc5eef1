"""Leaders of one log in PostgreSQL die or stand still; standbys or empty homes succeed them.

Nothing answered is lost, no order breaks, and a leader that wakes up late answers nothing.
RMQ_CHAOS_LEADER_KILLS sets how often a leader is killed (3), RMQ_CHAOS_LEADER_STOPS how often it
is stopped and woken up after a standby has taken over (1).
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import LOG_FENCED, serving
from tests.chaos.test_kills import assert_kept, lag, prepare
from tests.chaos.traffic import Ledger, Traffic
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually
from tests.free_address import free_address
from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("RMQ_CHAOS_LEADER_KILLS", "3"))
STOPS = int(os.environ.get("RMQ_CHAOS_LEADER_STOPS", "1"))
#: How long a leader lives after its first answers, at most.
LIFE_S = 1.0
LEASE_MS = 500


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


@pytest.fixture
def settings(postgres: PostgresServer) -> dict[str, object]:
    return {"log_store": postgres.new_database(), "log_lease_ms": LEASE_MS}


def test_successors_on_empty_homes_have_all_that_was_answered(
    zygote: Zygote,
    settings: dict[str, object],
    tmp_path: Path,
    eventually: Eventually,
    seed: int,
) -> None:
    dice, address, ledger = random.Random(seed), free_address(), Ledger()
    homes = (tmp_path / f"home-{number}" for number in range(KILLS + 1))
    away_s: list[float] = []

    def lead() -> int:
        home = next(homes)
        pid = zygote.ask(serve=str(home), flight=address, settings=settings)
        eventually(lambda: serving(home))
        return pid

    pid = lead()
    with Client(address) as client:
        prepare(client)
        traffic = Traffic(client, ledger)
        traffic.start()
        try:
            for _ in range(KILLS):
                answered = len(ledger.sent)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                traffic.sending.wait(dice.uniform(0, LIFE_S))
                os.kill(pid, signal.SIGKILL)
                killed_at, answered = time.monotonic(), len(ledger.sent)
                assert zygote.ask(reap=pid) == -signal.SIGKILL
                pid = lead()
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                away_s.append(time.monotonic() - killed_at)
                assert not ledger.violations
            traffic.stop_sending()
            eventually(lambda: lag(client) == 0 or traffic.failures, within_s=120)
        finally:
            traffic.stop()

        assert_kept(client, ledger)
        print(
            f"{KILLS} leaders killed (seed {seed}): {len(ledger.sent)} messages answered,"
            f" {ledger.again} deliveries repeated, {statistics.median(away_s):.1f} s without"
            f" writes at the median, {max(away_s):.1f} s at most"
        )
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0


def test_standbys_take_over(
    zygote: Zygote,
    settings: dict[str, object],
    tmp_path: Path,
    eventually: Eventually,
    seed: int,
) -> None:
    """Two brokers with a home each: when one is killed or stopped, the other one leads."""
    dice, ledger = random.Random(seed), Ledger()
    addresses = [free_address(), free_address()]
    homes = [tmp_path / "one", tmp_path / "two"]
    attacks = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * STOPS
    dice.shuffle(attacks)
    away_s: list[float] = []

    def start(number: int) -> int:
        pid = zygote.ask(
            serve=str(homes[number]), flight=addresses[number], settings=settings, standby=True
        )
        eventually(lambda: serving(homes[number]))
        return pid

    pids = [start(0), start(1)]
    with Client(",".join(addresses)) as client:
        prepare(client)
        traffic = Traffic(client, ledger)
        traffic.start()
        try:
            for count, attack in enumerate(attacks):
                leader = count % 2
                answered = len(ledger.sent)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                traffic.sending.wait(dice.uniform(0, LIFE_S))
                os.kill(pids[leader], attack)
                began, answered = time.monotonic(), len(ledger.sent)
                with Client(addresses[1 - leader]) as other:
                    eventually(lambda c=other: c.status()["log_store"]["role"] == "leader")
                if attack == signal.SIGSTOP:
                    os.kill(pids[leader], signal.SIGCONT)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                away_s.append(time.monotonic() - began)
                fenced = {signal.SIGKILL: -signal.SIGKILL, signal.SIGSTOP: LOG_FENCED}
                assert zygote.ask(reap=pids[leader]) == fenced[attack]
                pids[leader] = start(leader)
                assert not ledger.violations
            traffic.stop_sending()
            eventually(lambda: lag(client) == 0 or traffic.failures, within_s=120)
        finally:
            traffic.stop()

        assert_kept(client, ledger)
        print(
            f"{KILLS} leaders killed and {STOPS} stopped (seed {seed}): {len(ledger.sent)} messages"
            f" answered, {ledger.again} deliveries repeated, {statistics.median(away_s):.1f} s"
            f" without writes at the median, {max(away_s):.1f} s at most"
        )
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0


def test_a_leader_that_stood_still_ends_and_answers_nothing(
    zygote: Zygote, settings: dict[str, object], tmp_path: Path, eventually: Eventually
) -> None:
    first, second = free_address(), free_address()
    old = zygote.ask(serve=str(tmp_path / "first"), flight=first, settings=settings)
    eventually(lambda: serving(tmp_path / "first"))
    with Client(first) as client:
        client.ensure_topic("plain", queues=1)
        client.send("plain", pa.table({"body": [b"before"]}))
        os.kill(old, signal.SIGSTOP)
        new = zygote.ask(serve=str(tmp_path / "second"), flight=second, settings=settings)
        eventually(lambda: serving(tmp_path / "second"))

        os.kill(old, signal.SIGCONT)
        for _ in range(3):
            with pytest.raises(RocketMQError):
                client.send("plain", pa.table({"body": [b"of the old leader"]}))
            with pytest.raises(RocketMQError):
                client.read("plain", 0, offset=0, limit=10)

    assert zygote.ask(reap=old) == LOG_FENCED
    with Client(second) as client:
        client.send("plain", pa.table({"body": [b"after"]}))
        found = client.read("plain", 0, offset=0, limit=10)["body"].to_pylist()
        assert found == [b"before", b"after"]
    assert not serving(tmp_path / "first")
    os.kill(new, signal.SIGTERM)
    assert zygote.ask(reap=new) == 0
