"""The night of docs/incident_night.md: a broker, and what happened to it until five past three."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings

MIB = 1024 * 1024
DOCUMENT = Path(__file__).parents[1] / "docs" / "incident_night.md"
QUESTION = re.compile(r"^## (\d+)\. .*?```sql\n(.*?)```", re.MULTILINE | re.DOTALL)
QUESTIONS = {int(number): query for number, query in QUESTION.findall(DOCUMENT.read_text())}
NIGHT = datetime(2026, 3, 7, tzinfo=UTC)
Rows = list[dict[str, Any]]


class Night:
    """A broker, and a clock that is set by the hour."""

    def __init__(self, home: Path) -> None:
        self.clock = ManualClock(int(NIGHT.timestamp() * 1000) + 3_600_000)
        settings = Settings(
            reserve_bytes=MIB, log_file_bytes=8 * MIB, seal_after_ms=60_000, snapshot_events=100
        )
        self.broker = Broker.open(home, clock=self.clock, upkeep="none", settings=settings)

    def at(self, moment: str) -> None:
        """Go on to a time of the night."""
        hours, minutes = moment.split(":")
        at = NIGHT.replace(hour=int(hours), minute=int(minutes)).timestamp()
        self.clock.advance(int(at * 1000) - self.clock.now_ms())

    def send(self, numbers: range, **columns: Any) -> None:
        made = {
            "body": [b"{}"] * len(numbers),
            "message_id": [f"order-{n}" for n in numbers],
            "keys": [[f"key-{n}"] for n in numbers],
            **{name: [value(n) for n in numbers] for name, value in columns.items()},
        }
        fields = pa.schema([schema.SEND.field(name) for name in made])
        self.broker.send("orders", pa.table(made, schema=fields))

    def receive(self, group: str, limit: int, **how: Any) -> list[tuple[int, str]]:
        """Number and receipt of each order received."""
        got = self.broker.receive(group, "orders", limit=limit, **how)
        ids = [int(name.removeprefix("order-")) for name in got["message_id"].to_pylist()]
        return list(zip(ids, got["receipt_handle"].to_pylist(), strict=True))

    def settle(
        self,
        group: str,
        received: list[tuple[int, str]],
        outcome: str = "ack",
        *,
        window: tuple[str, int] | None = None,
        **why: Any,
    ) -> None:
        rows = [
            {"receipt_handle": receipt, "outcome": outcome}
            | {name: text.format(number=number) for name, text in why.items()}
            for number, receipt in received
        ]
        outcomes = pa.Table.from_pylist(rows, schema=schema.OUTCOME)
        self.broker.settle(group, outcomes, window=window)

    def ask(self, number: int) -> Rows:
        """What a question of the document is answered."""
        answer: Rows = self.broker.sql(QUESTIONS[number]).to_pylist()
        return answer


def live_through(night: Night) -> None:
    """What happened, until five past three."""
    broker = night.broker
    broker.create_topic("orders", type="mixed", queues=1)
    broker.create_topic("audit", type="normal", queues=1)
    broker.create_group(
        "billing", order="message_group", max_attempts=2, backoff_ms=[60_000], on_failure="park"
    )
    broker.create_group("shipping", max_attempts=2, backoff_ms=[300_000])
    broker.subscribe("billing", "orders")
    broker.subscribe("shipping", "orders")
    night.at("01:45")
    broker.delete_topic("audit")
    night.at("01:50")
    broker.reset_offset("shipping", "orders", to_earliest=True)
    night.at("02:00")
    night.send(range(20), message_group=lambda n: f"customer-{n % 4}")
    night.send(range(100, 103), deliver_at_ms=lambda _: night.clock.now_ms() + 20 * 60_000)

    night.at("02:10")  # the first run of billing does its work, but for orders 3 and 5
    run = broker.open_window("consumer/billing", owner="run-1", duration_ms=240_000)
    window = ("consumer/billing", run["epoch"])
    got = night.receive("billing", 10, invisible_duration_ms=600_000, window=window)
    night.settle("billing", [each for each in got if each[0] not in (3, 5, 7, 9)], window=window)
    night.at("02:13")
    declined: dict[str, Any] = {"reason": "card {number} was declined", "error_type": "CardError"}
    failed = [each for each in got if each[0] in (3, 5)]
    night.settle("billing", failed, "retry", run_id="run-1", window=window, **declined)
    broker.seal()

    night.at("02:15")  # the second one takes over, and dies
    run = broker.open_window("consumer/billing", owner="run-2", duration_ms=60_000)
    window = ("consumer/billing", run["epoch"])
    got = night.receive("billing", 10, invisible_duration_ms=60_000, window=window)
    night.settle("billing", [each for each in got if each[0] == 3], window=window)
    night.settle(
        "billing", [e for e in got if e[0] == 5], "retry", run_id="run-2", window=window, **declined
    )
    night.at("02:20")
    broker.revive()
    broker.seal()
    fail_to_ship(night)


def fail_to_ship(night: Night) -> None:
    """From half past two on."""
    broker = night.broker
    night.at("02:26")  # nobody had delivered what was due
    broker.deliver_scheduled()
    night.at("02:30")
    got = night.receive("shipping", 6, client_id="van-1")
    timeout: dict[str, Any] = {
        "reason": "carrier timeout after {number} s",
        "error_type": "Timeout",
    }
    night.settle("shipping", got[:4], "retry", **timeout)
    night.settle("shipping", got[4:])
    night.at("02:40")
    got = night.receive("shipping", 4, client_id="van-1")
    night.settle("shipping", got, "retry", **timeout)
    broker.revive()
    night.at("02:50")
    got = night.receive("shipping", 3, client_id="van-2", invisible_duration_ms=3_600_000)
    night.settle("shipping", got[:1], "retry", **timeout)
    broker.seal()
    night.at("03:05")
