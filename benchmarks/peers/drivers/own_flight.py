"""Our broker, through its Flight client."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from typing_extensions import override

from benchmarks.measured import send_patiently
from benchmarks.peers.driver import LEASE_S, RETRY_MS, Connection, Driver, Kind, Offer, Received
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client


class OwnBroker(Driver):
    """A broker as ``rmq broker`` runs it, with its background work."""

    durability = "flush sync: write with RWF_DSYNC before the answer; acks too"
    version = version("rmq_pipeline")
    _home: Path
    _endpoint: Endpoint

    def start(self, folder: Path) -> None:
        """Start the broker."""
        self._home = folder / "home"
        self._endpoint = process.start(self._home, upkeep="self", flush="sync")

    def pids(self) -> Sequence[int]:
        """Return the broker's process."""
        return [self._endpoint.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create the topic, and subscribe the groups."""
        with Client(home=self._home) as client:
            client.create_topic(topic, type=kind.value)
            for group in groups:
                order = "message_group" if kind is Kind.KEYED else "none"
                client.create_group(group, order=order, max_attempts=1000)
                client.subscribe(group, topic)

    def drop(self, topic: str) -> None:
        """Delete the topic with its messages."""
        with Client(home=self._home) as client:
            client.delete_topic(topic, force=True)

    def stop(self) -> None:
        """Stop the broker."""
        process.stop(self._home)


class OwnFlight(OwnBroker):
    """The broker behind its Flight endpoint."""

    name = "rmq_pipeline, Flight"
    offers: ClassVar[frozenset[Offer]] = frozenset(Offer)

    def connect(self) -> Connection:
        """Return a client."""
        return _FlightConnection(self._home)


class _FlightConnection(Connection):
    def __init__(self, home: Path) -> None:
        self._client = Client(home=home)

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        columns = {"body": pa.array(bodies, pa.binary())}
        if keys:
            columns["message_group"] = pa.array([f"key-{key}" for key in keys])
        if due_ms:
            columns["deliver_at_ms"] = pa.array(due_ms, pa.int64())
        send_patiently(self._client, topic, messages=pa.table(columns))

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        return self._receive(topic, group, limit=limit, wait_s=wait_s, ack=None)

    @override
    def ack_and_receive(
        self,
        done: Received,
        failed: Sequence[int],
        *,
        topic: str,
        group: str,
        limit: int,
        wait_s: float,
    ) -> Received:
        acked = self._without(done, failed) if done.bodies else None
        return self._receive(topic, group, limit=limit, wait_s=wait_s, ack=acked)

    def _receive(
        self, topic: str, group: str, *, limit: int, wait_s: float, ack: pa.Table | None
    ) -> Received:
        table = self._client.receive(
            group,
            topic,
            limit=limit,
            wait_ms=int(wait_s * 1000),
            invisible_duration_ms=LEASE_S * 1000,
            ack=ack if ack is not None and len(ack) else None,
        )
        streams = table["queue_id"].to_pylist()
        receipts = table.select(["receipt_handle"])
        return Received(table["body"].to_pylist(), receipts, streams)

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        receipts = self._without(received, failed)
        if len(receipts):
            self._client.ack(receipts)

    def _without(self, received: Received, failed: Sequence[int]) -> pa.Table:
        """Let failed messages return; return the receipts of the others."""
        receipts: pa.Table = received.handle
        if failed:
            self._client.change_invisible_duration(receipts.take(pa.array(failed)), RETRY_MS)
            receipts = receipts.take(pa.array(_others(len(receipts), failed), pa.int64()))
        return receipts

    def close(self) -> None:
        self._client.close()


def _others(n: int, failed: Sequence[int]) -> list[int]:
    return sorted(set(range(n)) - set(failed))
