"""What producers do: sending, scheduling and recalling, transactions."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from rmq_pipeline import errors, schema
from tests.simulation.crashing import Trouble
from tests.simulation.history import History
from tests.simulation.model.consumer import BACKOFF_MS, MAX_ATTEMPTS
from tests.simulation.model.topics import IMMUNITY_MS, REPEAT_MS, Half, Model, Topic
from tests.simulation.model.window import EFFECT_MS
from tests.simulation.scenery import (
    ANY,
    CHOICES,
    CONSUMERS,
    KEPT_MS,
    KEYS,
    LOST,
    POLICIES,
    QUEUES,
    RATES,
    ROWS,
    SUPPRESSING,
    TOPICS,
    TROUBLE,
    Rows,
    consumer,
    order_of,
    some,
)


class Producing(History):
    """Histories of what is sent."""

    #: The consumer group that is there in any case.
    first: str

    @initialize(
        others=st.lists(st.sampled_from(CONSUMERS), max_size=2, unique=True),
        policies=st.lists(st.sampled_from(POLICIES), min_size=3, max_size=3),
        suppressed=st.sampled_from(("none", "message_id", "key")),
        rates=st.lists(st.sampled_from((0, 0, *RATES)), min_size=3, max_size=3),
        kept=st.sampled_from((None, KEPT_MS)),
        rows=ROWS,
    )
    def begin_history(
        self,
        others: list[str],
        policies: list[str],
        suppressed: str,
        rates: list[int],
        kept: int | None,
        rows: Rows,
    ) -> None:
        """Up to three consumer groups, and something for each of them to read."""
        names = [self.first, *(name for name in others if name != self.first)]
        chosen = [consumer(name, how) for name, how in zip(names, policies, strict=False)]
        self.model = Model({one.topic: Topic(QUEUES) for one in chosen}, chosen)
        for name, topic in self.model.topics.items():
            topic.deduplicate = suppressed if name in SUPPRESSING else "none"
            topic.kept_ms = kept
            self.crashing.broker.create_topic(
                name,
                type=TOPICS[name],
                queues=QUEUES,
                deduplicate=topic.deduplicate,
                deduplicate_window_ms=REPEAT_MS,
                retention_ms=kept,
            )
        for one, rate in zip(chosen, rates, strict=False):
            one.pace.alter(rate, self.now)
            self.crashing.broker.create_group(
                one.name,
                order=order_of(one),
                max_attempts=MAX_ATTEMPTS,
                backoff_ms=BACKOFF_MS,
                on_failure=one.on_failure,
                max_rate_per_s=rate or None,
                idempotency_window_ms=EFFECT_MS,
            )
            for client, asked in one.clients.items():
                self.crashing.broker.sync_lite_subscription(
                    one.name, one.topic, client_id=client, action="add", lite_topics=sorted(asked)
                )
        for which in range(len(self.names)):
            for kind in ("fifo", "delay", "transaction"):
                self.send(which, rows, kind, False, None)

    @rule(
        which=ANY,
        rows=ROWS,
        mixed=st.sampled_from(("fifo", "fifo", "normal", "delay", "transaction")),
        levels=st.booleans(),
        trouble=TROUBLE,
    )
    def send(
        self, which: int, rows: Rows, mixed: str, levels: bool, trouble: Trouble | None
    ) -> None:
        """Messages of the topic's type; a mixed topic takes any."""
        topic = self.names[which % len(self.names)]
        kind = mixed if TOPICS[topic] == "mixed" else TOPICS[topic]
        if kind == "transaction":
            self.begin(topic, rows, trouble)
        elif kind == "delay":
            self.send_later(topic, rows, levels=levels, trouble=trouble)
        else:
            keys, _, priorities, again = zip(*rows, strict=True)
            keys = keys if kind in ("fifo", "lite") else ("",) * len(keys)
            column = {"fifo": "message_group", "lite": "lite_topic"}.get(kind)
            columns: dict[str, Any] = {column: keys} if column else {}
            columns |= {"priority": priorities} if kind == "priority" else {}
            numbers, table = self.table(len(rows), again=again, **columns)
            sent, stored = self.crashing.ask("send", topic, table, trouble=trouble)
            first = [
                self.model.send(topic, n, key=keys[i], priority=priorities[i], now=self.now)
                for i, n in enumerate(numbers)
                if stored
            ]
            self.assert_answered(sent, numbers, first)

    @rule(which=ANY, before=st.sampled_from((1, 0, 0)), kind=st.sampled_from(("fifo", "delay")))
    def send_again(self, which: int, before: int, kind: str) -> None:
        """A repetition when it is none any more, or one millisecond before."""
        known = self.model.topics[self.names[which % len(self.names)]].known
        wait = known.get("again", (0, 0))[0] + REPEAT_MS - before - self.now
        if wait > 0:
            self.crashing.clock.advance(wait)
            rows: Rows = [(KEYS[0], 50, 0, 2), (KEYS[1], 50, 0, None)]
            self.send(which, rows, kind, False, None)

    def send_later(self, topic: str, rows: Rows, *, levels: bool, trouble: Trouble | None) -> None:
        """Messages for a time, or of a delay level; in a mixed topic of a message group too."""
        keys, delays, _, again = zip(*rows, strict=True)
        columns: dict[str, Any] = {"deliver_at_ms": [self.now + delay for delay in delays]}
        keys = keys if topic == "anything" else ("",) * len(keys)
        if topic == "anything":
            columns["message_group"] = keys
        elif levels:
            delays = tuple(1_000 if delay < 1_000 else 3_000 for delay in delays)
            columns = {"delay_level": [1 if delay == 1_000 else 2 for delay in delays]}
        numbers, table = self.table(len(rows), again=again, **columns)
        sent, stored = self.crashing.ask("send", topic, table, trouble=trouble)
        first = [
            self.model.schedule(topic, n, key=keys[i], now=self.now, at=self.now + delays[i])
            for i, n in enumerate(numbers)
            if stored
        ]
        self.assert_answered(sent, numbers, first)
        if sent is not None:
            given = zip(numbers, sent["recall_handle"].to_pylist(), first, strict=True)
            self.handles |= {number: handle for number, handle, of in given if of is None}

    def assert_answered(
        self, sent: pa.Table | None, numbers: list[int], first: list[int | None]
    ) -> None:
        """Each row has its own id, or that of the message that it repeats."""
        if sent is not None:
            assert sent["duplicate"].to_pylist() == [of is not None for of in first]
            rows = [n if of is None else of for n, of in zip(numbers, first, strict=True)]
            ids = [self.model.names[n][0] for n in rows]
            assert sent["message_id"].to_pylist() == ids

    def begin(self, topic: str, rows: Rows, trouble: Trouble | None) -> None:
        """Half messages."""
        numbers, table = self.table(len(rows), again=[again for _, _, _, again in rows])
        sent, stored = self.crashing.ask(
            "send_half", topic, table, producer_group="producers", trouble=trouble
        )
        ids = [LOST] * len(rows) if sent is None else sent["transaction_id"].to_pylist()
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
        topic = topics[0] if topics and topics[0] else self.names[0]
        handles = pa.table([[self.handles[n] for n in chosen]], schema=schema.RECALL)
        if any(name != topic for name in topics):
            with pytest.raises(errors.RecallError):
                self.crashing.broker.recall(topic, handles)
            return
        recalled, done = self.crashing.ask("recall", topic, handles, trouble=trouble)
        ids = [self.model.names[n][0] for n in chosen]
        assert recalled is None or recalled["message_id"].to_pylist() == ids
        for number in chosen if done else ():
            self.model.recall(number)

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
                    self.model.send(half.topic, number, now=self.now)

    @precondition(lambda self: self.model.halves)
    @rule()
    def check(self) -> None:
        """Count the checks, and ask about all of these."""
        asked, given_up = self.model.check(self.now)
        report = self.crashing.broker.check_transactions()
        assert (report["checked"], report["given_up"]) == (len(asked), given_up)
        offered = self.crashing.broker.fetch_checks(limit=1_000)
        halves = {number: self.model.halves[number] for number in asked}
        ids = [(number, half.checks) for number, half in halves.items()]
        found = (offered["born_at_ms"].to_pylist(), offered["checks"].to_pylist())
        assert sorted(zip(*found, strict=True)) == sorted(ids)
