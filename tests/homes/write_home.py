"""Write a small home with something of everything, and what its views showed: one home a format.

    PYTHONPATH=<a checkout> python tests/homes/write_home.py tests/homes/<format>.tar.xz

The archive has ``home``, the folder, and ``shown.json``, what the code of that checkout showed:
``now_ms``, ``moments`` (what each view of delivery state showed at a time) and ``views`` (what
every view showed at the end). The script calls verbs in the same way in every version.
"""

import json
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings

SETTINGS: Final[dict[str, Any]] = {
    "log_file_bytes": 1 << 20,
    "reserve_bytes": 0,
    "seal_after_ms": 60_000,
    "snapshot_events": 40,
    "transaction_immunity_ms": 1_000,
}
#: Views that have a macro of their name and ``_at``.
OF_MOMENTS: Final = ("in_flight", "retrying", "parked", "progress", "lag", "scheduled", "half")
TYPES: Final = ("normal", "fifo", "delay", "transaction", "priority", "lite", "mixed")
GROUPS: Final[dict[str, dict[str, Any]]] = {
    "none": {"order": "none", "backoff_ms": [500]},
    "ordered": {"order": "message_group", "backoff_ms": [500]},
    "parking": {"order": "message_group", "on_failure": "park", "max_attempts": 1},
    "quarantining": {"order": "message_group", "on_failure": "dead_letter_group"},
    "by-queue": {"order": "queue", "on_failure": "park", "max_attempts": 1},
    "windows": {"order": "none"},
}
#: The views of every version; keyed state has one a group.
VIEWS: Final = (
    *("condemned", "consumer_groups", "dead_letters", "events", "half", "in_flight"),
    *("keyed_state_windows", "lag", "lite_subscriptions", "message_trace", "messages", "parked"),
    *("progress", "queue_locks", "redrives", "retrying", "scheduled", "segments", "sink_files"),
    *("sink_replacements", "topics", "waiting", "window_history", "windows"),
)


class Writer:
    """A broker on a clock that stands still, and what its views showed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = ManualClock(1_790_000_000_000)
        self.broker = self._open()
        self.moments: dict[int, dict[str, list[Any]]] = {}
        self.sent = 0

    def _open(self) -> Broker:
        settings = Settings(**SETTINGS)
        return Broker.open(self.home, clock=self.clock, upkeep="none", settings=settings)

    def reopen(self) -> None:
        """Close the home, and open it again."""
        self.broker.close()
        self.broker = self._open()

    def look(self) -> None:
        """Record what the views of delivery state show now, and let time go on."""
        self.moments[self.clock.now_ms()] = {
            view: rows_of(self.broker, f"FROM {view}") for view in OF_MOMENTS
        }
        self.clock.advance(1_000)

    def messages(self, n: int, **columns: list[Any]) -> pa.Table:
        """Return n messages; the ids count up."""
        first, self.sent = self.sent, self.sent + n
        table = {
            "body": [f"body {first + i}".encode() for i in range(n)],
            "message_id": [f"m-{first + i}" for i in range(n)],
            "tag": [f"tag-{i % 2}" for i in range(n)],
            "keys": [[f"key-{first + i}"] for i in range(n)],
            "properties": [[("number", str(first + i))] for i in range(n)],
            **columns,
        }
        return pa.table(table, schema=pa.schema([schema.SEND.field(name) for name in table]))

    def fail(self, group: str, topic: str, outcome: str, *, limit: int = 1) -> None:
        """Receive some messages, and settle each of them with one outcome."""
        got = self.broker.receive(
            group=group, topic=topic, limit=limit, invisible_duration_ms=30_000
        )
        rows = [
            {"receipt_handle": receipt, "outcome": outcome, "reason": f"{outcome} of {group}"}
            for receipt in got["receipt_handle"].to_pylist()
        ]
        self.broker.settle(group, pa.Table.from_pylist(rows, schema=schema.OUTCOME))


def rows_of(broker: Broker, query: str) -> list[Any]:
    """Return the rows of a query as JSON has them, in one order."""
    rows = broker.sql(query).to_pylist()
    plain = json.loads(json.dumps(rows, default=str))
    return sorted(plain, key=lambda row: json.dumps(row, sort_keys=True))


def create(home: Writer) -> None:
    """Create topics of each type and groups of each order, and send to all of them."""
    broker = home.broker
    for name in TYPES:
        broker.create_topic(name, type=name, queues=2)
    broker.create_topic("once", deduplicate="message_id", retention_ms=3_600_000)
    for name, kinds in GROUPS.items():
        broker.create_group(name, **kinds)
    grouped = [f"g-{i % 3}" for i in range(12)]
    broker.send("normal", home.messages(20))
    broker.send("fifo", home.messages(12, message_group=grouped))
    broker.send("mixed", home.messages(12, message_group=grouped))
    broker.send("priority", home.messages(4, priority=[0, 1, 1, 0]))
    broker.send("lite", home.messages(4, lite_topic=["a", "b", "a", "b"]))
    broker.send("once", repeated := home.messages(2))
    broker.send("once", repeated)
    home.look()


def deliver(home: Writer) -> None:
    """Leave leases, retries, parked messages, dead letters and quarantined groups behind."""
    broker = home.broker
    broker.ack(broker.receive(group="none", topic="normal", limit=3, invisible_duration_ms=30_000))
    home.fail("none", "normal", "retry", limit=2)
    home.fail("none", "normal", "dead_letter", limit=2)
    broker.receive(
        group="none", topic="normal", limit=4, client_id="alice", invisible_duration_ms=3_600_000
    )
    home.look()
    for group, topic in (("ordered", "fifo"), ("parking", "fifo"), ("by-queue", "mixed")):
        broker.ack(broker.receive(group=group, topic=topic, limit=1, invisible_duration_ms=30_000))
        home.fail(group, topic, "retry")
        broker.receive(group=group, topic=topic, limit=2, invisible_duration_ms=3_600_000)
    home.fail("quarantining", "mixed", "give_up")
    home.look()
    broker.lock_queues("by-queue", "mixed", queue_ids=[0, 1], client_id="bob")
    broker.unlock_queues("by-queue", "mixed", queue_ids=[1], client_id="bob")
    broker.sync_lite_subscription(
        "none", "lite", client_id="alice", action="add", lite_topics=["a", "b"]
    )
    broker.update_offsets("windows", "priority", offsets={0: 1})
    broker.reset_offset("ordered", "mixed", to_offset=1, queue_id=0)
    home.look()


def wait(home: Writer) -> None:
    """Leave scheduled and half messages behind, some of them delivered, recalled or ended."""
    broker, now_ms = home.broker, home.clock.now_ms()
    due = [now_ms + after for after in (500, 600, 7_200_000, 7_300_000)]
    sent = broker.send("delay", home.messages(4, deliver_at_ms=due))
    broker.send("mixed", home.messages(2, delay_level=[1, 18]))
    broker.recall("delay", pa.table([sent["recall_handle"].slice(3)], schema=schema.RECALL))
    halves = broker.send_half("transaction", home.messages(4), producer_group="producers")
    home.look()
    ended = [
        halves["transaction_id"].slice(0, 3).combine_chunks(),
        ["commit", "rollback", "unknown"],
    ]
    broker.end_transactions(pa.table(ended, schema=schema.RESOLUTION))
    home.clock.advance(5_000)
    broker.deliver_scheduled()
    broker.check_transactions()
    broker.revive()
    home.look()


def settle(home: Writer) -> None:
    """Settle a window with files, keyed state and published messages; redrive a dead letter."""
    broker = home.broker
    for number in range(2):
        window = broker.open_window("consumer/windows", owner=f"run-{number}", duration_ms=60_000)
        held = ("consumer/windows", window["epoch"])
        got = broker.receive(group="windows", topic="fifo", limit=4, window=held)
        rows = [
            {"receipt_handle": receipt, "outcome": "ack", "idempotency_key": f"effect-{receipt}"}
            for receipt in got["receipt_handle"].to_pylist()
        ]
        path = f"hour=1/{number}.parquet"
        file = {"path": path, "rows": 4, "bytes": 100, "partition": "hour=1"}
        broker.settle(
            "windows",
            pa.Table.from_pylist(rows, schema=schema.OUTCOME),
            settle_id=f"settle-{number}",
            window=held,
            publish={"normal": home.messages(1)},
            sink_files=pa.Table.from_pylist([file], schema=schema.SINK_FILE),
            state=pa.table({"message_group": ["g-0", f"g-{number}!"], "total": [number, 7]}),
            topic="fifo",
        )
        home.clock.advance(1_000)
        if number:
            broker.close_window("consumer/windows", epoch=window["epoch"])
    merged = {"path": "hour=1/both.parquet", "rows": 8, "bytes": 150, "partition": "hour=1"}
    broker.replace_sink_files(
        "windows",
        replacement_id="replacement",
        add=pa.Table.from_pylist([merged], schema=schema.SINK_FILE),
        remove=["hour=1/0.parquet"],
    )
    letters = broker.sql("SELECT queue_id, queue_offset FROM dead_letters ORDER BY ALL LIMIT 1")
    broker.redrive("none", letters.cast(schema.DEAD_LETTER), redrive_id="redrive")
    home.look()


def seal(home: Writer) -> None:
    """Seal what there is, write events and a snapshot, delete a topic, and go on."""
    broker = home.broker
    home.clock.advance(120_000)
    broker.send("normal", home.messages(3))
    broker.seal()
    home.reopen()
    home.look()
    broker = home.broker
    broker.create_topic("gone", queues=1)
    broker.send("gone", home.messages(2))
    broker.receive(group="none", topic="gone", limit=1, invisible_duration_ms=3_600_000)
    home.look()
    broker.delete_topic("gone", force=True)
    broker.send("fifo", home.messages(6, message_group=[f"g-{i % 3}" for i in range(6)]))
    home.fail("ordered", "fifo", "retry")
    broker.seal()
    home.look()
    broker.receive(
        group="none", topic="normal", limit=2, client_id="carol", invisible_duration_ms=3_600_000
    )
    home.look()


STEPS: Final[tuple[Callable[[Writer], None], ...]] = (create, deliver, wait, settle, seal)


def main(target: Path) -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        home = Writer(Path(folder) / "home")
        for step in STEPS:
            step(home)
        shown = {
            "now_ms": home.clock.now_ms(),
            "moments": home.moments,
            "views": {name: rows_of(home.broker, f'FROM "{name}"') for name in VIEWS},
        }
        home.broker.close()
        (home.home.parent / "shown.json").write_text(json.dumps(shown, sort_keys=True))
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for name in ("home", "shown.json"):
                archive.add(home.home.parent / name, arcname=name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
