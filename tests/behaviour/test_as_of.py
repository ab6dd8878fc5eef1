"""The state as of a moment is the state that was seen at that moment."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.behaviour.conftest import Endpoint, Make

VIEWS = (
    *("in_flight", "retrying", "parked", "quarantined_groups", "progress", "lag", "scheduled"),
    *("half", "waiting"),
)
#: How many, by their numbers; in a usual run one to which everything happens.
HISTORIES = int(os.environ.get("RMQ_AS_OF_HISTORIES", "0"))
NUMBERS = range(1, HISTORIES + 1) if HISTORIES else [2]
#: A history has 300 steps; looking at a moment costs seconds on a busy machine.
MOMENTS, STEPS_BETWEEN = (50, 6) if HISTORIES else (10, 30)
#: Each seal writes segments of what is old, and a snapshot.
OFTEN = {"seal_after_ms": 2_000, "snapshot_events": 40, "transaction_immunity_ms": 1_000}
GROUPS = {
    "none": {"order": "none"},
    "ordered": {"order": "message_group"},
    "parking": {"order": "message_group", "on_failure": "park"},
    "quarantining": {"order": "message_group", "on_failure": "dead_letter_group"},
    "by-queue": {"order": "queue", "on_failure": "park"},
}


class RandomHistory:
    """A broker that all kinds of things happen to, one millisecond or more after another."""

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.random = random.Random(number)
        self.sent = 0
        self.made = 0
        self.receipts: list[tuple[str, str]] = []
        self.handles: list[tuple[str, str]] = []
        self.halves: list[str] = []
        self.happened: Counter[str] = Counter()
        self.topics: list[str] = []
        self.groups: list[str] = []
        for name, kinds in GROUPS.items():
            self.create_group(name, **kinds)
        for _ in range(3):
            self.create_topic()

    def step(self) -> None:
        """Something happens; a refusal is nothing that happened."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self.send, 6),
            (self.send_later, 3),
            (self.send_half, 2),
            (self.receive, 9),
            (self.settle, 7),
            (self.fail_for_good, 5),
            (self.change_invisible, 2),
            (self.recall, 1),
            (self.end_halves, 2),
            (self.upkeep, 4),
            (self.reset, 1),
            (self.unpark, 1),
            (self.redrive, 1),
            (self.open_window, 1),
            (self.recreate_topic, 1),
            (self.recreate_group, 1),
            (self.seal, 3),
            (self.reopen, 1),
        ]
        self.endpoint.advance(self.random.choice((1, 1, 10, 400, 1_500)))
        (action,) = self.random.choices(*zip(*actions, strict=True))
        try:
            action()
        except errors.RocketMQError:
            self.happened["refused"] += 1
        else:
            self.happened[action.__name__] += 1

    def some(self, things: list[Any]) -> list[Any]:
        """Some of them, taken out."""
        self.random.shuffle(things)
        taken, things[:] = things[: (n := self.random.randint(1, 8))], things[n:]
        return taken

    def table(self, n: int, **columns: Any) -> pa.Table:
        self.sent += n
        bodies = [str(i).encode() for i in range(n)]
        ids = [f"m-{self.sent - i}" for i in range(n)]
        made = {"body": bodies, "message_id": ids, **columns}
        return pa.table(made, schema=pa.schema([schema.SEND.field(name) for name in made]))

    def create_topic(self) -> None:
        self.made += 1
        name = f"topic-{self.made % 4}"
        self.endpoint.broker.create_topic(name, type="mixed", queues=2)
        self.topics.append(name)
        for group in self.groups:
            if self.random.random() < 0.5:
                self.endpoint.broker.subscribe(group, name)

    def create_group(self, name: str, **kinds: Any) -> None:
        self.endpoint.broker.create_group(name, max_attempts=2, backoff_ms=[500], **kinds)
        self.groups.append(name)

    def send(self) -> None:
        n = self.random.randint(1, 10)
        grouped = self.random.random() < 0.6
        columns = {"message_group": [self.random.choice("abc") for _ in range(n)]}
        self.endpoint.broker.send(
            self.random.choice(self.topics), self.table(n, **columns if grouped else {})
        )

    def send_later(self) -> None:
        n = self.random.randint(1, 4)
        topic = self.random.choice(self.topics)
        due = [self.endpoint.clock.now_ms() + self.random.randint(1, 6_000) for _ in range(n)]
        columns = {"deliver_at_ms": due}
        if self.random.random() < 0.3:
            columns = {"delay_level": [self.random.randint(1, 3) for _ in range(n)]}
        sent = self.endpoint.broker.send(topic, self.table(n, **columns))
        self.handles += [(topic, handle) for handle in sent["recall_handle"].to_pylist()]

    def send_half(self) -> None:
        sent = self.endpoint.broker.send_half(
            self.random.choice(self.topics), self.table(3), producer_group="producers"
        )
        self.halves += sent["transaction_id"].to_pylist()

    def receive(self) -> None:
        group = self.random.choice(self.groups)
        got = self.endpoint.broker.receive(
            group,
            self.random.choice(self.topics),
            limit=self.random.randint(1, 12),
            invisible_duration_ms=self.random.choice((300, 2_000, 30_000)),
            client_id=self.random.choice(("", "alice", "bob")),
        )
        self.receipts += [(group, receipt) for receipt in got["receipt_handle"].to_pylist()]

    def settle(self) -> None:
        for group in self.groups:
            mine = [receipt for owner, receipt in self.receipts if owner == group]
            self.receipts = [(o, r) for o, r in self.receipts if o != group or r not in mine]
            self.random.shuffle(mine)
            mine = mine[: self.random.randint(0, len(mine))]
            for receipt in mine:  # one at a time: a receipt that has ended refuses all
                outcome = self.random.choice(("ack", "ack", "retry", "retry", "dead_letter"))
                row = {"receipt_handle": receipt, "outcome": outcome, "reason": f"why {outcome}"}
                outcomes = pa.Table.from_pylist([row], schema=schema.OUTCOME)
                try:
                    self.endpoint.broker.settle(group, outcomes)
                except errors.ReceiptHandleError:
                    self.happened["ended receipt"] += 1

    def fail_for_good(self) -> None:
        """Park or quarantine a message group; the cursor has passed later messages, which wait."""
        group = self.random.choice(("parking", "quarantining"))
        topic = self.random.choice(self.topics)
        self.endpoint.broker.send(topic, self.table(6, message_group=["a", "b", "c"] * 2))
        got = self.endpoint.broker.receive(group, topic, limit=1)
        self.endpoint.broker.receive(group, topic, limit=12, invisible_duration_ms=300)
        rows = [{"receipt_handle": r, "outcome": "dead_letter"} for r in got["receipt_handle"]]
        self.endpoint.broker.settle(group, pa.Table.from_pylist(rows, schema=schema.OUTCOME))

    def change_invisible(self) -> None:
        for group, receipt in self.some(self.receipts):
            changed = self.endpoint.broker.change_invisible_duration([receipt], 5_000)
            self.receipts += [(group, r) for r in changed["receipt_handle"].to_pylist()]

    def recall(self) -> None:
        for topic, handle in self.some(self.handles):
            self.endpoint.broker.recall(topic, pa.table([[handle]], schema=schema.RECALL))

    def end_halves(self) -> None:
        ids = self.some(self.halves)
        said = [self.random.choice(("commit", "rollback", "unknown")) for _ in ids]
        self.endpoint.broker.end_transactions(pa.table([ids, said], schema=schema.RESOLUTION))

    def upkeep(self) -> None:
        self.endpoint.broker.deliver_scheduled()
        self.endpoint.broker.check_transactions()
        self.endpoint.broker.revive()

    def reset(self) -> None:
        self.endpoint.broker.reset_offset(
            self.random.choice(self.groups),
            self.random.choice(self.topics),
            to_offset=self.random.randint(0, 10),
        )

    def unpark(self) -> None:
        for group in self.groups:
            self.endpoint.broker.unpark(group, skip=self.random.random() < 0.3)

    def redrive(self) -> None:
        for group in self.groups:
            dead = f"SELECT queue_id, queue_offset FROM dead_letters WHERE consumer_group='{group}'"
            rows = self.endpoint.sql(f"{dead} AND redriven_at_ms IS NULL LIMIT 3")
            if rows:
                places = pa.Table.from_pylist(rows, schema=schema.DEAD_LETTER)
                self.endpoint.broker.redrive(group, places, redrive_id=f"r-{self.sent}")

    def open_window(self) -> None:
        group = self.random.choice(self.groups)
        self.endpoint.broker.open_window(f"consumer/{group}", owner="run", duration_ms=1_000)

    def recreate_topic(self) -> None:
        self.endpoint.broker.delete_topic(gone := self.random.choice(self.topics), force=True)
        self.topics.remove(gone)
        self.create_topic()

    def recreate_group(self) -> None:
        gone = self.random.choice(self.groups)
        self.endpoint.broker.delete_group(gone, force=True)
        self.groups.remove(gone)
        self.create_group(gone, **GROUPS[gone])

    def seal(self) -> None:
        report = self.endpoint.broker.seal()
        self.happened["snapshots"] += report["snapshot_rows"] > 0
        self.happened["segments"] += report["segments"] > 0

    def reopen(self) -> None:
        self.endpoint.reopen(**OFTEN)


def state_of(endpoint: Endpoint, at_ms: str = "") -> dict[str, list[tuple[str, ...]]]:
    """The rows of each view; of the macro of its name, when there is a moment."""
    found = {}
    for view in VIEWS:
        rows = endpoint.sql(f"SELECT * FROM {view}" + (f"_at({at_ms})" if at_ms else ""))
        found[view] = sorted(tuple(f"{k}={v}" for k, v in row.items()) for row in rows)
    return found


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """At how many moments of all histories there was something of a kind; it must not be rare."""
    seen: Counter[str] = Counter()
    yield seen
    rare = [what for what in (*VIEWS, "snapshots", "segments") if seen[what] < 5]
    assert not seen or not rare, seen


@pytest.mark.parametrize("number", NUMBERS)
def test_as_of_a_moment_is_what_was_seen_then(
    inside: Endpoint, number: int, seen: Counter[str]
) -> None:
    inside.reopen(**OFTEN)
    history = RandomHistory(inside, number)
    moments: dict[int, dict[str, list[tuple[str, ...]]]] = {}

    for _ in range(MOMENTS):
        for _ in range(history.random.randint(1, 2 * STEPS_BETWEEN)):
            history.step()
        moments[inside.clock.now_ms()] = state_of(inside)
        inside.advance(1)
    inside.reopen(**OFTEN)

    for at_ms, expected in moments.items():
        assert state_of(inside, str(at_ms)) == expected, at_ms
        seen.update(view for view in VIEWS if expected[view])
    seen.update({what: history.happened[what] for what in ("snapshots", "segments")})


def test_expired_messages_were_there_before(inside: Endpoint, topic: Make, messages: Make) -> None:
    inside.reopen(**{**OFTEN, "seal_after_ms": 0})
    name = topic(queues=1, retention_ms=10_000)
    inside.broker.create_group("readers")
    inside.broker.send(name, messages(20))
    inside.broker.ack(inside.broker.receive("readers", name, limit=10))
    before, at_ms = inside.sql("FROM progress"), inside.clock.now_ms()
    inside.broker.seal()
    inside.advance(20_000)
    inside.broker.send(name, messages(5))
    inside.broker.ack(inside.broker.receive("readers", name, limit=15))
    inside.broker.seal()
    inside.broker.expire()
    after, later_ms = inside.sql("FROM progress"), inside.clock.now_ms()

    assert after[0]["min_offset"] > before[0]["min_offset"]
    assert inside.sql(f"FROM progress_at({at_ms})") == before
    assert inside.sql(f"FROM progress_at({later_ms})") == after
    assert [row["lag"] for row in inside.sql(f"FROM lag_at({at_ms})")] == [10]


def test_offsets_that_a_reader_keeps_itself_are_known_of_any_moment(
    inside: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)
    inside.broker.create_group("readers")
    inside.broker.send(name, messages(20))
    moments = {}
    for offset in (3, 8, 20):
        inside.broker.update_offsets("readers", name, offsets={0: offset})
        moments[inside.clock.now_ms()] = 20 - offset
        inside.advance(10)

    for at_ms, lag in moments.items():
        assert [row["lag"] for row in inside.sql(f"FROM lag_at({at_ms})")] == [lag]


def test_what_waited_behind_a_parked_message_is_known_after_its_group_is_deleted(
    inside: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)
    inside.broker.create_group("readers", order="queue", max_attempts=1, on_failure="park")
    inside.broker.send(name, messages(5))
    received = inside.broker.receive("readers", name, limit=1)
    retry = [{"receipt_handle": received["receipt_handle"][0].as_py(), "outcome": "retry"}]
    inside.broker.settle("readers", pa.Table.from_pylist(retry, schema=schema.OUTCOME))
    before, at_ms = inside.sql("FROM parked"), inside.clock.now_ms()
    inside.advance(10)

    inside.broker.delete_group("readers", force=True)
    inside.broker.create_group("readers", order="none")
    inside.broker.delete_topic(name, force=True)

    assert [row["waiting"] for row in before] == [4]
    assert inside.sql(f"FROM parked_at({at_ms})") == before
