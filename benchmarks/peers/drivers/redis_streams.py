"""Redis streams with consumer groups; each write is synced."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from redis import Redis
from typing_extensions import override

from benchmarks.peers.driver import NOTHING, Connection, Driver, Kind, Offer, Received
from benchmarks.peers.pinned import Server
from tests.free_address import free_port


class RedisStreams(Driver):
    """A stream per topic."""

    name = "Redis streams"
    durability = "appendonly yes, appendfsync always; acks too"
    offers: ClassVar[frozenset[Offer]] = frozenset(
        {Offer.STORAGE, Offer.GROUPS, Offer.LARGE_RECEIVES}
    )

    @classmethod
    def missing(cls) -> str | None:
        """Return the missing program."""
        return None if shutil.which("redis-server") else "redis-server is not installed"

    def start(self, folder: Path) -> None:
        """Start a server without snapshots."""
        self._port = free_port()
        flags = {"appendonly": "yes", "appendfsync": "always", "save": "", "bind": "127.0.0.1"}
        arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
        command = ["redis-server", "--port", str(self._port), "--dir", str(folder), *arguments]
        self._server = Server(command, port=self._port, folder=folder)
        with self._client() as client:
            self.version = client.info("server")["redis_version"]

    def pids(self) -> Sequence[int]:
        """Return the server."""
        return [self._server.process.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create the stream and its groups."""
        with self._client() as client:
            for group in groups:
                client.xgroup_create(topic, group, id="0", mkstream=True)

    def drop(self, topic: str) -> None:
        """Delete the stream."""
        with self._client() as client:
            client.delete(topic)

    def connect(self) -> Connection:
        """Return a client."""
        return _RedisConnection(self._client())

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def _client(self) -> Redis:
        return Redis(port=self._port, protocol=2)


class _RedisConnection(Connection):
    def __init__(self, client: Any) -> None:
        self._client = client

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for body in bodies:
            pipeline.execute_command("XADD", topic, "*", "b", body)
        pipeline.execute()

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        command = _receive(topic, group, limit=limit, wait_s=wait_s)
        return _received(self._client.execute_command(*command), topic=topic, group=group)

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
        pipeline = self._client.pipeline(transaction=False)
        if done.bodies:
            pipeline.execute_command("XACK", *done.handle[:2], *done.handle[2])
        pipeline.execute_command(*_receive(topic, group, limit=limit, wait_s=wait_s))
        return _received(pipeline.execute()[-1], topic=topic, group=group)

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        topic, group, ids = received.handle
        self._client.execute_command("XACK", topic, group, *ids)

    def close(self) -> None:
        self._client.close()


def _receive(topic: str, group: str, *, limit: int, wait_s: float) -> Sequence[Any]:
    """Return the command of a receive."""
    return (
        *("XREADGROUP", "GROUP", group, "consumer", "COUNT", limit),
        *("BLOCK", max(1, int(wait_s * 1000)), "STREAMS", topic, ">"),
    )


def _received(found: Any, *, topic: str, group: str) -> Received:
    """Return the messages of an answer."""
    if not found:
        return NOTHING
    entries = found[topic.encode()][0] if isinstance(found, dict) else found[0][1]
    ids = [name for name, _ in entries]
    bodies = [fields[b"b"] for _, fields in entries]
    return Received(bodies, (topic, group, ids))
