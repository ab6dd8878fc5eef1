"""RabbitMQ: a quorum queue per group behind a fanout exchange per topic."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import aiormq

from benchmarks.peers.driver import (
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

#: Debian's; the script on the path is for its own user only.
_PROGRAM: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_QUORUM: Final = {"x-queue-type": "quorum"}
_PERSISTENT: Final = aiormq.spec.Basic.Properties(delivery_mode=2)


class RabbitMQ(Driver):
    """One node."""

    name = "RabbitMQ, quorum queue"
    durability = "publisher confirms, Raft log with fsync; acks have no answer"
    offers: ClassVar[frozenset[Offer]] = frozenset(
        {Offer.STORAGE, Offer.GROUPS, Offer.LARGE_RECEIVES}
    )

    def __init__(self) -> None:
        self._groups: dict[str, Sequence[str]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Return the missing program."""
        return None if _PROGRAM.exists() else "rabbitmq-server is not installed"

    def start(self, folder: Path) -> None:
        """Start a node with its own port mapper."""
        port, self._epmd_port = free_port(), free_port()
        settings = folder / "rabbitmq.conf"
        settings.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
        (folder / "enabled_plugins").write_text("[].\n")
        environment = {
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": str(folder),
            "RABBITMQ_CONFIG_FILE": str(settings),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_NODENAME": f"rabbit{port}@localhost",
            "RABBITMQ_PID_FILE": str(folder / "rabbitmq.pid"),
        }
        self._url = f"amqp://guest:guest@127.0.0.1:{port}/"
        self._server = Server([_PROGRAM], port=port, folder=folder, environment=environment)
        connection = _RabbitConnection(self._url, self._groups)
        self.version = connection.version
        connection.close()

    def pids(self) -> Sequence[int]:
        """Return the script that has started the node."""
        return [self._server.process.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Declare the exchange and its queues."""
        self._groups[topic] = groups
        connection = _RabbitConnection(self._url, self._groups)
        connection.run(connection.declare(topic))
        connection.close()

    def drop(self, topic: str) -> None:
        """Delete the queues and the exchange."""
        connection = _RabbitConnection(self._url, self._groups)
        connection.run(connection.delete(topic))
        connection.close()

    def connect(self) -> Connection:
        """Return a client with an event loop of its own."""
        return _RabbitConnection(self._url, self._groups)

    def stop(self) -> None:
        """Stop the node, and the port mapper that it has left."""
        with suppress(ProcessLookupError):
            os.killpg(self._server.process.pid, signal.SIGTERM)
        self._server.stop()
        epmd = shutil.which("epmd")
        if epmd:
            command = [epmd, "-port", str(self._epmd_port), "-kill"]
            subprocess.run(command, check=False, capture_output=True)


class _RabbitConnection(LoopConnection):
    def __init__(self, url: str, groups: dict[str, Sequence[str]]) -> None:
        super().__init__()
        self._groups = groups
        self._arrived: dict[tuple[str, str], asyncio.Queue[Any]] = {}
        self._connection: Any = self.run(aiormq.connect(url))
        self.version = str(self._connection.server_properties["version"])
        self._channel: Any = self.run(self._connection.channel(publisher_confirms=True))

    async def declare(self, topic: str) -> None:
        """Declare the exchange of a topic, and a queue per group."""
        await self._channel.exchange_declare(topic, exchange_type="fanout", durable=True)
        for group in self._groups[topic]:
            name = f"{topic}.{group}"
            await self._channel.queue_declare(name, durable=True, arguments=_QUORUM)
            await self._channel.queue_bind(name, topic)

    async def delete(self, topic: str) -> None:
        """Delete the exchange and its queues."""
        for group in self._groups[topic]:
            await self._channel.queue_delete(f"{topic}.{group}")
        await self._channel.exchange_delete(topic)

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        self.run(self._send(topic, bodies))

    async def _send(self, topic: str, bodies: Sequence[bytes]) -> None:
        # Each call returns with its confirm; all of them wait side by side.
        publish = self._channel.basic_publish
        sent = [publish(body, exchange=topic, properties=_PERSISTENT) for body in bodies]
        for confirmed in await asyncio.gather(*sent):
            if not isinstance(confirmed, aiormq.spec.Basic.Ack):
                raise TypeError(f"RabbitMQ did not confirm: {confirmed}")

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        return self.run(self._receive(topic, group, limit=limit, wait_s=wait_s))

    async def _receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        arrived = self._arrived.get((topic, group))
        if arrived is None:
            arrived = self._arrived[topic, group] = asyncio.Queue()
            # Twice the limit: the next batch is on its way while this one is acked.
            await self._channel.basic_qos(prefetch_count=2 * limit)
            await self._channel.basic_consume(f"{topic}.{group}", arrived.put)
        try:
            found = [await asyncio.wait_for(arrived.get(), wait_s)]
        except TimeoutError:
            return NOTHING
        while len(found) < limit and not arrived.empty():
            found.append(arrived.get_nowait())
        return Received([message.body for message in found], found[-1].delivery.delivery_tag)

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        self.run(self._channel.basic_ack(received.handle, multiple=True))

    async def disconnect(self) -> None:
        await self._connection.close()
