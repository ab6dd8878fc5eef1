"""kill -9 of the broker, again and again, under senders and receivers: nothing answered is lost.

RMQ_CHAOS_KILLS sets how often (12).
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import serving
from tests.chaos.traffic import Ledger, Traffic
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually
from tests.free_address import free_address

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("RMQ_CHAOS_KILLS", "12"))
#: How long a broker lives after its first answers, at most.
LIFE_S = 0.4


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


def test_nothing_answered_is_lost_by_kills(
    zygote: Zygote, home: Path, eventually: Eventually, seed: int
) -> None:
    dice, address, started = random.Random(seed), free_address(), time.monotonic()
    ledger = Ledger()
    with Client(home=home) as client:
        pid = zygote.ask(serve=str(home), flight=address)
        eventually(lambda: serving(home))
        prepare(client)
        traffic = Traffic(client, ledger)
        traffic.start()

        try:
            for _ in range(KILLS):
                answered = len(ledger.sent)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                traffic.sending.wait(dice.uniform(0, LIFE_S))
                os.kill(pid, signal.SIGKILL)
                assert zygote.ask(reap=pid) == -signal.SIGKILL
                pid = zygote.ask(serve=str(home), flight=address)
                assert not ledger.violations
            killed_s = time.monotonic() - started
            traffic.stop_sending()
            eventually(lambda: lag(client) == 0 or traffic.failures, within_s=120)
        finally:
            traffic.stop()

        assert_kept(client, ledger)
        print(
            f"{KILLS} kills in {killed_s:.0f} s (seed {seed}): {len(ledger.sent)} messages answered"
            f", {ledger.lost_calls} calls lost, {ledger.again} deliveries repeated"
        )
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0


def prepare(client: Client) -> None:
    client.ensure_topic("plain", queues=4)
    client.ensure_topic("ordered", type="fifo", queues=4)
    client.ensure_group("readers", max_attempts=1000)
    client.ensure_group("followers", order="message_group", max_attempts=1000)
    client.subscribe("readers", "plain")
    client.subscribe("followers", "ordered")


def lag(client: Client) -> int:
    return int(client.sql("SELECT sum(lag)::BIGINT AS lag FROM lag")["lag"][0].as_py())


def assert_kept(client: Client, ledger: Ledger) -> None:
    """Every answered message is where the answer said, once; all were delivered, in order."""
    stored: dict[str, tuple[str, int, int, bytes]] = {}
    for topic in ("plain", "ordered"):
        for queue in client.describe_topic(topic)["offsets"]:
            table = client.read(topic, queue["queue_id"], offset=0, limit=1_000_000)
            assert table["queue_offset"].to_pylist() == list(range(queue["max_offset"]))
            last: dict[str, int] = {}
            for row in table.to_pylist():
                number = int(row["body"].partition(b"\n")[0])
                assert row["message_id"] not in stored
                assert row["keys"] == [f"key-{number}"]
                place = (topic, row["queue_id"], row["queue_offset"], row["body"])
                stored[row["message_id"]] = place
                if group := row["message_group"]:
                    assert last.get(group, -1) < number
                    last[group] = number
    assert {i: stored.get(i) for i in ledger.sent} == ledger.sent
    assert ledger.sent.keys() <= ledger.delivered
    assert ledger.delivered <= stored.keys()
    assert not ledger.violations
