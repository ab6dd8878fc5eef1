"""kill -9 of the broker, and of run workers, under all a pipeline does: the same end state.

RMQ_CHAOS_RUN_KILLS sets how often each (2).
"""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import pyarrow as pa
import pytest

from rmq_pipeline.errors import FencedError
from rmq_pipeline.handling.sink import read_sink, sink_files
from rmq_pipeline.redriving import manifest
from rmq_pipeline.topic import GIVEN_UP_TOPIC
from tests.chaos.brokerage import GROUPS, Books, Brokerage, table
from tests.chaos.exchange import FATES, GROUP, TOPIC, fate, is_left_open
from tests.chaos.floor import CONSUMER, Floor, go_on, pause, stop
from tests.conftest import Eventually

pytestmark = [
    # Dagster, Spark and a broker: beside other tests its runs are late.
    pytest.mark.alone,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(1800),
]

KILLS = int(os.environ.get("RMQ_CHAOS_RUN_KILLS", "2"))
#: Dead letters of a test, and how many of them are redriven a second: long enough for the kills.
DEAD, RATE = 20 * max(KILLS, 4), 10.0
CHECKS = "check_transactions"
#: Runs that are killed, and up to when after they are seen at work.
VICTIMS = {CONSUMER: 4.0, "redrive": 1.5, CHECKS: 1.5, "deliver_scheduled": 1.5}


@dataclass
class Session:
    """A floor, and the books of all that was sent there."""

    floor: Floor
    books: Books = field(default_factory=Books)
    #: Tags of bad messages: a redrive each.
    redrives: list[str] = field(default_factory=list)
    turns: int = 0

    def brokerage(self) -> Brokerage:
        self.turns += 1
        return Brokerage(self.floor.client, self.books, first=600_000 * self.turns)

    def halves_left_open(self) -> pa.Table:
        """Halves to be committed, about which their producer says no more."""
        n = next(number for number in range(len(FATES)) if is_left_open(number))
        assert fate(n) == "commit"
        halves = table("half", range(n, n + 1))
        self.books.owed.update(halves["message_id"].to_pylist())
        return halves

    def send_slow(self) -> None:
        """Messages that may be held up."""
        numbers = range(2 * GROUPS)
        slow = table("slow", numbers, message_group=[f"g{n % GROUPS}" for n in numbers])
        self.floor.client.send(TOPIC, slow)
        self.books.owed.update(slow["message_id"].to_pylist())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Floor(tmp_path_factory.mktemp("floor")) as floor:
        yield Session(floor)


def make_dead_letters(session: Session, eventually: Eventually) -> str:
    """Bad messages, made dead letters by the consumer; their tag, whose fault is then mended."""
    floor, tag = session.floor, f"bad{len(session.redrives)}"
    session.redrives.append(tag)
    groups = [f"g{number % GROUPS}" for number in range(DEAD)]
    messages = table(tag, range(DEAD), message_group=groups)
    floor.client.send(TOPIC, messages)
    session.books.owed.update(messages["message_id"].to_pylist())
    dead = DEAD * len(session.redrives)
    eventually(lambda: floor.count("SELECT count(*) FROM dead_letters") == dead, within_s=90)
    (floor.desk / f"mended-{tag}").touch()
    return tag


def redrive(session: Session, tag: str) -> str:
    """Launch the redrive of these, or go on with it; the run."""
    return session.floor.launch(
        "redrive", consumer_group=GROUP, redrive_id=tag, rate_per_s=RATE, where=f"tag = '{tag}'"
    )


def test_the_end_is_the_same_through_kills_of_the_broker(
    session: Session, eventually: Eventually
) -> None:
    floor, dice, during = session.floor, random.Random(11), Counter[str]()
    tag, brokerage = make_dead_letters(session, eventually), session.brokerage()
    brokerage.start()
    # The redrive lasts a few seconds only: it is the last to begin.
    others = set(VICTIMS) - {"redrive"}
    eventually(lambda: others <= dict(floor.unfinished("STARTED")).keys(), within_s=120)
    run = redrive(session, tag)
    eventually(lambda: set(VICTIMS) <= dict(floor.unfinished("STARTED")).keys(), within_s=60)

    began = time.monotonic()
    for _ in range(KILLS):
        answered = session.books.calls["answered"]
        eventually(lambda n=answered: session.books.calls["answered"] > n + 2)
        pause(dice.uniform(0, 1.2))
        during.update({job for job, _ in floor.unfinished("STARTED")})
        floor.kill_broker()
    killed_s = time.monotonic() - began
    pause(1)
    brokerage.stop()

    eventually(lambda: floor.is_over(run), within_s=180)
    assert floor.status(run) == "SUCCESS"
    assert_end(session, eventually)
    tell(session, f"{KILLS} kills of the broker", killed_s=killed_s, during=during)


def test_the_end_is_the_same_through_kills_of_run_workers(
    session: Session, eventually: Eventually
) -> None:
    floor, dice, killed = session.floor, random.Random(12), Counter[str]()
    tag, brokerage = make_dead_letters(session, eventually), session.brokerage()
    brokerage.start()
    run = redrive(session, tag)

    began = time.monotonic()
    most = -(-KILLS // len(VICTIMS))
    while killed.total() < KILLS:
        if floor.is_over(run):
            run = redrive(session, tag)
        if not any(job == CHECKS for job, _ in floor.unfinished()):
            take_over(floor, CHECKS)
        victim = at_work(floor, [job for job in VICTIMS if killed[job] < most])
        if victim is None:
            pause(0.1)
            continue
        job, run_id = victim
        worker = floor.worker(run_id)
        pause(dice.uniform(0, VICTIMS[job]))
        if worker is None or floor.is_over(run_id):
            continue
        try:
            started = worker.children(recursive=True)
            worker.kill()
        except psutil.NoSuchProcess:
            continue
        eventually(lambda r=run_id: floor.is_over(r))
        eventually(lambda all_of=started: not any(each.is_running() for each in all_of))
        # Its last word may have been said before the kill.
        killed[job] += floor.status(run_id) == "FAILURE"
    killed_s = time.monotonic() - began
    pause(1)
    brokerage.stop()
    take_over(floor, CHECKS)

    eventually(lambda: floor.is_over(run), within_s=180)
    if floor.status(run) != "SUCCESS":
        run = redrive(session, tag)
        eventually(lambda: floor.is_over(run), within_s=180)
    assert floor.status(run) == "SUCCESS"
    assert_end(session, eventually)
    tell(session, f"{KILLS} kills of run workers", killed_s=killed_s, during=killed)


def test_a_checker_that_was_stopped_is_fenced_off(session: Session, eventually: Eventually) -> None:
    floor, left = session.floor, session.halves_left_open()
    hold = floor.word("hold-checker")
    floor.client.send_half(TOPIC, left, producer_group="brokers", immunity_ms=1)
    eventually(lambda: floor.has_word("asked-checker"), within_s=60)
    old = floor.windows()[CHECKS]
    worker = floor.worker(old["owner"])
    assert worker is not None
    stopped = stop(worker)
    closed = floor.word("closed")
    hold.unlink()

    take_over(floor, CHECKS)
    # For a moment there may be none.
    eventually(lambda: floor.windows().get(CHECKS, old)["epoch"] > old["epoch"], within_s=60)
    go_on(stopped)
    eventually(lambda: floor.is_over(old["owner"]), within_s=60)

    assert floor.status(old["owner"]) == "SUCCESS"
    assert floor.facts(old["owner"])["handed_over"] is True
    assert floor.count("SELECT count(*) FROM half") == left.num_rows
    with pytest.raises(FencedError):
        floor.client.check_transactions(window=(f"upkeep/{CHECKS}", old["epoch"]))
    closed.unlink()
    assert_end(session, eventually)


def test_a_consumer_that_was_stopped_is_fenced_off(
    session: Session, eventually: Eventually
) -> None:
    floor = session.floor
    hold = floor.word("hold-handler")
    session.send_slow()
    eventually(lambda: floor.has_word("asked-handler"), within_s=60)
    old = floor.windows()[CONSUMER]
    worker = floor.worker(old["owner"])
    assert worker is not None
    stopped = stop(worker)
    hold.unlink()

    eventually(lambda: CONSUMER not in floor.windows(), within_s=60)
    floor.launch_consumer()
    assert_end(session, eventually)
    go_on(stopped)
    eventually(lambda: floor.is_over(old["owner"]), within_s=60)

    assert floor.status(old["owner"]) == "SUCCESS"
    assert floor.facts(old["owner"])["ended"] == "fenced"
    with pytest.raises(FencedError):
        floor.client.receive(GROUP, TOPIC, window=(f"consumer/{GROUP}", old["epoch"]))
    assert_end(session, eventually)


def at_work(floor: Floor, jobs: list[str]) -> tuple[str, str] | None:
    """Job and id of a run that does something now, of the first of these jobs that has one."""
    windows, started = floor.windows(), floor.unfinished("STARTED")
    owners = {window["owner"] for window in windows.values()}
    for job in jobs:
        for name, run_id in started:
            if name == job and (job == "redrive" or run_id in owners):
                return job, run_id
    return None


def take_over(floor: Floor, job: str) -> str:
    """Launch a window that takes over from one whose run is gone, as the sensor does in the end."""
    window = floor.windows().get(job)
    return floor.launch(job, hand_over_from=window["epoch"] if window else 0)


# ---------------------------------------------------------------------------------- the end state


def assert_end(session: Session, eventually: Eventually) -> None:
    """Every committed half and every other message once; rolled back never; order and state."""
    floor = session.floor
    sink = floor.sinks / GROUP
    eventually(lambda: is_drained(floor), within_s=180)
    stored = [
        message_id
        for queue in floor.client.describe_topic(TOPIC)["offsets"]
        for message_id in floor.client.read(TOPIC, queue["queue_id"], offset=0, limit=1_000_000)[
            "message_id"
        ].to_pylist()
    ]
    eventually(
        lambda: sum(sink_files(sink)["rows"].to_pylist()) >= len(stored),
        within_s=60,
        what=lambda: f"rows of {missing(floor, stored)}",
    )

    books, settled = session.books, read_sink(sink)
    assert max(Counter(stored).values()) == 1, "stored twice"
    assert books.owed <= set(stored)
    assert set(stored) <= books.owed | books.maybe
    assert not books.never & set(stored)
    assert Counter(settled["message_id"].to_pylist()) == Counter(stored)
    assert_in_order(settled)
    assert_redriven_once(session)
    assert floor.client.describe_topic(GIVEN_UP_TOPIC)["offsets"][0]["max_offset"] == 0


def missing(floor: Floor, stored: list[str]) -> str:
    """The stored messages that have no row in the sink, and the events of the first of them."""
    settled = read_sink(floor.sinks / GROUP)["message_id"].to_pylist()
    ids = sorted(set(stored).difference(settled))
    if not ids:
        return f"no message: {len(settled)} rows, {len(stored)} messages"
    events = floor.client.sql(
        f"SELECT * FROM message_trace WHERE message_id = '{ids[0]}'"
    ).to_pylist()
    return f"{len(ids)} messages, {ids[:10]}; of the first: {events}"


def is_drained(floor: Floor) -> bool:
    half = floor.count("SELECT count(*) FROM half")
    scheduled = floor.client.due()["jobs"]["deliver_scheduled"]["next_due_ms"]
    return not half and scheduled is None and not floor.count("SELECT sum(lag) FROM lag")


def assert_in_order(settled: pa.Table) -> None:
    """Each group's steps are 1 to n, and what was sent in order has come in order."""
    groups = defaultdict(list)
    for row in settled.to_pylist():
        if row["message_group"]:
            groups[row["message_group"]].append((row["seen"], row["tag"], row["number"]))
    for rows in groups.values():
        rows.sort()
        assert [seen for seen, *_ in rows] == list(range(1, len(rows) + 1))
        for tag in {tag for _, tag, _ in rows}:
            numbers = [number for _, its, number in rows if its == tag]
            assert numbers == sorted(numbers), tag


def assert_redriven_once(session: Session) -> None:
    client, places = session.floor.client, set()
    for tag in session.redrives:
        rows = manifest(client, tag).to_pylist()
        assert len(rows) == DEAD
        assert {row["outcome"] for row in rows} == {"acked"}
        places |= {(row["queue_id"], row["queue_offset"]) for row in rows}
    assert len(places) == DEAD * len(session.redrives)
    [dead] = client.describe_topic(f"%DLQ%{GROUP}")["offsets"]
    assert dead["max_offset"] == len(places)


def tell(session: Session, what: str, *, killed_s: float, during: Counter[str]) -> None:
    books, calls = session.books, session.books.calls
    print(
        f"{what} in {killed_s:.0f} s, {dict(during)}: so far {len(books.owed)} messages owed and"
        f" {len(books.never)} rolled back, {calls['lost']} of {calls.total()} calls lost,"
        f" {DEAD} redriven"
    )
