"""Leaders of one log in a store die or stand still; standbys or empty homes succeed them.

Nothing answered is lost, no order breaks, and a leader that wakes up late answers nothing. The
leaders seal, merge and trim meanwhile, in an archive that all of them share.
RMQ_CHAOS_LEADER_KILLS sets how often a leader is killed (3), RMQ_CHAOS_LEADER_STOPS how often it
is stopped and woken up after a standby has taken over (1), RMQ_CHAOS_LEASE_MS the lease (500; the
default of a broker is 2,000). From 10 kills on, producer and push consumers of RocketMQ's own
Python client and a window of a Dagster consumer take part.
"""

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline import receipt
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.errors import RocketMQError, StorageError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import LOG_FENCED, serving
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.limits import MIB
from tests.chaos.test_kills import assert_kept, prepare
from tests.chaos.traffic import Ledger, Traffic
from tests.chaos.zygote import Zygote
from tests.conformance import brokers
from tests.conftest import Eventually
from tests.free_address import free_address
from tests.log_stores import LogStores
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(3600),
    # One engine in `make test`, all in `make chaos`.
    pytest.mark.parametrize(
        "log_stores",
        ["postgres", *(pytest.param(each, marks=pytest.mark.long) for each in ("s3", "nats"))],
        indirect=True,
    ),
]

KILLS = int(os.environ.get("RMQ_CHAOS_LEADER_KILLS", "3"))
STOPS = int(os.environ.get("RMQ_CHAOS_LEADER_STOPS", "1"))
#: How long a leader lives after its first answers, at most.
LIFE_S = 1.0
LEASE_MS = int(os.environ.get("RMQ_CHAOS_LEASE_MS", "500"))


@pytest.fixture
def zygote(tmp_path: Path, log_stores: LogStores) -> Iterator[Zygote]:
    assert log_stores.server  # first: the processes get the credentials from the environment
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


@pytest.fixture
def settings(log_stores: LogStores, tmp_path: Path) -> dict[str, object]:
    return {
        "log_store": log_stores.new(),
        "log_lease_ms": LEASE_MS,
        "archive_root": str(tmp_path / "archive"),
        "log_file_bytes": MIB,
        "reserve_bytes": MIB,
        "seal_after_ms": 0,
        "snapshot_events": 1000,
        "compact_min_inputs": 3,
        "replaced_grace_ms": 1000,
    }


class Sealing:
    """A thread that seals, merges and expires again and again, at whatever broker leads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = threading.Event()
        self.segments = self.merges = self.files = 0
        self.refused: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                report = self._client.seal(limit_bytes=2 * MIB)
                self.segments += report["segments"]
                self.files += report["dropped_files"]
                self.merges += self._client.compact()["compactions"]
                self._client.expire()
            except RocketMQError as error:
                self.refused[type(error).__name__] += 1

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        print(
            f"sealed: {self.segments} segments, {self.merges} merges,"
            f" {self.files} log files dropped; refused {dict(self.refused)}"
        )


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
        sealing, traffic = Sealing(client), Traffic(client, ledger)
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
            eventually(lambda: is_read(client) or traffic.failures, within_s=120)
        finally:
            sealing.stop()
            traffic.stop()

        assert sealing.segments
        assert_kept(client, ledger)
        print(
            f"{KILLS} leaders killed (seed {seed}): {len(ledger.sent)} messages answered,"
            f" {ledger.again} deliveries repeated, {statistics.median(away_s):.1f} s without"
            f" writes at the median, {max(away_s):.1f} s at most"
        )
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0


class Pair:
    """Two brokers of one log, each with a home and addresses of its own."""

    def __init__(self, zygote: Zygote, folder: Path, *, settings: dict[str, object]) -> None:
        self._zygote, self._settings = zygote, settings
        self._homes = [folder / "one", folder / "two"]
        self.flight = [free_address(), free_address()]
        self.grpc = [free_address(), free_address()]
        #: How often a leader has ended because its lease ran out.
        self.fenced = 0
        self.pids = [self.start(0), self.start(1)]

    def attackable(self) -> int:
        """Return which one leads, while both live.

        On a busy machine a leader may renew its lease too late. It ends, and is started again.
        """
        while True:
            leader = leading(self.flight)
            ended = [number for number, pid in enumerate(self.pids) if self._zygote.ask(ended=pid)]
            if not ended:
                return leader
            for number in ended:
                assert self._zygote.ask(reap=self.pids[number]) == LOG_FENCED
                self.pids[number] = self.start(number)
                self.fenced += 1

    def start(self, number: int) -> int:
        """Start one, with --standby; return its pid once it serves."""
        home = self._homes[number]
        pid = self._zygote.ask(
            serve=str(home),
            flight=self.flight[number],
            grpc=self.grpc[number],
            settings=self._settings,
            standby=True,
        )
        until(lambda: serving(home))
        return pid


def leading(addresses: list[str]) -> int:
    """Which of two brokers leads."""
    found: list[int] = []

    def look() -> bool:
        for number, address in enumerate(addresses):
            with contextlib.suppress(RocketMQError), Client(address, retry_s=0) as client:
                if client.status()["log_store"]["role"] == "leader":
                    found.append(number)
        return bool(found)

    until(look)
    return found[0]


def stored(client: Client, topic: str) -> int:
    return int(sum(row["max_offset"] for row in client.describe_topic(topic)["offsets"]))


@contextlib.contextmanager
def official_client(client: Client, endpoints: str) -> Iterator[None]:
    """RocketMQ's Python client sends and hears for the time of a block: all, and in order."""
    client.ensure_topic("py-restart")
    client.ensure_topic("py-restart-fifo", type="fifo")
    client.ensure_group("py-restart-fifo-group", order="message_group")
    todo = {"place": {"endpoints": endpoints, "prefix": "py"}}
    official = brokers.python("python_restart", todo)
    try:
        until(lambda: stored(client, "py-restart-fifo") > 0)  # it does not start without a leader
        yield
        official.close_input()
        facts = official.facts()
    finally:
        official.end()
    sent = {number for number, _ in facts["sent"]}
    print(f"RocketMQ's client: {2 * len(sent)} messages answered")
    assert sent
    for name, receipts in facts["receipts"].items():
        assert_own_bodies(client, f"py-{name}", receipts)
    for name, heard in facts["heard"].items():
        missing = sent - {number for number, _, _ in heard}
        assert not missing, f"{name}: never heard"
    first: dict[str, list[int]] = {}
    for number, group, _ in facts["heard"]["restart-fifo"]:
        if number not in first.setdefault(group, []):
            first[group].append(number)
    assert all(numbers == sorted(numbers) for numbers in first.values())


def assert_own_bodies(client: Client, topic: str, receipts: list[tuple[int, str]]) -> None:
    """Each number was heard with the receipt of the message that has it."""
    stored_numbers = {
        (row["queue_id"], row["queue_offset"]): int(row["body"])
        for queue in client.describe_topic(topic)["offsets"]
        for row in client.read(topic, queue["queue_id"], offset=0, limit=1_000_000).to_pylist()
    }
    places = receipt.decode(pa.array([handle for _, handle in receipts], pa.string()))
    at = zip(places.queue_id.tolist(), places.queue_offset.tolist(), strict=True)
    heard = [(place, number) for place, (number, _) in zip(at, receipts, strict=True)]
    assert heard == [(place, stored_numbers[place]) for place, _ in heard]


@contextlib.contextmanager
def window(client: Client) -> Iterator[None]:
    """Windows of a consumer handle the ordered messages for the time of a block: all, in order."""
    client.ensure_group("windows", order="message_group", max_attempts=1000)
    client.subscribe("windows", "ordered")
    handled: dict[str, list[int]] = {}
    ended: list[str] = []
    over = threading.Event()

    def handle(messages: pa.Table, _state: pa.Table) -> Outcome:
        for row in messages.select(["message_group", "body"]).to_pylist():
            number = int(row["body"].partition(b"\n")[0])
            handled.setdefault(row["message_group"], []).append(number)
        return Outcome()

    def run() -> None:
        spec = ConsumerSpec(
            name="windows",
            topic="ordered",
            group="windows",
            handler=handle,
            order_by="message_group",
        )
        while not over.is_set() or lag_of(client, "windows"):
            try:
                ended.append(run_window(spec, client, owner="me", idle_s=1.0, takeover=True).ended)
            except RocketMQError as error:  # as a run that is retried
                ended.append(type(error).__name__)
                over.wait(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(120)
    assert not thread.is_alive()
    print(f"windows: {sum(map(len, handled.values()))} calls' messages, ended {Counter(ended)}")
    for numbers in handled.values():
        first = list(dict.fromkeys(numbers))
        assert first == sorted(first)
    assert sum(len(set(numbers)) for numbers in handled.values()) == stored(client, "ordered")


def lag_of(client: Client, group: str) -> int:
    return int(sum(client.lag(group)["lag"].to_pylist()))


def is_read(client: Client) -> bool:
    """Return True if the receivers of ``Traffic`` have no message left.

    RocketMQ's client may end before the lease of a message that it has sent and heard twice. A
    broker that rebuilds its state is asked again.
    """
    try:
        return not any(lag_of(client, group) for group in ("readers", "followers"))
    except StorageError:
        return False


def spread(times: list[float]) -> str:
    """Return the median, the 99th percentile and the maximum of times in seconds."""
    median, p99 = statistics.median(times), sorted(times)[int(0.99 * len(times))]
    return f"{median:.2f} s at the median, {p99:.2f} at p99, {max(times):.2f} at most"


def test_standbys_take_over(
    zygote: Zygote,
    settings: dict[str, object],
    tmp_path: Path,
    eventually: Eventually,
    seed: int,
) -> None:
    """Two brokers with a home each: when one is killed or stopped, the other one leads."""
    dice, ledger = random.Random(seed), Ledger()
    attacks = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * STOPS
    dice.shuffle(attacks)
    away_s: dict[signal.Signals, list[float]] = {each: [] for each in attacks}
    pair = Pair(zygote, tmp_path, settings=settings)
    pids = pair.pids
    with Client(",".join(pair.flight)) as client, contextlib.ExitStack() as others:
        prepare(client)
        if KILLS >= 10:
            others.enter_context(official_client(client, ";".join(pair.grpc)))
            others.enter_context(window(client))
        sealing, traffic = Sealing(client), Traffic(client, ledger)
        traffic.start()
        try:
            for attack in attacks:
                answered = len(ledger.sent)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                traffic.sending.wait(dice.uniform(0, LIFE_S))
                leader = pair.attackable()
                os.kill(pids[leader], attack)
                began = time.monotonic()
                # A stopped leader wakes up after clients have gone on at the other one. Until that
                # one leads, answers of the old one may still arrive.
                leading([pair.flight[1 - leader]])
                answered = len(ledger.sent)
                eventually(lambda n=answered: len(ledger.sent) > n or traffic.failures)
                away_s[attack].append(time.monotonic() - began)
                if attack == signal.SIGSTOP:
                    os.kill(pids[leader], signal.SIGCONT)
                fenced = {signal.SIGKILL: -signal.SIGKILL, signal.SIGSTOP: LOG_FENCED}
                assert zygote.ask(reap=pids[leader]) in {fenced[attack], LOG_FENCED}
                pids[leader] = pair.start(leader)
                assert not ledger.violations
            traffic.stop_sending()
            others.close()
            eventually(lambda: is_read(client) or traffic.failures, within_s=120)
        finally:
            sealing.stop()
            traffic.stop()

        assert sealing.segments
        assert_kept(client, ledger)
        print(
            f"{KILLS} leaders killed and {STOPS} stopped (seed {seed}): {len(ledger.sent)} messages"
            f" answered, {ledger.again} deliveries repeated, {pair.fenced} leases run out by"
            f" themselves. Without writes:"
        )
        for attack, times in away_s.items():
            print(f"{attack.name}: {spread(times)}")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) in {0, LOG_FENCED}


def test_a_leader_that_stood_still_ends_and_answers_nothing(
    zygote: Zygote, settings: dict[str, object], tmp_path: Path, eventually: Eventually
) -> None:
    first, second = free_address(), free_address()
    old = zygote.ask(serve=str(tmp_path / "first"), flight=first, settings=settings)
    eventually(lambda: serving(tmp_path / "first"))
    with Client(first, retry_s=1.0) as client:
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
