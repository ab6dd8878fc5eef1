"""Each workload of benchmarks/peers works against a broker, and its check can fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.peers import workloads
from benchmarks.peers.driver import NOTHING, Connection, Driver, Kind, Offer, Received
from benchmarks.peers.drivers.own_flight import OwnFlight
from benchmarks.peers.drivers.own_grpc import OwnGrpc
from benchmarks.peers.ledger import Check, CheckFailedError, Ledger
from benchmarks.peers.workloads import QUICK, WORKLOADS

TINY = replace(
    QUICK,
    warm_s=0.1,
    timed_s=0.05,
    most=1_000,
    timers=100,
    timers_s=0.2,
    lead_s=3.0,
    steady_s=0.5,
)


class Faulty(Driver):
    """A queue in memory; it mistreats the tenth message that it delivers."""

    name = "faulty"
    durability = "none"
    offers: ClassVar[frozenset[Offer]] = frozenset(Offer)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.queues: dict[str, list[list[tuple[float, bytes]]]] = {}
        self.names: dict[str, list[tuple[float, bytes]]] = {}
        self.delivered = 0
        self.last = NOTHING

    def start(self, folder: Path) -> None: ...

    def pids(self) -> Sequence[int]:
        return []

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        self.names.update({group: [] for group in groups})
        self.queues[topic] = [self.names[group] for group in groups]

    def drop(self, topic: str) -> None:
        del self.queues[topic]

    def connect(self) -> Connection:
        return FaultyConnection(self)

    def stop(self) -> None: ...


class FaultyConnection(Connection):
    def __init__(self, driver: Faulty) -> None:
        self.driver = driver

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        early_ms = 500 if self.driver.fault == "early" else 0
        due = [(moment - early_ms) / 1000 for moment in due_ms] or [0.0] * len(bodies)
        for queue in self.driver.queues[topic]:
            queue.extend(zip(due, bodies, strict=True))

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        queue = self.driver.names[group]
        found: list[bytes] = []
        while queue and len(found) < limit and queue[0][0] <= time.time():
            found.append(queue.pop(0)[1])
        self.driver.delivered += len(found)
        if not found:
            return self.driver.last if self.driver.fault == "echo" else NOTHING
        self.driver.last = self.mistreated(found)
        return self.driver.last

    def mistreated(self, bodies: list[bytes]) -> Received:
        at = self.driver.delivered
        if len(bodies) < 2 or not self.driver.fault or at < 10:
            return Received(bodies)
        first, second, *others = bodies
        changed = {
            "loss": [second, *others],
            "repetition": [first, first, second, *others],
            "order": [second, first, *others],
            "damage": [first, second[:-1] + bytes([second[-1] ^ 1]), *others],
            "early": bodies,
            "echo": bodies,
        }
        return Received(changed[self.driver.fault])

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnFlight]:
    driver = OwnFlight()
    driver.start(tmp_path_factory.mktemp("peers"))
    yield driver
    driver.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails need not wait long; a busy machine may be late."""
    monkeypatch.setattr(workloads, "LOST_S", 1.0)
    monkeypatch.setattr(workloads, "HELD", 0.0)
    monkeypatch.setattr(workloads, "RATE_PER_S", 100)
    monkeypatch.setattr(workloads, "BEHIND_S", 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_measures_our_broker(
    name: str, broker: OwnFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "LOST_S", 30.0)

    figures = WORKLOADS[name].measure(broker, TINY)

    assert all(figure.value > 0 for figure in figures), figures
    assert len(figures) == (4 if name in {"timers", "2,000/s"} else 1)


@pytest.mark.slow
def test_stub_drains_in_order_what_it_sends(tmp_path: Path) -> None:
    driver = OwnGrpc()
    driver.start(tmp_path)
    try:
        (figure,) = workloads.drain(driver, TINY, limit=32, keys=workloads.KEYS)
    finally:
        driver.stop()

    assert figure.value > 0


@pytest.mark.parametrize("name", ["drain 32 with acks", "timers", "2,000/s"])
def test_workload_measures_a_faultless_peer(name: str) -> None:
    assert WORKLOADS[name].measure(Faulty(), TINY)


CHECKED = [
    "produce 1,000 a call, 1 producer",
    "drain 32 with acks",
    "5 groups read one topic, 32",
]
FAULTS = {
    "loss": "lost",
    "repetition": "came twice",
    "echo": "came twice",
    "damage": "another body",
    "order": "came after",
}
#: Messages that follow each other have different keys, so their order is free.
KEYED = "ordered, 1,000 keys, drain 32"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in CHECKED for fault in FAULTS),
        *((KEYED, fault) for fault in FAULTS if fault != "order"),
    ],
)
def test_peer_with_a_fault_gets_no_figure(name: str, fault: str) -> None:
    with pytest.raises(CheckFailedError, match=FAULTS[fault]):
        WORKLOADS[name].measure(Faulty(fault), TINY)


@pytest.mark.parametrize("name", ["timers", "2,000/s"])
def test_last_message_that_comes_again_is_noticed(name: str) -> None:
    with pytest.raises(CheckFailedError, match="came twice"):
        WORKLOADS[name].measure(Faulty("echo"), TINY)


def test_timer_that_comes_early_gets_no_figure() -> None:
    with pytest.raises(CheckFailedError, match="ms early"):
        WORKLOADS["timers"].measure(Faulty("early"), TINY)


def test_order_of_a_key_counts_in_all_queues() -> None:
    ledger = Ledger(keys=2)
    bodies = ledger.bodies(0, 4)
    check = Check(ledger)

    check.take(Received([bodies[1], bodies[0], bodies[2]], streams=[0, 1, 0]))
    with pytest.raises(CheckFailedError, match="came after"):
        Check(ledger).take(Received([bodies[2], bodies[0]], streams=[0, 1]))


def test_order_without_keys_counts_in_a_queue() -> None:
    ledger = Ledger()
    bodies = ledger.bodies(0, 2)

    Check(ledger).take(Received(bodies[::-1], streams=[0, 1]))
    with pytest.raises(CheckFailedError, match="came after"):
        Check(ledger).take(Received(bodies[::-1], streams=[0, 0]))


def test_no_message_overtakes_a_failed_one_of_its_key() -> None:
    ledger = Ledger(keys=2)
    bodies = ledger.bodies(0, 4)
    check = Check(ledger, poisoned=1)

    check.take(Received([bodies[0], bodies[1], bodies[2]]))
    check.take(Received([bodies[1], bodies[3]]))
    check.finish()
    with pytest.raises(CheckFailedError, match="overtook"):
        check.take(Received([bodies[3]]))


def test_message_that_was_never_sent_fails_the_check() -> None:
    sent, other = Ledger(), Ledger()
    sent.bodies(0, 1)

    with pytest.raises(CheckFailedError, match="another body"):
        Check(sent).take(Received(other.bodies(0, 2)[1:]))
