"""Values of samples, by the metric and some of its labels; and a broker that has worked a bit."""

from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.waiting import until

BACKOFF_MS = 1_000


def value(table: pa.Table, name: str, *, part: str = "", **labels: str) -> float:
    """The sum of the samples with these labels; fails without one."""
    found = [
        row["value"]
        for row in table.to_pylist()
        if row["name"] == name
        and row["part"] == part
        and labels.items() <= dict(row["labels"]).items()
    ]
    assert found, f"no sample of {name} with {labels}"
    return float(sum(found))


def has(table: pa.Table, name: str, **labels: str) -> bool:
    """Whether there is a sample with these labels."""
    return any(
        row["name"] == name and labels.items() <= dict(row["labels"]).items()
        for row in table.to_pylist()
    )


def bodies(*found: bytes, **columns: Any) -> pa.Table:
    """Messages to send."""
    return pa.table({"body": list(found), **columns})


def counted(broker: Broker, name: str, wanted: float, **labels: str) -> pa.Table:
    """The samples once a counter has a value: the broker counts after it has answered."""
    last = [broker.metrics()]

    def is_there() -> bool:
        last[0] = broker.metrics()
        return has(last[0], name, **labels) and value(last[0], name, **labels) == wanted

    until(is_there, within_s=20, what=lambda: f"{name} {wanted}: {last[0].to_pylist()}")
    return last[0]


def work(broker: Broker, clock: ManualClock) -> None:
    """Make each metric have a sample: sends, failures, dead letters, parking, transactions."""
    broker.create_topic("orders", queues=2)
    broker.create_topic("later", type="delay", queues=1)
    broker.create_topic("pays", type="transaction", queues=1)
    broker.create_group("billing", max_attempts=1, backoff_ms=[BACKOFF_MS])
    broker.create_group("audit", max_attempts=1, on_failure="park")
    broker.send("orders", bodies(b"a", b"bb", b"ccc", b"dddd"))
    broker.send("later", bodies(b"x", b"y", delay_level=pa.array([1, 1], pa.int32())))
    clock.advance(2_000)
    broker.deliver_scheduled()
    broker.send("later", bodies(b"z", delay_level=pa.array([18], pa.int32())))
    halves = broker.send_half("pays", bodies(b"1", b"2", b"3"), producer_group="p")
    ids = halves["transaction_id"].to_pylist()
    ends = pa.table([ids[:2], ["commit", "rollback"]], schema=schema.RESOLUTION)
    broker.end_transactions(ends)
    got = broker.receive("billing", "orders", limit=3)
    handles = got["receipt_handle"].to_pylist()
    broker.ack(handles[:1])
    broker.forward_to_dead_letter_queue(handles[1:2])
    parked = broker.receive("audit", "orders", limit=1)
    broker.change_invisible_duration(parked["receipt_handle"].to_pylist(), duration_ms=1_000)
    broker.pull("orders", {0: 0, 1: 0}, limit=10)
    clock.advance(5_000)
    broker.revive()
