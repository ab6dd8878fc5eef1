"""Histories of all verbs, with crashes in them: the broker keeps what the model promises.

RMQ_SIMULATION_HISTORIES sets how many, by chance then; else always the same ones.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rmq_pipeline import errors, schema
from rmq_pipeline.settings import Settings
from tests.simulation.crashing import CrashingBroker, Trouble
from tests.simulation.model import (
    BACKOFF_MS,
    CHECK_INTERVAL_MS,
    CHECKS,
    IMMUNITY_MS,
    MAX_ATTEMPTS,
    Consumer,
    Entry,
    Half,
    Model,
)

HISTORIES = int(os.environ.get("RMQ_SIMULATION_HISTORIES", "0"))
STEPS = 50
#: Crashes here are copies of files: a disk would add nothing but its time.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SETTINGS = Settings(
    reserve_bytes=0,
    log_file_bytes=1024 * 1024,
    seal_after_ms=2_000,
    delay_levels_ms=(1_000, 3_000),
    transaction_immunity_ms=IMMUNITY_MS,
    transaction_check_interval_ms=CHECK_INTERVAL_MS,
    transaction_check_max=CHECKS,
)
TOPICS = {
    "ordered": "fifo",
    "loose": "normal",
    "later": "delay",
    "urgent": "priority",
    "deals": "transaction",
    "anything": "mixed",
}
QUEUES = 2
KEYS = ("a", "b", "c")
TAGS = {"filter": "a || b"}
SQL = {"filter": "n > 1 AND TAGS <> 'b' OR n = 0", "filter_type": "sql92"}
POLICIES = ("dead_letter", "park", "dead_letter_group")
#: The receipt of a delivery, or the id of a transaction, that nobody was told of.
LOST = "lost"


def tag(number: int) -> str:
    return "abc"[number % 3]


def everything(number: int) -> bool:
    return number >= 0


def tagged(number: int) -> bool:
    return tag(number) in "ab"


def conditioned(number: int) -> bool:
    n = number % 5
    return (n > 1 and tag(number) != "b") or n == 0


def consumer(name: str, on_failure: str) -> Consumer:
    """A consumer group of this name, which says what it reads and how."""
    topic, _, how = name.removeprefix("of-").partition("-")
    ordered = TOPICS[topic] in ("fifo", "mixed")
    filters = {"tagged": (TAGS, tagged), "conditioned": (SQL, conditioned)}
    wanted, wants = filters.get(how, ({}, everything))
    return Consumer(name, topic, ordered, on_failure, wanted, wants)


CONSUMERS = (
    *("of-ordered", "of-ordered-tagged", "of-loose", "of-loose-conditioned"),
    *("of-later", "of-urgent", "of-deals", "of-anything"),
)


def some(strategy: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=1, max_size=most)


#: Which of those there are; a list of these is gone through again and again.
CHOICES = some(st.booleans())
#: Taken modulo how many there are.
ANY = st.integers(0, 5)
#: Mostly none.
TROUBLE = st.one_of(
    *[st.none()] * 7,
    st.builds(
        Trouble,
        st.sampled_from(("staged", "before_write", "half_written", "written")),
        st.booleans(),
    ),
)
#: Message group, delay and priority of a message; its topic says which of these count.
ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from((1, 50, 1_000, 3_000)), st.integers(0, 3)),
    min_size=2,
    max_size=8,
)


class Histories(RuleBasedStateMachine):
    """A broker and a model that are told the same."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir=MEMORY))
        self.crashing = CrashingBroker(self.folder, SETTINGS)
        self.sealed = False
        self.sent = 0
        self.handles: dict[int, str] = {}
        self.receipts: dict[str, list[str]] = defaultdict(list)

    @initialize(
        names=st.lists(st.sampled_from(CONSUMERS), min_size=1, max_size=3, unique=True),
        policies=st.lists(st.sampled_from(POLICIES), min_size=3, max_size=3),
        rows=ROWS,
    )
    def begin_history(
        self, names: list[str], policies: list[str], rows: list[tuple[str, int, int]]
    ) -> None:
        """Up to three consumer groups, and something for each of them to read."""
        chosen = [consumer(name, how) for name, how in zip(names, policies, strict=False)]
        self.topics = sorted({one.topic for one in chosen})
        self.model = Model(chosen)
        for name in self.topics:
            self.crashing.broker.create_topic(name, type=TOPICS[name], queues=QUEUES)
        for one in chosen:
            self.crashing.broker.create_group(
                one.name,
                order="message_group" if one.ordered else "none",
                max_attempts=MAX_ATTEMPTS,
                backoff_ms=BACKOFF_MS,
                on_failure=one.on_failure,
            )
        for which in range(len(self.topics)):
            for kind in ("fifo", "delay", "transaction"):
                self.send(which, rows, kind, False, None)

    @property
    def now(self) -> int:
        return self.crashing.clock.now_ms()

    def consumer(self, which: int) -> Consumer:
        return self.model.consumers[which % len(self.model.consumers)]

    def table(self, n: int, **columns: Any) -> tuple[list[int], pa.Table]:
        """New messages, and their numbers."""
        numbers = list(range(self.sent, self.sent + n))
        self.sent += n
        table = {
            "body": [str(number).encode() for number in numbers],
            "message_id": [f"m-{number}" for number in numbers],
            "tag": [tag(number) for number in numbers],
            "properties": [{"n": str(number % 5)} for number in numbers],
            **columns,
        }
        fields = [schema.SEND.field(name) for name in table]
        return numbers, pa.table(table, schema=pa.schema(fields))

    # ------------------------------------------------------------------------------- producers

    @rule(
        which=ANY,
        rows=ROWS,
        mixed=st.sampled_from(("fifo", "fifo", "normal", "delay", "transaction")),
        levels=st.booleans(),
        trouble=TROUBLE,
    )
    def send(
        self,
        which: int,
        rows: list[tuple[str, int, int]],
        mixed: str,
        levels: bool,
        trouble: Trouble | None,
    ) -> None:
        """Messages of the topic's type; a mixed topic takes any."""
        topic = self.topics[which % len(self.topics)]
        kind = mixed if TOPICS[topic] == "mixed" else TOPICS[topic]
        if kind == "transaction":
            self.begin(topic, len(rows), trouble)
        elif kind == "delay":
            self.send_later(topic, rows, levels=levels, trouble=trouble)
        else:
            keys, _, priorities = zip(*rows, strict=True)
            keys = keys if kind == "fifo" else ("",) * len(keys)
            columns: dict[str, Any] = {"message_group": keys} if kind == "fifo" else {}
            columns |= {"priority": priorities} if kind == "priority" else {}
            numbers, table = self.table(len(rows), **columns)
            _, stored = self.crashing.ask("send", topic, table, trouble=trouble)
            for i, number in enumerate(numbers) if stored else ():
                queue = min(priorities[i], QUEUES - 1)
                self.model.store(topic, number, key=keys[i], priority=queue, now=self.now)

    def send_later(
        self,
        topic: str,
        rows: list[tuple[str, int, int]],
        *,
        levels: bool,
        trouble: Trouble | None,
    ) -> None:
        """Messages for a time, or of a delay level; in a mixed topic of a message group too."""
        keys, delays, _ = zip(*rows, strict=True)
        columns: dict[str, Any] = {"deliver_at_ms": [self.now + delay for delay in delays]}
        if topic == "anything":
            columns["message_group"] = keys
        elif levels:
            delays = tuple(1_000 if delay < 1_000 else 3_000 for delay in delays)
            columns = {"delay_level": [1 if delay == 1_000 else 2 for delay in delays]}
        numbers, table = self.table(len(rows), **columns)
        sent, stored = self.crashing.ask("send", topic, table, trouble=trouble)
        for i, number in enumerate(numbers) if stored else ():
            key = keys[i] if topic == "anything" else ""
            self.model.scheduled[number] = (self.now + delays[i], topic, key)
        if sent is not None:
            self.handles.update(zip(numbers, sent["recall_handle"].to_pylist(), strict=True))

    def begin(self, topic: str, n: int, trouble: Trouble | None) -> None:
        """Half messages."""
        numbers, table = self.table(n)
        sent, stored = self.crashing.ask(
            "send_half", topic, table, producer_group="producers", trouble=trouble
        )
        ids = [LOST] * n if sent is None else sent["transaction_id"].to_pylist()
        for number, transaction_id in zip(numbers, ids, strict=True) if stored else ():
            self.model.halves[number] = Half(topic, transaction_id, self.now + IMMUNITY_MS)

    @precondition(lambda self: self.model.scheduled)
    @rule(limit=st.sampled_from((1, 5, 1_000)), trouble=TROUBLE)
    def deliver_scheduled(self, limit: int, trouble: Trouble | None) -> None:
        report, done = self.crashing.ask("deliver_scheduled", limit=limit, trouble=trouble)
        if done:
            delivered = self.model.deliver(self.now, limit)
            assert report is None or report["delivered"] == delivered

    @precondition(lambda self: self.handles)
    @rule(which=CHOICES, trouble=TROUBLE)
    def recall(self, which: list[bool], trouble: Trouble | None) -> None:
        """All of them still wait, or none is called back."""
        waiting = self.model.scheduled
        known = [number for number in self.handles if number in waiting or number % 4 == 0]
        chosen = [n for n, yes in zip(known[-8:], cycle(which), strict=False) if yes]
        topics = [waiting[n][1] if n in waiting else "" for n in chosen]
        topic = topics[0] if topics and topics[0] else self.topics[0]
        handles = pa.table([[self.handles[n] for n in chosen]], schema=schema.RECALL)
        if any(name != topic for name in topics):
            with pytest.raises(errors.RecallError):
                self.crashing.broker.recall(topic, handles)
            return
        recalled, done = self.crashing.ask("recall", topic, handles, trouble=trouble)
        assert recalled is None or recalled["message_id"].to_pylist() == [f"m-{n}" for n in chosen]
        for number in chosen if done else ():
            del waiting[number]

    # ---------------------------------------------------------------------------- transactions

    @precondition(lambda self: self.model.halves)
    @rule(
        said=some(st.sampled_from(("commit", "commit", "rollback", "unknown", None))),
        trouble=TROUBLE,
    )
    def end(self, said: list[str | None], trouble: Trouble | None) -> None:
        """Halves end once, and are answered the same ever after."""
        known = [(n, h) for n, h in self.model.halves.items() if h.transaction_id != LOST]
        chosen = [
            (number, half, resolution)
            for (number, half), resolution in zip(known[-8:], cycle(said), strict=False)
            if resolution is not None
        ]
        table = pa.table(
            [[half.transaction_id for _, half, _ in chosen], [said for _, _, said in chosen]],
            schema=schema.RESOLUTION,
        )
        if any(half.state not in ("open", said) and said != "unknown" for _, half, said in chosen):
            with pytest.raises(errors.TransactionEndedError):
                self.crashing.broker.end_transactions(table)
            return
        expected = [
            (said, said != "unknown") if half.state == "open" else (half.state, False)
            for _, half, said in chosen
        ]
        ended, done = self.crashing.ask("end_transactions", table, trouble=trouble)
        if ended is not None:
            answers = (ended["resolution"].to_pylist(), ended["first_time"].to_pylist())
            assert list(zip(*answers, strict=True)) == expected
        for number, half, resolution in chosen if done else ():
            if half.state == "open" and resolution != "unknown":
                half.state = resolution
                if resolution == "commit":
                    self.model.store(half.topic, number, now=self.now)

    @precondition(lambda self: self.model.halves)
    @rule()
    def check(self) -> None:
        """Count the checks, and ask about all of these."""
        asked, given_up = self.model.check(self.now)
        report = self.crashing.broker.check_transactions()
        assert (report["checked"], report["given_up"]) == (len(asked), len(given_up))
        offered = self.crashing.broker.fetch_checks(limit=1_000)
        halves = {number: self.model.halves[number] for number in asked}
        ids = [(f"m-{number}", half.checks) for number, half in halves.items()]
        found = (offered["message_id"].to_pylist(), offered["checks"].to_pylist())
        assert sorted(zip(*found, strict=True)) == sorted(ids)

    # ------------------------------------------------------------------------------- consumers

    @rule(
        which=ANY,
        limit=st.sampled_from((1, 3, 8, 100)),
        duration=st.sampled_from((100, 500, 2_000)),
        trouble=TROUBLE,
    )
    def receive(self, which: int, limit: int, duration: int, trouble: Trouble | None) -> None:
        self.take(self.consumer(which), limit, duration=duration, trouble=trouble)

    def take(
        self,
        consumer: Consumer,
        limit: int,
        *,
        duration: int = 2_000,
        trouble: Trouble | None = None,
    ) -> bool:
        """One receive, held against the model; whether it gave anything."""
        got, done = self.crashing.ask(
            "receive",
            consumer.topic,
            consumer.name,
            limit=limit,
            invisible_duration_ms=duration,
            trouble=trouble,
            **consumer.filter,
        )
        if not done:
            return False
        consumer.expire(self.now)
        allowed = consumer.deliverable(self.now)
        rows = self.leased_unheard(consumer) if got is None else got.to_pylist()
        if not rows and allowed and self.crashing.cut_off:
            self.revive(None)
            return self.take(consumer, limit, duration=duration)
        assert len(rows) <= limit
        assert rows or not allowed or got is None, f"{consumer.name}: nothing of {allowed}"
        given: dict[str, list[Entry]] = defaultdict(list)
        for row in rows:
            number = int(row["message_id"].removeprefix("m-"))
            assert number in consumer.entries, f"{consumer.name}: {number} is not there"
            entry = consumer.entries[number]
            entry.attempts, entry.receipt = entry.attempts + 1, row["receipt_handle"]
            entry.leased_until = self.now + duration
            attempt = row["delivery_attempt"]
            assert attempt == entry.attempts, f"{consumer.name}: attempt {attempt} of {entry}"
            key = entry.key if consumer.ordered and entry.key else f"#{number}"
            given[key].append(entry)
            self.receipts[consumer.name].append(entry.receipt)
        for key, entries in given.items():
            first = allowed.get(key, [])[: len(entries)]
            assert entries == first, f"{consumer.name}: {entries} where {first} may come"
        self.assert_urgent(consumer, allowed)
        return bool(rows)

    def assert_urgent(self, consumer: Consumer, allowed: dict[str, list[Entry]]) -> None:
        """Nothing is left behind that has a higher priority than what was given."""
        if consumer.topic == "urgent":
            entries = [entry for some in allowed.values() for entry in some]
            given = [entry.priority for entry in entries if entry.receipt]
            left = [entry.priority for entry in entries if not entry.receipt]
            assert not given or not left or max(left) <= min(given)

    def leased_unheard(self, consumer: Consumer) -> list[dict[str, Any]]:
        """What a receive leased whose answer got lost, as the broker tells of it."""
        rows = self.crashing.broker.sql(
            "SELECT message_id, delivery_attempt FROM in_flight"
            f" WHERE consumer_group = '{consumer.name}' AND visible_at_ms > {self.now}"
            " ORDER BY queue_id, queue_offset"
        ).to_pylist()
        known = {f"m-{entry.number}" for entry in consumer.leased()}
        return [{**row, "receipt_handle": LOST} for row in rows if row["message_id"] not in known]

    def held(self, consumer: Consumer, which: list[bool]) -> list[Entry]:
        """Some of what is leased, with a receipt; something is received if nothing is."""
        consumer.expire(self.now)
        if not consumer.leased():
            self.take(consumer, 8)
        known = [entry for entry in consumer.leased() if entry.receipt != LOST]
        return [entry for entry, yes in zip(known, cycle(which), strict=False) if yes]

    @rule(
        which=ANY,
        said=some(st.sampled_from(("ack", "ack", "ack", "retry", "retry", "dead_letter", None))),
        after=st.sampled_from((None, None, 0, 90, 1_000)),
        stale=st.booleans(),
        publish=st.booleans(),
        trouble=TROUBLE,
    )
    def settle(
        self,
        which: int,
        said: list[str | None],
        after: int | None,
        stale: bool,
        publish: bool,
        trouble: Trouble | None,
    ) -> None:
        """Acknowledge, fail or give up some of what is in flight, and send something with it."""
        consumer = self.consumer(which)
        flying = self.held(consumer, [True])
        outcomes = [
            (entry, outcome, after)
            for entry, outcome in zip(flying, cycle(said), strict=False)
            if outcome is not None
        ]
        rows: list[dict[str, Any]] = [
            {"receipt_handle": e.receipt, "outcome": o, "retry_after_ms": a, "reason": "boom"}
            for e, o, a in outcomes
        ]
        current = {entry.receipt for entry in flying}
        ended = [r for r in self.receipts[consumer.name] if r not in current and r != LOST]
        if stale and ended:
            rows.append({"receipt_handle": ended[-1], "outcome": "ack"})
            table = pa.Table.from_pylist(rows, schema=schema.OUTCOME)
            with pytest.raises(errors.ReceiptHandleError):
                self.crashing.broker.settle(consumer.name, table)
            return
        table = pa.Table.from_pylist(rows, schema=schema.OUTCOME)
        numbers, onward = self.table(2 if publish and "loose" in self.topics else 0)
        answer, done = self.crashing.ask(
            "settle",
            consumer.name,
            table,
            publish={"loose": onward} if numbers else {},
            trouble=trouble,
        )
        if done:
            assert answer is None or answer["acked"] == sum(o == "ack" for _, o, _ in outcomes)
            consumer.settle(outcomes, self.now)
            for number in numbers:
                self.model.store("loose", number, now=self.now)

    @rule(which=ANY, chosen=CHOICES, trouble=TROUBLE)
    def forward(self, which: int, chosen: list[bool], trouble: Trouble | None) -> None:
        consumer = self.consumer(which)
        entries = self.held(consumer, chosen)
        receipts = [entry.receipt for entry in entries]
        _, done = self.crashing.ask("forward_to_dead_letter_queue", receipts, trouble=trouble)
        if done:
            consumer.settle([(entry, "dead_letter", None) for entry in entries], self.now)

    @rule(
        which=ANY,
        chosen=CHOICES,
        duration=st.sampled_from((1, 300, 5_000)),
        trouble=TROUBLE,
    )
    def change_invisible_duration(
        self, which: int, chosen: list[bool], duration: int, trouble: Trouble | None
    ) -> None:
        """Other ends for some leases; in order for all of a message group."""
        consumer = self.consumer(which)
        entries = self.held(consumer, chosen)
        if consumer.ordered:
            keys = {entry.key for entry in entries}
            entries = [entry for entry in self.held(consumer, [True]) if entry.key in keys]
        receipts = [entry.receipt for entry in entries]
        verb = "change_invisible_duration"
        table, done = self.crashing.ask(verb, receipts, duration, trouble=trouble)
        if done:
            new = [LOST] * len(entries) if table is None else table["receipt_handle"].to_pylist()
            for entry, receipt in zip(entries, new, strict=True):
                entry.receipt, entry.leased_until = receipt, self.now + duration
                self.receipts[consumer.name].append(receipt)

    @rule(which=ANY, key=st.sampled_from((None, None, *KEYS)), skip=st.booleans())
    def unpark(self, which: int, key: str | None, skip: bool) -> None:
        """What was given up so far is looked at before: from now on it is pardoned."""
        consumer = self.consumer(which)
        self.record(consumer)
        groups = None if key is None else pa.table({"message_group": [key]})
        answer = self.crashing.broker.unpark(consumer.name, message_groups=groups, skip=skip)
        assert answer == consumer.unpark(self.now, key=key, skip=skip)

    def record(self, consumer: Consumer) -> None:
        """Let the broker look at all that has happened to this group."""
        while consumer.ordered and consumer.condemned and self.take(consumer, 100):
            pass
        self.revive(None)

    @precondition(lambda self: any(one.dead for one in self.model.consumers))
    @rule(which=ANY, chosen=CHOICES, trouble=TROUBLE)
    def redrive(self, which: int, chosen: list[bool], trouble: Trouble | None) -> None:
        """Each dead letter once ever."""
        consumer = self.consumer(which)
        dead = self.dead_letters(consumer)[-8:]
        picked = [one for one, yes in zip(dead, cycle(chosen), strict=False) if yes]
        offsets = [offset for offset, _ in picked]
        places = pa.table([[0] * len(offsets), offsets], schema=schema.DEAD_LETTER)
        answer, done = self.crashing.ask(
            "redrive", consumer.name, places, redrive_id="r", trouble=trouble
        )
        if done:
            consumer.expire(self.now)
            said = [consumer.redrive(n, offset=o, now=self.now) for o, n in picked]
            assert answer is None or answer["outcome"].to_pylist() == said

    def dead_letters(self, consumer: Consumer) -> list[tuple[int, int]]:
        """Offset and message of each."""
        table = self.crashing.broker.read(f"%DLQ%{consumer.name}", 0, offset=0, limit=10_000)
        return [(row["queue_offset"], int(row["body"])) for row in table.to_pylist()]

    @rule(which=ANY, earliest=st.booleans())
    def reset_offset(self, which: int, earliest: bool) -> None:
        consumer = self.consumer(which)
        self.record(consumer)
        where = {"to_earliest": True} if earliest else {"to_latest": True}
        self.crashing.broker.reset_offset(consumer.name, consumer.topic, **where)
        consumer.reset(self.now, earliest=earliest)

    @rule(which=ANY, policy=st.sampled_from(POLICIES))
    def alter_group(self, which: int, policy: str) -> None:
        """What is parked was so under the old policy: groups without any are altered."""
        consumer = self.consumer(which)
        self.record(consumer)
        if not consumer.having("parked"):
            self.crashing.broker.alter_group(consumer.name, on_failure=policy)
            consumer.on_failure = policy

    # ---------------------------------------------------------------------------------- upkeep

    @rule(trouble=TROUBLE)
    def revive(self, trouble: Trouble | None) -> None:
        answer, done = self.crashing.ask("revive", trouble=trouble)
        self.crashing.cut_off &= answer is None
        for consumer in self.model.consumers if done else ():
            consumer.expire(self.now)

    @rule(what=st.sampled_from(("dispatch", "seal", "crash", "reopen", "reopen from the log")))
    def restart(self, what: str) -> None:
        """What lies where on disk changes, and who has it open."""
        if what == "dispatch":
            self.crashing.broker.engine.dispatched()
        elif what == "seal":
            self.sealed = True
            self.crashing.broker.seal()
        elif what == "crash":
            self.crashing.crash()
        else:
            self.crashing.reopen(from_the_log=what.endswith("log") and not self.sealed)

    @rule(milliseconds=st.sampled_from((1, 49, 100, 400, 1_000, 3_000)))
    def advance(self, milliseconds: int) -> None:
        self.crashing.clock.advance(milliseconds)

    @rule(before=st.sampled_from((1, 0)))
    def advance_to_the_next_moment(self, before: int) -> None:
        """To when something ends, or is due; or to one millisecond before."""
        moments = [at for at, _, _ in self.model.scheduled.values()]
        moments += [half.due for half in self.model.halves.values() if half.state == "open"]
        for consumer in self.model.consumers:
            for entry in consumer.having("open"):
                moments.append(entry.leased_until if entry.receipt else entry.free_at)
        soonest = min((at for at in moments if at - before > self.now), default=self.now)
        self.crashing.clock.advance(max(0, soonest - before - self.now))

    # ------------------------------------------------------------------------------ in the end

    @rule()
    def take_all(self) -> None:
        """All that may come comes: nothing is forgotten."""
        self.deliver_scheduled(1_000, None)
        self.revive(None)
        for consumer in self.model.consumers:
            expected = consumer.deliverable(self.now)
            while self.take(consumer, 100):
                pass
            left = consumer.deliverable(self.now)
            assert not left, f"{consumer.name}: {left} of {expected} did not come"

    def teardown(self) -> None:
        """Drain the rest; a history that went wrong is left alone."""
        try:
            if sys.exc_info()[0] is None and hasattr(self, "model"):
                self.finish()
        finally:
            self.crashing.end()
            shutil.rmtree(self.folder)

    def finish(self) -> None:
        """Every message is acknowledged or dead in the end, and each as the model says."""
        while self.model.scheduled or any(
            consumer.having("open") or consumer.having("parked")
            for consumer in self.model.consumers
        ):
            self.crashing.clock.advance(5_000)
            for number in range(len(self.model.consumers)):
                self.unpark(number, None, False)
            self.take_all()
            for number, consumer in enumerate(self.model.consumers):
                while consumer.leased() and self.held(consumer, [True]):
                    self.settle(number, ["ack"], None, False, False, None)
        self.crashing.crash()
        self.crashing.clock.advance(5_000)
        self.take_all()
        for consumer in self.model.consumers:
            assert not consumer.leased()
            died = Counter(number for _, number in self.dead_letters(consumer))
            assert died == consumer.dead, consumer.name
        for topic in self.topics:
            stored = {n: 1 for n, name in self.model.topics.items() if name == topic}
            assert self.stored(topic, QUEUES) == stored, topic
        given_up = {n: 1 for n, half in self.model.halves.items() if half.state == "given_up"}
        assert self.stored("TRANS_CHECK_MAX_TIME_TOPIC", 1) == given_up

    def stored(self, topic: str, queues: int) -> Counter[int]:
        """How often each message lies in a topic."""
        found: Counter[int] = Counter()
        for queue in range(queues):
            table = self.crashing.broker.read(topic, queue, offset=0, limit=100_000)
            found.update(int(body) for body in table["body"].to_pylist())
        return found


def test_whatever_happens_the_promises_hold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rmq_pipeline")  # every planted failure would be told of
    run_state_machine_as_test(
        Histories,
        settings=profile(
            max_examples=HISTORIES or 60,
            stateful_step_count=STEPS,
            derandomize=not HISTORIES,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
