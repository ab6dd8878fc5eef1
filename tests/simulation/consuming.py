"""What consumers do: receiving, settling, and what becomes of what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rmq_pipeline import errors, schema
from tests.simulation.crashing import Trouble
from tests.simulation.model.consumer import Consumer
from tests.simulation.model.entry import Entry
from tests.simulation.producing import Producing
from tests.simulation.scenery import ANY, CHOICES, CLIENTS, KEYS, LOST, TROUBLE, some

#: Name and epoch.
Epoch = tuple[str, int]
#: Of which window a call is.
WITHIN = st.sampled_from((None, None, None, "new", "new", "new", "old", "last"))
#: Keys of effects: few, so that they come again.
EFFECTS = ("e-0", "e-1", "e-2", None)
TOTALS = st.one_of(st.none(), st.integers(0, 9))


class Consuming(Producing):
    """Histories of what is sent and read."""

    @rule(
        which=ANY,
        limit=st.sampled_from((1, 3, 8, 100)),
        duration=st.sampled_from((100, 500, 2_000)),
        client=st.sampled_from(CLIENTS),
        within=WITHIN,
        trouble=TROUBLE,
    )
    def receive(
        self,
        which: int,
        limit: int,
        duration: int,
        client: str,
        within: str | None,
        trouble: Trouble | None,
    ) -> None:
        """For its own part, or as a run does: in a window, which may be over."""
        consumer = self.consumer(which)
        window = self.window(consumer, within)
        if window is None or not consumer.window.fences(window[1]):
            self.take(
                consumer, limit, duration=duration, client=client, window=window, trouble=trouble
            )
        else:
            with pytest.raises(errors.FencedError):
                self.crashing.broker.receive(
                    consumer.name, consumer.topic, window=window, **self.who(consumer, client)
                )

    def who(self, consumer: Consumer, client: str) -> dict[str, Any]:
        """Who asks for what: a client of lite topics, or a consumer with its filter."""
        return {"client_id": client} if consumer.clients else consumer.filter

    def window(self, consumer: Consumer, within: str | None) -> Epoch | None:
        """Name and epoch: of an open one, of the last one as it is, or of the one before it."""
        name = f"consumer/{consumer.name}"
        if within == "new" and not consumer.window.ends_at:
            self.open_window(consumer, "run-1", duration=5_000)
        return None if within is None else (name, consumer.window.epoch - (within == "old"))

    def open_window(
        self,
        consumer: Consumer,
        owner: str,
        *,
        duration: int,
        takeover: bool = False,
        trouble: Trouble | None = None,
    ) -> None:
        """A new epoch has back at once what the older ones were given."""
        before = consumer.window.epoch
        name, how = f"consumer/{consumer.name}", {"duration_ms": duration, "takeover": takeover}
        answer, done = self.crashing.ask("open_window", name, owner=owner, trouble=trouble, **how)
        if done:
            consumer.expire(self.now)
            now = self.now
            opened = consumer.window.open(owner, now=now, duration=duration, takeover=takeover)
            assert answer is None or answer == opened
            if consumer.window.epoch > before:
                consumer.take_over(consumer.window.epoch, self.now)

    def take(
        self,
        consumer: Consumer,
        limit: int,
        *,
        duration: int = 2_000,
        client: str = CLIENTS[0],
        window: Epoch | None = None,
        attempt: str = "",
        trouble: Trouble | None = None,
    ) -> bool:
        """One receive, held against the model; whether it gave anything."""
        own = {"attempt_id": attempt} if attempt else {}
        got, done = self.crashing.ask(
            "receive",
            consumer.name,
            consumer.topic,
            limit=limit,
            invisible_duration_ms=duration,
            window=window,
            trouble=trouble,
            **self.who(consumer, client),
            **own,
        )
        self.notice_restarts()
        if not done:
            return False
        allowed, again = self.allowed(consumer, client, attempt=attempt)
        rows = self.leased_unheard(consumer) if got is None else got.to_pylist()
        if not rows and allowed and self.crashing.cut_off:
            self.revive(None)
            return self.take(consumer, limit, duration=duration, client=client, window=window)
        assert len(rows) <= limit
        missing = allowed and got is not None and consumer.pace.demands(self.now)
        assert rows or not missing, f"{consumer.name}: nothing of {allowed}"
        assert consumer.pace.allows(len(rows), self.now), f"{consumer.name}: {len(rows)}, too fast"
        consumer.pace.spend(len(rows))
        given: dict[str, list[Entry]] = defaultdict(list)
        for row in rows:
            number = row["born_at_ms"]
            assert number in consumer.entries, f"{consumer.name}: {number} is not there"
            entry = consumer.entries[number]
            entry.attempts, entry.receipt = entry.attempts + (not again), row["receipt_handle"]
            entry.given, entry.attempt = True, attempt
            entry.state = "open"
            entry.leased_until = self.now + duration
            entry.epoch = window[1] if window else 0
            counted = row["delivery_attempt"]
            assert counted == entry.attempts, f"{consumer.name}: attempt {counted} of {entry}"
            given[consumer.key_of(entry)].append(entry)
            self.receipts[consumer.name].append(entry.receipt)
        for key, entries in given.items():
            first = allowed.get(key, [])[: len(entries)]
            assert entries == first, f"{consumer.name}: {entries} where {first} may come"
            if not again:
                consumer.given_now(entries)
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
            "SELECT m.born_at_ms, l.delivery_attempt FROM in_flight l"
            " JOIN messages m USING (topic, queue_id, queue_offset)"
            f" WHERE l.consumer_group = '{consumer.name}' AND l.visible_at_ms > {self.now}"
            " ORDER BY queue_id, queue_offset"
        ).to_pylist()
        known = {entry.number for entry in consumer.leased()}
        return [{**row, "receipt_handle": LOST} for row in rows if row["born_at_ms"] not in known]

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
        stale=st.sampled_from((False, False, True)),
        publish=st.booleans(),
        effects=some(st.sampled_from(EFFECTS)),
        totals=st.dictionaries(st.sampled_from(KEYS), TOTALS, max_size=3),
        within=WITHIN,
        trouble=TROUBLE,
    )
    def settle(
        self,
        which: int,
        said: list[str | None],
        after: int | None,
        stale: bool,
        publish: bool,
        effects: list[str | None],
        totals: dict[str, int | None],
        within: str | None,
        trouble: Trouble | None,
    ) -> None:
        """Outcomes, effects, published messages, a staged file and keyed state: all, or nothing."""
        consumer = self.consumer(which)
        window = self.window(consumer, within)
        flying = self.held(consumer, [True])
        outcomes = [
            (entry, outcome, after)
            for entry, outcome in zip(flying, cycle(said), strict=False)
            if outcome is not None
        ]
        rows = rows_of(outcomes, effects)
        current = {entry.receipt for entry in flying}
        ended = [r for r in self.receipts[consumer.name] if r not in current and r != LOST]
        refused: type[errors.RocketMQError] | None = None
        if stale and ended:
            rows.append({"receipt_handle": ended[-1], "outcome": "ack"})
            refused = errors.ReceiptHandleError
        if window is not None and consumer.window.fences(window[1]):
            refused = errors.FencedError
        numbers, onward = self.onward(publish)
        staged = f"{consumer.name}-{consumer.window.version}"
        asked: dict[str, Any] = {
            "outcomes": pa.Table.from_pylist(rows, schema=schema.OUTCOME),
            "settle_id": staged if window else "",
            "window": window,
            "publish": onward,
            "sink_files": pa.table({"path": [staged], "rows": [1]}),
            "state": keyed(totals),
            "topic": consumer.topic,
        }
        if refused is not None:
            with pytest.raises(refused):
                self.crashing.broker.settle(consumer.name, **asked)
            return
        answer, done = self.crashing.ask("settle", consumer.name, trouble=trouble, **asked)
        if done:
            acked = [row["idempotency_key"] for row in rows if row["outcome"] == "ack"]
            consumer.settle(outcomes, self.now)
            consumer.window.keep(staged, totals, effects=acked, now=self.now)
            version = consumer.window.version
            counts = {"acked": len(acked), "published": len(numbers), "sink_version": version}
            assert answer is None or counts.items() <= answer.items()
            for number in numbers:
                self.model.send("loose", number, now=self.now)
            self.look_at_effects(consumer)
            if window is not None:
                consumer.window.settled = (window[1], asked, counts)

    @rule(which=ANY, between=st.sampled_from((1, 400, 2_400)))
    def settle_again(self, which: int, between: int) -> None:
        """An effect that is carried out again after a while."""
        for _ in range(2):
            self.settle(which, ["ack", None], None, False, False, list(EFFECTS[:1]), {}, None, None)
            self.crashing.clock.advance(between)

    def look_at_effects(self, consumer: Consumer) -> None:
        """When each was carried out last."""
        asked = pa.table([EFFECTS[:-1]], schema=schema.IDEMPOTENCY_KEY)
        seen = self.crashing.broker.seen_before(consumer.name, asked)["seen_at_ms"].to_pylist()
        assert seen == [consumer.window.seen(key, self.now) for key in EFFECTS[:-1]]

    def onward(self, publish: bool) -> tuple[list[int], dict[str, pa.Table]]:
        """Messages that a settle may publish; one of them may repeat another."""
        if not publish or "loose" not in self.model.topics:
            return [], {}
        numbers, table = self.table(2, again=[None, 2])
        return numbers, {"loose": table}

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
        """Dead-letter the quarantined messages first: from now on the quarantine is lifted."""
        consumer = self.consumer(which)
        if not self.record(consumer):
            return
        groups = None if key is None else pa.table({"message_group": [key]})
        answer = self.crashing.broker.unpark(consumer.name, message_groups=groups, skip=skip)
        assert answer == consumer.unpark(self.now, key=key, skip=skip)

    def record(self, consumer: Consumer) -> bool:
        """Let the broker look at all that has happened to this group; whether it could.

        What follows in a message group that was given up is looked at when nothing of it is leased.
        """
        self.revive(None)  # a lease that has ended may quarantine its message group
        if consumer.quarantined:
            with self.unhurried(consumer):
                self.empty(consumer)
            self.revive(None)
        return consumer.quarantined.isdisjoint(entry.key for entry in consumer.leased())

    def empty(self, consumer: Consumer) -> None:
        """Receive until nothing comes, twice: the first time may get to what lies in new queues."""
        for _ in range(2 if consumer.quarantined else 1):
            while self.take(consumer, 100):
                pass

    @contextmanager
    def unhurried(self, consumer: Consumer) -> Iterator[None]:
        """Its rate is taken away for the time of the block; then it has saved up all it can."""
        rate = consumer.pace.rate
        self.set_rate(consumer, 0)
        yield
        self.set_rate(consumer, rate)

    def set_rate(self, consumer: Consumer, rate: int, trouble: Trouble | None = None) -> None:
        if rate != consumer.pace.rate:
            _, done = self.crashing.ask(
                "alter_group", consumer.name, max_rate_per_s=rate, trouble=trouble
            )
            if done:
                consumer.pace.alter(rate, self.now)
            self.notice_restarts()

    @precondition(lambda self: any(one.deaths for one in self.model.consumers))
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


def keyed(totals: dict[str, int | None]) -> pa.Table:
    """Rows of keyed state; a key without a total is removed."""
    return pa.table(
        {
            "message_group": pa.array(totals, pa.string()),
            "total": pa.array(totals.values(), pa.int64()),
            "removed": pa.array([total is None for total in totals.values()], pa.bool_()),
        }
    )


def rows_of(
    outcomes: list[tuple[Entry, str, int | None]], effects: list[str | None]
) -> list[dict[str, Any]]:
    """Rows of schema.OUTCOME."""
    names = ("receipt_handle", "outcome", "retry_after_ms", "idempotency_key")
    return [
        dict(zip(names, (entry.receipt, outcome, after, effect), strict=True))
        for (entry, outcome, after), effect in zip(outcomes, cycle(effects), strict=False)
    ]
