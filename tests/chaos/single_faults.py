"""A broker whose disk fails, one call or some seconds long, while it is used.

``python -m tests.chaos.single_faults N [FOLDER]`` goes through N faults and prints what became of
each.
"""

import contextlib
import errno
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.flight.client import Client
from tests.chaos.failing_calls import SHORT, Call, FailingCalls, Fault

LASTS_S: Final = 10.0
#: A broker serves again after a fault within this time.
AGAIN_S: Final = 10.0
#: How long a fault that happens once may take to be met.
MEET_S: Final = 20.0
BODIES: Final = 60
BODY_BYTES: Final = 10_000
SETTINGS: Final = {
    "log_file_bytes": 1 << 20,
    "reserve_bytes": 1 << 20,
    "seal_after_ms": 0,
    "snapshot_every_ms": 0,
    "snapshot_events": 1,
    "compact_min_inputs": 2,
    "duckdb_memory_bytes": 64 << 20,
}

_WHOLE: Final = (Call.OPEN, Call.WRITE, Call.SYNC, Call.RENAME)
#: The files that a home is made of while it is used, and what is done with them.
FILES: Final = {
    "*/log/*.log": (Call.WRITE, Call.SYNC),
    "*/log/*.new": (*_WHOLE, Call.ALLOCATE),
    "*/log": (Call.SYNC,),
    "*/state.duckdb": (Call.WRITE, Call.SYNC),
    "*/state.duckdb.wal": (Call.OPEN, Call.WRITE, Call.SYNC),
    "*/events/*": _WHOLE,
    "*/snapshots/*": _WHOLE,
    "*/topics/*.new": (Call.OPEN, Call.WRITE, Call.SYNC, Call.RENAME),
    "*_manifest.json*": (Call.OPEN, Call.WRITE, Call.RENAME),
    "*/topics/*": (Call.SYNC,),
}
_ERRORS: Final = {
    Call.OPEN: (errno.EIO, errno.ENOSPC, errno.EMFILE),
    Call.WRITE: (errno.EIO, errno.ENOSPC, SHORT),
    Call.SYNC: (errno.EIO, errno.ENOSPC),
    Call.RENAME: (errno.EIO, errno.ENOSPC),
    Call.ALLOCATE: (errno.EIO, errno.ENOSPC),
}


def all_faults() -> list[Fault]:
    """Each call on each file, with each error, once and for a while."""
    return [
        Fault(pattern, call, error, seconds)
        for pattern, calls in FILES.items()
        for call in calls
        for error in _ERRORS[call]
        for seconds in (0.0, LASTS_S)
    ]


def faults(count: int, *, seed: int) -> list[Fault]:
    """So many of them, in an order of their own; all before one comes again."""
    dice = random.Random(seed)
    rounds = (dice.sample(some, len(some)) for some in itertools.repeat(all_faults()))
    return list(itertools.islice(itertools.chain.from_iterable(rounds), count))


@dataclass
class Outcome:
    """What became of a broker that met a fault."""

    fault: Fault
    hits: int = 0
    #: From the end of the fault until calls of all kinds were begun that were answered.
    again_s: float = 0.0
    #: Calls that were answered with an error.
    refused: int = 0
    #: The code it ended with, if it did.
    code: int | None = None
    said: str = ""

    @property
    def is_good(self) -> bool:
        """It served again in time, or ended with a reason."""
        return self.again_s <= AGAIN_S if self.code is None else bool(self.code and self.said)

    def __str__(self) -> str:
        became = f"again {self.again_s:.1f} s" if self.code is None else f"ended {self.code}"
        good = "good" if self.is_good else "BAD"
        text = f"{good}  {self.fault!s:52} hits={self.hits:<5} refused={self.refused:<4} {became}"
        return f"{text}  {self.said}"


@dataclass
class Ledger:
    """What was answered."""

    sent: dict[str, bytes] = field(default_factory=dict)
    #: Acks that were answered, and that were tried.
    acked: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)


class User:
    """Uses the broker of a home, and knows what it was answered."""

    def __init__(self, home: Path) -> None:
        self.client = Client(home=home, retry_s=2.0)
        self.ledger = Ledger()
        self.error = ""
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Make what it uses."""
        self.client.ensure_topic("plain", queues=2)
        self.client.ensure_group("readers", max_attempts=1000)

    def turn(self) -> dict[str, float]:
        """Everything once: when each call was begun that was answered."""
        steps = (self._one, self._many, self._take, self._keep, self._ask)
        begun = {}
        for step in steps:
            at = time.monotonic()
            if self._is_answered(step):
                begun[step.__name__] = at
        return begun

    def _is_answered(self, step: object) -> bool:
        try:
            step()  # type: ignore[operator]
        except RocketMQError as error:
            self.error = f"{getattr(step, '__name__', '')}: {type(error).__name__}: {error}"
            return False
        return True

    def _one(self) -> None:
        self._send([os.urandom(100)])

    def _many(self) -> None:
        self._send([os.urandom(BODY_BYTES) for _ in range(BODIES)])

    def _send(self, bodies: list[bytes]) -> None:
        ids = [f"{next(self._numbers)}" for _ in bodies]
        self.client.send("plain", pa.table({"body": bodies, "message_id": ids}))
        self.ledger.sent.update(zip(ids, bodies, strict=True))

    def _take(self) -> None:
        got = self.client.receive("readers", "plain", limit=30, invisible_duration_ms=30_000)
        ids = got["message_id"].to_pylist()
        again = self.ledger.acked.intersection(ids)
        assert not again, f"came again after their acks: {again}"
        self.ledger.tried.update(ids)
        self.client.ack(got)
        self.ledger.acked.update(ids)

    def _keep(self) -> None:
        self.client.seal()
        self.client.compact()

    def _ask(self) -> None:
        lag = self.client.sql("SELECT sum(lag)::BIGINT AS lag FROM lag")
        assert lag.num_rows == 1

    def check(self) -> None:
        """See that everything answered is there."""
        ledger, found = self.ledger, dict[str, bytes]()
        for queue in self.client.describe_topic("plain")["offsets"]:
            high = queue["max_offset"]
            table = self.client.read("plain", queue["queue_id"], offset=0, limit=1 << 30)
            assert table["queue_offset"].to_pylist() == list(range(high)), "offsets are missing"
            ids, bodies = table["message_id"].to_pylist(), table["body"].to_pylist()
            found.update(zip(ids, bodies, strict=True))
        lost = {i for i, body in ledger.sent.items() if found.get(i) != body}
        assert not lost, f"lost {len(lost)} of {len(ledger.sent)} messages: {sorted(lost)[:5]}"

    def drain(self) -> None:
        """Receive all that is left: what was not acked comes, what was does not."""
        ledger, came = self.ledger, set[str]()
        pause = threading.Event()
        give_up_at = time.monotonic() + 120
        owed = ledger.sent.keys() - ledger.tried
        while owed - came or self._lag():
            assert time.monotonic() < give_up_at, f"not delivered: {len(owed - came)}"
            got = self.client.receive("readers", "plain", limit=1_000)
            ids = got["message_id"].to_pylist()
            again = ledger.acked.intersection(ids)
            assert not again, f"came again after their acks: {again}"
            came.update(ids)
            self.client.ack(got)
            ledger.acked.update(ids)
            pause.wait(0.05)

    def _lag(self) -> int:
        found = self.client.sql("SELECT sum(lag)::BIGINT AS lag FROM lag")["lag"][0].as_py()
        return int(found or 0)


class Host:
    """Starts the broker of a home with calls that may fail."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.calls = FailingCalls(folder / "faults")
        self.log = folder / "said"
        self.broker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A broker that serves."""
        code = "import sys; from rmq_pipeline.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "broker", "--home", str(self.home)]
        command += ["--flight", "127.0.0.1:0", "--grpc", "none"]
        command += [f"--set={name}={value}" for name, value in SETTINGS.items()]
        with self.log.open("ab") as said:
            self.broker = subprocess.Popen(
                command, env=self.calls.environment, stdout=subprocess.PIPE, stderr=said
            )
        assert self.broker.stdout is not None
        ready = self.broker.stdout.readline()
        assert ready.startswith(b"ready "), self.last_words()

    def kill(self) -> None:
        """kill -9."""
        if self.broker is not None:
            self.broker.kill()
            self.broker.communicate()

    def last_words(self) -> str:
        """The last line it has said."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@contextlib.contextmanager
def hosted(folder: Path) -> Iterator[tuple[Host, User]]:
    """A home with a broker and its user."""
    host = Host(folder)
    host.start()
    user = User(host.home)
    try:
        user.prepare()
        yield host, user
    finally:
        user.client.close()
        host.kill()


def meet(host: Host, user: User, fault: Fault) -> Outcome:
    """Use a broker until it has met the fault and serves again, or has ended."""
    outcome, broker = Outcome(fault), host.broker
    assert broker is not None
    kinds = user.turn().keys()
    host.calls.begin(fault)
    begun, over_at = time.monotonic(), 0.0
    #: By kind, when the first call was begun that was answered after the fault.
    first: dict[str, float] = {}
    while broker.poll() is None:
        answered = user.turn()
        outcome.hits = host.calls.hits
        outcome.refused += len(kinds) - len(answered)
        now = time.monotonic()
        if not over_at and fault.seconds:
            over_at = begun + fault.seconds if now > begun + fault.seconds else 0.0
        elif not over_at and (outcome.hits or now > begun + MEET_S):
            over_at = now
        for kind, at in answered.items():
            if over_at and at >= over_at:
                first.setdefault(kind, at)
        outcome.again_s = now - over_at if over_at else 0.0
        if first.keys() == kinds or outcome.again_s > 3 * AGAIN_S:
            break
    if broker.poll() is not None:
        outcome.code, outcome.said = broker.returncode, host.last_words()
    elif first.keys() == kinds:
        # How long a call takes says more of the machine than of the broker.
        outcome.again_s = max(first.values()) - over_at
    else:
        outcome.said = user.error
    host.calls.end()
    return outcome


def go_through(some: Sequence[Fault], folder: Path) -> Iterator[Outcome]:
    """A broker for each fault, all of one home, each killed in the end.

    Raises:
        AssertionError: something answered was lost.
    """
    with hosted(folder) as (host, user):
        for fault in some:
            outcome = meet(host, user, fault)
            host.kill()
            host.start()
            try:
                user.check()
            except AssertionError as error:
                raise AssertionError(f"{fault}: {error}") from error
            yield outcome
        user.drain()


def main(count: int, folder: Path) -> int:
    """Go through faults in several homes at a time: most of their time is waiting."""
    seed = int(os.environ.get("RMQ_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    chosen, homes = faults(count, seed=seed), 4
    outcomes: list[Outcome] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for outcome in go_through(chosen[number::homes], folder / f"{number}"):
                outcomes.append(outcome)
                print(outcome, flush=True)
        except BaseException as error:  # noqa: BLE001 - told in the end
            failures.append(error)
            print("FAILED", repr(error), flush=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(homes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    good = sum(outcome.is_good for outcome in outcomes)
    met = sum(outcome.hits > 0 for outcome in outcomes)
    ended = sum(outcome.code is not None for outcome in outcomes)
    print(f"{len(outcomes)} faults (seed {seed}): {good} good, {met} met, {ended} ended")
    return int(bool(failures) or good < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
