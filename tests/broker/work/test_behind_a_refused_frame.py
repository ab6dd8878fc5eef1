"""Behind a frame that DuckDB refuses only that waits which needs rows of DuckDB from behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.state.event_rows import single, to_batch
from rmq_pipeline.broker.state.group_order import KNOWN_PER_GROUP
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.store.dispatch import StuckError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.broker.sealed_home import DELAY_MS, MIB, messages, open_broker, seal_all

EVENTS = 2


class Home:
    """A home that is opened again and again, in one time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()

    def opened(self, **settings: Any) -> Broker:
        return open_broker(self.path, self.clock, **settings)

    def refuse(self) -> None:
        """Add a frame that DuckDB refuses to the log, as another version might have."""
        folder = self.path / "log"
        log = CommitLog.open(
            folder,
            schemas=SCHEMAS,
            file_bytes=MIB,
            reserve_bytes=MIB,
            dispatched_position=min(int(file.stem) for file in folder.glob("*.log")),
        )
        log.stage(EVENTS, to_batch([single(Kind.SINK_FILE, 0, detail="no JSON")]))
        log.commit()
        log.close()


@pytest.fixture
def closed(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def grouped(start: int, n: int, group: str, tag: str = "x") -> pa.Table:
    return messages(n, start=start, message_group=[group] * n, tag=[tag] * n)


def numbers(table: pa.Table) -> list[int]:
    return [int(body.partition(b":")[0]) for body in table["body"].to_pylist()]


@pytest.mark.parametrize(
    "filters", [{}, {"filter": "x"}, {"filter": "a = 1", "filter_type": "sql92"}]
)
def test_an_ordered_group_goes_on_with_its_backlog(closed: Home, filters: dict[str, Any]) -> None:
    before, behind = KNOWN_PER_GROUP + 500, KNOWN_PER_GROUP + 700
    everything = before + behind

    def part(start: int, n: int, group: str) -> pa.Table:
        given = grouped(start, n, group)
        return given.append_column(
            schema.SEND.field("properties"),
            pa.array([[("a", "1")]] * n, schema.SEND.field("properties").type),
        )

    with closed.opened() as broker:
        broker.create_topic("t", type="fifo", queues=1)
        broker.create_group("g", order="message_group")
        broker.send("t", part(0, before, "a"))
        held = broker.receive("g", "t", limit=1, invisible_duration_ms=DELAY_MS, **filters)
    closed.refuse()

    with closed.opened() as broker:
        broker.send("t", part(before, behind, "a"))
        broker.send("t", part(-1, 1, "b"))
        assert numbers(broker.receive("g", "t", limit=2, **filters)) == [-1]  # past all of "a"
        broker.ack(held)

        found = []
        while (got := broker.receive("g", "t", limit=1_000, **filters)).num_rows:
            found.extend(numbers(got))
            broker.ack(got)

    assert found == list(range(1, everything))


@pytest.mark.parametrize("deduplicate", ["key", "message_id"])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_repeated_message_is_answered_with_the_first(
    closed: Home, deduplicate: str, delayed: bool
) -> None:
    def send(broker: Broker, key: str) -> tuple[str, bool]:
        columns: dict[str, Any] = {"keys": [[key]], "message_id": [f"id-{key}"]}
        if deduplicate == "key":
            columns["message_id"] = [None]
        if delayed:
            columns["deliver_at_ms"] = [closed.clock.now_ms() + DELAY_MS]
        answer = broker.send("t", messages(1, **columns))
        return answer["message_id"][0].as_py(), answer["duplicate"][0].as_py()

    with closed.opened() as broker:
        kind = "delay" if delayed else "normal"
        broker.create_topic("t", type=kind, queues=1, deduplicate=deduplicate)
        first, _ = send(broker, "a")
    closed.refuse()

    with closed.opened() as broker:
        second, _ = send(broker, "b")
        assert send(broker, "a") == (first, True)
        assert send(broker, "b") == (second, True)


def test_a_transaction_is_ended_again(closed: Home) -> None:
    def ends(halves: pa.Table) -> pa.Table:
        return pa.table([halves["transaction_id"], ["commit"]], schema=schema.RESOLUTION)

    with closed.opened() as broker:
        broker.create_topic("t", type="transaction", queues=1)
        old, new = (broker.send_half("t", messages(1), producer_group="p") for _ in range(2))
        broker.end_transactions(ends(old))
    closed.refuse()

    with closed.opened() as broker:
        assert broker.end_transactions(ends(new))["first_time"].to_pylist() == [True]
        assert broker.end_transactions(ends(old))["first_time"].to_pylist() == [False]
        with pytest.raises(StuckError):  # what it was ended with, DuckDB would know
            broker.end_transactions(ends(new))


def settle(broker: Broker, group: str, name: str) -> None:
    """Settle a message of a group with a sink file, a state and a key, all of a name."""
    got = broker.receive(group, "t", limit=1)
    outcomes = {"receipt_handle": got["receipt_handle"], "outcome": ["ack"]}
    file = {"path": f"{name}.parquet", "rows": 1, "bytes": 1, "partition": "", "offsets": []}
    broker.settle(
        group,
        pa.table({**outcomes, "idempotency_key": [name]}),
        sink_files=pa.Table.from_pylist([file], schema=schema.SINK_FILE),
        state=pa.table({"message_group": [name], "total": [1]}),
        topic="t",
    )


def seen(broker: Broker, group: str) -> object:
    return broker.seen_before(group, pa.table([["old"]], schema=schema.IDEMPOTENCY_KEY))[
        "seen_at_ms"
    ]


LOOK_UPS: dict[str, Callable[[Broker, str], object]] = {
    "sink files": lambda broker, group: broker.sink_files(group)["path"].to_pylist(),
    "keyed state": lambda broker, group: broker.keyed_state(group, "t"),
    "effects": seen,
}


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_what_a_group_has_settled_before_is_looked_up(
    closed: Home, look_up: Callable[[Broker, str], object]
) -> None:
    with closed.opened() as broker:
        broker.create_topic("t", queues=1)
        for group in ("idle", "busy"):
            broker.create_group(group)
        broker.send("t", messages(3))
        for group in ("idle", "busy"):
            settle(broker, group, "old")
        before = look_up(broker, "idle")
    closed.refuse()

    for is_new in (True, False):  # with what was settled just now, and what the log says of it
        with closed.opened() as broker:
            assert look_up(broker, "idle") == before
            if is_new:
                settle(broker, "busy", "new")
            with pytest.raises(StuckError):
                look_up(broker, "busy")


def test_messages_are_read_and_found(closed: Home) -> None:
    with closed.opened() as broker:
        for topic in ("quiet", "busy"):
            broker.create_topic(topic, queues=1)
            broker.send(topic, messages(2, keys=[["k"], ["k"]]))
    closed.refuse()

    with closed.opened() as broker:
        broker.send("busy", messages(3, start=2, keys=[["k"]] * 3))

        assert numbers(broker.read("busy", 0, offset=1, limit=9)) == [1, 2, 3, 4]
        assert broker.find("quiet", key="k")["queue_offset"].to_pylist() == [0, 1]
        assert broker.offset_at("quiet", 0, at_ms=0) == 0
        for ask in (
            lambda: broker.find("busy", key="k"),
            lambda: broker.offset_at("busy", 0, at_ms=0),
            broker.lag,
            lambda: broker.sql("SELECT 1"),
        ):
            with pytest.raises(StuckError):
                ask()


def test_dead_letters_are_opened_again(closed: Home) -> None:
    with closed.opened() as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g", max_attempts=1)
        broker.send("t", messages(2))
        broker.forward_to_dead_letter_queue(broker.receive("g", "t", limit=1), reason="odd")
    closed.refuse()

    def redrive(broker: Broker, offset: int) -> list[str]:
        letters = pa.table([[0], [offset]], schema=schema.DEAD_LETTER)
        done = broker.redrive("g", letters, redrive_id=f"r{offset}")
        found: list[str] = done["outcome"].to_pylist()
        return found

    with closed.opened() as broker:
        broker.forward_to_dead_letter_queue(broker.receive("g", "t", limit=1), reason="odd")
        assert redrive(broker, 0) == ["redriven"]
        with pytest.raises(StuckError):
            redrive(broker, 1)


def test_sealed_messages_are_received(closed: Home) -> None:
    with closed.opened() as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        for i in range(6):
            broker.send("t", messages(2, start=2 * i, body_bytes=300_000))
        seal_all(broker)
        assert broker.engine.log.first > 0
    closed.refuse()

    with closed.opened() as broker:
        broker.send("t", messages(1, start=12))
        assert numbers(broker.receive("g", "t", limit=32)) == list(range(13))
