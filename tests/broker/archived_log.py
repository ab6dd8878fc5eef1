"""Brokers whose log is in a store and has an archive: to stop, to seal, and to read all of."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.storage.place import at
from rmq_pipeline.store.state_history import PLACES
from tests.broker.sealed_home import MIB, fill

Open = Callable[..., Broker]
LEASE_MS = 1500  # a renewal has half of this time, on a busy machine
HOUR_MS = 3_600_000


def stop(broker: Broker) -> None:
    """Keep a broker from renewing its lease or asking for it, as SIGSTOP and kill -9 do."""
    replication = broker.engine.replication
    assert replication is not None
    replication._renew = lambda **_: None  # type: ignore[method-assign]


def wake(broker: Broker) -> None:
    """Let it go on, as SIGCONT does."""
    replication = broker.engine.replication
    if replication is not None and replication.__dict__.pop("_renew", None):
        replication._fresh_until = 0.0


def seal_all(broker: Broker) -> None:
    while broker.seal(limit_bytes=4 * MIB)["segments"]:
        pass


def seal_until(broker: Broker, fault: Callable[[str], None]) -> None:
    while seal(broker.engine, limit_bytes=1 << 30, window=None, fault=fault)["segments"]:
        pass


def files(archive: str) -> dict[str, int]:
    return at(archive).files("")


def rows(broker: Broker, sql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = broker.sql(sql).to_pylist()
    return found


def history(broker: Broker) -> list[dict[str, Any]]:
    return rows(
        broker,
        "SELECT position, kind, consumer_group, topic, queue_id, queue_offset FROM events"
        " WHERE kind NOT IN ('founded', 'segment', 'event_segment', 'snapshot')"
        ' ORDER BY position, "row"',
    )


def with_bodies(broker: Broker) -> list[dict[str, Any]]:
    return rows(
        broker,
        "SELECT topic, queue_id, queue_offset, body FROM messages WHERE topic = 'plain'"
        " ORDER BY ALL",
    )


def prepared(broker: Broker) -> None:
    fill(broker)
    broker.create_group("folding", order="message_group")
    broker.subscribe("folding", "ordered")
    settle_some(broker, "first")


def settle_some(broker: Broker, said: str) -> None:
    got = broker.receive("folding", "ordered", limit=7)
    state = pa.table({"message_group": got["message_group"], "said": [said] * got.num_rows})
    handles, acks = got["receipt_handle"], ["ack"] * got.num_rows
    outcomes = pa.table([handles, acks], names=["receipt_handle", "outcome"])
    broker.settle("folding", outcomes, state=state, topic="ordered")


def states(broker: Broker) -> list[dict[str, Any]]:
    places = pa.table([["g0", "g1"], *[[0, 0]] * (len(PLACES) - 1)], names=PLACES.names)
    found: list[dict[str, Any]] = broker.keyed_state_history(
        "folding", topic="ordered", places=places
    ).to_pylist()
    return found
