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
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

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
#: The receipt of a delivery that nobody was told of.
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


def consumers(policies: Sequence[str]) -> list[Consumer]:
    chosen = iter(policies)
    return [
        Consumer("in-order", "ordered", True, next(chosen), {}, everything),
        Consumer("in-order-by-tag", "ordered", True, next(chosen), TAGS, tagged),
        Consumer("of-loose", "loose", False, next(chosen), {}, everything),
        Consumer("by-condition", "loose", False, next(chosen), SQL, conditioned),
        Consumer("of-later", "later", False, next(chosen), {}, everything),
        Consumer("of-urgent", "urgent", False, next(chosen), {}, everything),
        Consumer("of-deals", "deals", False, next(chosen), {}, everything),
        Consumer("of-anything", "anything", True, next(chosen), {}, everything),
    ]


def some(strategy: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=1, max_size=most)


#: Which of those there are; a list of these is gone through again and again.
CHOICES = some(st.booleans())
CONSUMER = st.integers(0, 7)
#: Mostly none.
TROUBLE = st.one_of(
    *[st.none()] * 7,
    st.builds(
        Trouble,
        st.sampled_from(("staged", "before_write", "half_written", "written")),
        st.booleans(),
    ),
)


class Histories(RuleBasedStateMachine):
    """A broker and a model that are told the same."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-"))
        self.crashing = CrashingBroker(self.folder, SETTINGS)
        self.sealed = False
        self.sent = 0
        self.handles: dict[int, str] = {}
        self.receipts: dict[str, list[str]] = defaultdict(list)

    @initialize(policies=st.lists(st.sampled_from(POLICIES), min_size=8, max_size=8))
    def begin_history(self, policies: list[str]) -> None:
        self.model = Model(consumers(policies))
        for name, kind in TOPICS.items():
            self.crashing.broker.create_topic(name, type=kind, queues=QUEUES)
        for consumer in self.model.consumers:
            self.crashing.broker.create_group(
                consumer.name,
                order="message_group" if consumer.ordered else "none",
                max_attempts=MAX_ATTEMPTS,
                backoff_ms=BACKOFF_MS,
                on_failure=consumer.on_failure,
            )

    @property
    def now(self) -> int:
        return self.crashing.clock.now_ms()

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

    @rule(keys=some(st.sampled_from(KEYS), 9), trouble=TROUBLE)
    def send_ordered(self, keys: list[str], trouble: Trouble | None) -> None:
        numbers, table = self.table(len(keys), message_group=keys)
        _, stored = self.crashing.ask("send", "ordered", table, trouble=trouble)
        for number, key in zip(numbers, keys, strict=True) if stored else ():
            self.model.store("ordered", number, key=key, now=self.now)

    @rule(n=st.integers(1, 9), trouble=TROUBLE)
    def send_loose(self, n: int, trouble: Trouble | None) -> None:
        numbers, table = self.table(n)
        _, stored = self.crashing.ask("send", "loose", table, trouble=trouble)
        for number in numbers if stored else ():
            self.model.store("loose", number, now=self.now)

    @rule(priorities=some(st.integers(0, 3)), trouble=TROUBLE)
    def send_urgent(self, priorities: list[int], trouble: Trouble | None) -> None:
        numbers, table = self.table(len(priorities), priority=priorities)
        _, stored = self.crashing.ask("send", "urgent", table, trouble=trouble)
        for number, priority in zip(numbers, priorities, strict=True) if stored else ():
            queue = min(priority, QUEUES - 1)
            self.model.store("urgent", number, priority=queue, now=self.now)

    @rule(
        topic=st.sampled_from(("later", "anything")),
        delays=some(st.sampled_from((1, 50, 1_000, 3_000))),
        keys=some(st.sampled_from(KEYS)),
        levels=st.booleans(),
        trouble=TROUBLE,
    )
    def send_later(
        self,
        topic: str,
        delays: list[int],
        keys: list[str],
        levels: bool,
        trouble: Trouble | None,
    ) -> None:
        groups = [key for key, _ in zip(cycle(keys), delays, strict=False)]
        columns: dict[str, Any] = {"deliver_at_ms": [self.now + delay for delay in delays]}
        if levels and topic == "later":
            delays = [1_000 if delay < 1_000 else 3_000 for delay in delays]
            columns = {"delay_level": [1 if delay == 1_000 else 2 for delay in delays]}
        if topic == "anything":
            columns["message_group"] = groups
        numbers, table = self.table(len(delays), **columns)
        sent, stored = self.crashing.ask("send", topic, table, trouble=trouble)
        for i, number in enumerate(numbers) if stored else ():
            key = groups[i] if topic == "anything" else ""
            self.model.scheduled[number] = (self.now + delays[i], topic, key)
        if sent is not None:
            self.handles.update(zip(numbers, sent["recall_handle"].to_pylist(), strict=True))

    @rule(keys=some(st.sampled_from((*KEYS, None))), trouble=TROUBLE)
    def send_anything(self, keys: list[str | None], trouble: Trouble | None) -> None:
        numbers, table = self.table(len(keys), message_group=keys)
        _, stored = self.crashing.ask("send", "anything", table, trouble=trouble)
        for number, key in zip(numbers, keys, strict=True) if stored else ():
            self.model.store("anything", number, key=key or "", now=self.now)

    @rule(limit=st.sampled_from((1, 5, 1_000)), trouble=TROUBLE)
    def deliver_scheduled(self, limit: int, trouble: Trouble | None) -> None:
        report, done = self.crashing.ask("deliver_scheduled", limit=limit, trouble=trouble)
        if done:
            delivered = self.model.deliver(self.now, limit)
            assert report is None or report["delivered"] == delivered

    @rule(topic=st.sampled_from(("later", "anything")), which=CHOICES, trouble=TROUBLE)
    def recall(self, topic: str, which: list[bool], trouble: Trouble | None) -> None:
        """All of them still wait, or none is called back."""
        sent = self.model.scheduled.keys() | self.model.topics.keys()
        known = [number for number in self.handles if number in sent or number % 2]
        chosen = [n for n, yes in zip(known[-8:], cycle(which), strict=False) if yes]
        handles = pa.table([[self.handles[n] for n in chosen]], schema=schema.RECALL)
        waiting = self.model.scheduled
        if any(n not in waiting or waiting[n][1] != topic for n in chosen):
            with pytest.raises(errors.RecallError):
                self.crashing.broker.recall(topic, handles)
            return
        recalled, done = self.crashing.ask("recall", topic, handles, trouble=trouble)
        assert recalled is None or recalled["message_id"].to_pylist() == [f"m-{n}" for n in chosen]
        for number in chosen if done else ():
            del waiting[number]

    # ---------------------------------------------------------------------------- transactions

    @rule(topic=st.sampled_from(("deals", "anything")), n=st.integers(1, 4), trouble=TROUBLE)
    def begin(self, topic: str, n: int, trouble: Trouble | None) -> None:
        numbers, table = self.table(n)
        sent, stored = self.crashing.ask(
            "send_half", topic, table, producer_group="producers", trouble=trouble
        )
        ids = [LOST] * n if sent is None else sent["transaction_id"].to_pylist()
        for number, transaction_id in zip(numbers, ids, strict=True) if stored else ():
            self.model.halves[number] = Half(topic, transaction_id, self.now + IMMUNITY_MS)

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
        which=CONSUMER,
        limit=st.sampled_from((1, 3, 8, 100)),
        duration=st.sampled_from((100, 500, 2_000)),
        trouble=TROUBLE,
    )
    def receive(self, which: int, limit: int, duration: int, trouble: Trouble | None) -> None:
        self.take(self.model.consumers[which], limit, duration=duration, trouble=trouble)

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
        assert len(rows) <= limit
        assert rows or not allowed or got is None, f"{consumer.name}: nothing of {allowed}"
        given: dict[str, list[Entry]] = defaultdict(list)
        for row in rows:
            number = int(row["message_id"].removeprefix("m-"))
            assert number in consumer.entries, f"{consumer.name}: {number} is not there"
            entry = consumer.entries[number]
            entry.attempts, entry.receipt = entry.attempts + 1, row["receipt_handle"]
            entry.leased_until = self.now + duration
            assert row["delivery_attempt"] == entry.attempts, (consumer.name, entry)
            key = entry.key if consumer.ordered and entry.key else f"#{number}"
            given[key].append(entry)
            self.receipts[consumer.name].append(entry.receipt)
        for key, entries in given.items():
            first = allowed.get(key, [])[: len(entries)]
            assert entries == first, f"{consumer.name}: {entries} where {first} may come"
        self.assert_urgent(consumer, allowed, len(rows) == limit)
        return bool(rows)

    def assert_urgent(
        self, consumer: Consumer, allowed: dict[str, list[Entry]], cut: bool
    ) -> None:
        """Nothing is left behind that has a higher priority than what was given."""
        if consumer.topic == "urgent":
            entries = [entry for some in allowed.values() for entry in some]
            given = [entry.priority for entry in entries if entry.receipt]
            left = [entry.priority for entry in entries if not entry.receipt]
            assert not given or not left or (cut and max(left) <= min(given))

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
        """Some of what is leased, with a receipt."""
        consumer.expire(self.now)
        known = [entry for entry in consumer.leased() if entry.receipt != LOST]
        return [entry for entry, yes in zip(known, cycle(which), strict=False) if yes]

    @rule(
        which=CONSUMER,
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
        consumer = self.model.consumers[which]
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
        numbers, onward = self.table(2 if publish else 0)
        answer, done = self.crashing.ask(
            "settle", consumer.name, table, publish={"loose": onward}, trouble=trouble
        )
        if done:
            assert answer is None or answer["acked"] == sum(o == "ack" for _, o, _ in outcomes)
            consumer.settle(outcomes, self.now)
            for number in numbers:
                self.model.store("loose", number, now=self.now)

    @rule(which=CONSUMER, chosen=CHOICES, trouble=TROUBLE)
    def forward(self, which: int, chosen: list[bool], trouble: Trouble | None) -> None:
        consumer = self.model.consumers[which]
        entries = self.held(consumer, chosen)
        receipts = [entry.receipt for entry in entries]
        _, done = self.crashing.ask("forward_to_dead_letter_queue", receipts, trouble=trouble)
        if done:
            consumer.settle([(entry, "dead_letter", None) for entry in entries], self.now)

    @rule(
        which=CONSUMER,
        chosen=CHOICES,
        duration=st.sampled_from((1, 300, 5_000)),
        trouble=TROUBLE,
    )
    def change_invisible_duration(
        self, which: int, chosen: list[bool], duration: int, trouble: Trouble | None
    ) -> None:
        """Other ends for some leases; in order for all of a message group."""
        consumer = self.model.consumers[which]
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

    @rule(which=CONSUMER, key=st.sampled_from((None, None, *KEYS)), skip=st.booleans())
    def unpark(self, which: int, key: str | None, skip: bool) -> None:
        """What was given up so far is looked at before: from now on it is pardoned."""
        consumer = self.model.consumers[which]
        self.record(consumer)
        groups = None if key is None else pa.table({"message_group": [key]})
        answer = self.crashing.broker.unpark(consumer.name, message_groups=groups, skip=skip)
        assert answer == consumer.unpark(self.now, key=key, skip=skip)

    def record(self, consumer: Consumer) -> None:
        """Let the broker look at all that has happened to this group."""
        while consumer.ordered and consumer.condemned and self.take(consumer, 100):
            pass
        self.revive(None)

    @rule(which=CONSUMER, chosen=CHOICES, trouble=TROUBLE)
    def redrive(self, which: int, chosen: list[bool], trouble: Trouble | None) -> None:
        """Each dead letter once ever."""
        consumer = self.model.consumers[which]
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

    @rule(which=CONSUMER, earliest=st.booleans())
    def reset_offset(self, which: int, earliest: bool) -> None:
        consumer = self.model.consumers[which]
        self.record(consumer)
        where = {"to_earliest": True} if earliest else {"to_latest": True}
        self.crashing.broker.reset_offset(consumer.name, consumer.topic, **where)  # type: ignore[arg-type]
        consumer.reset(self.now, earliest=earliest)

    @rule(which=CONSUMER, policy=st.sampled_from(POLICIES))
    def alter_group(self, which: int, policy: str) -> None:
        """What is parked was so under the old policy: groups without any are altered."""
        consumer = self.model.consumers[which]
        self.record(consumer)
        if not consumer.having("parked"):
            self.crashing.broker.alter_group(consumer.name, on_failure=policy)
            consumer.on_failure = policy

    # ---------------------------------------------------------------------------------- upkeep

    @rule(trouble=TROUBLE)
    def revive(self, trouble: Trouble | None) -> None:
        _, done = self.crashing.ask("revive", trouble=trouble)
        for consumer in self.model.consumers if done else ():
            consumer.expire(self.now)

    @rule()
    def dispatch(self) -> None:
        self.crashing.broker.engine.dispatched()

    @rule()
    def seal(self) -> None:
        self.sealed = True
        self.crashing.broker.seal()

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

    @rule(from_the_log=st.booleans())
    def reopen(self, from_the_log: bool) -> None:
        self.crashing.reopen(from_the_log=from_the_log and not self.sealed)

    @rule()
    def crash(self) -> None:
        self.crashing.crash()

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
        while any(c.having("open") or c.having("parked") for c in self.model.consumers):
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
        for topic in TOPICS:
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
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
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
