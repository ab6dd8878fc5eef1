"""What consumers do: receiving, settling, and what becomes of what failed."""

from __future__ import annotations

from collections import defaultdict
from itertools import cycle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rmq_pipeline import errors, schema
from tests.simulation.crashing import Trouble
from tests.simulation.model import Consumer, Entry
from tests.simulation.producing import Producing
from tests.simulation.scenery import ANY, CHOICES, KEYS, LOST, POLICIES, TROUBLE, some


class Consuming(Producing):
    """Histories of what is sent and read."""

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
