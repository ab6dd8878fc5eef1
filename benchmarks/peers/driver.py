"""The protocol of a peer: a server to start, and connections that send, receive and ack."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

T = TypeVar("T")

#: A failed message returns after this time.
RETRY_MS: Final = 500
#: Length of a lease, where the peer has leases: longer than a workload.
LEASE_S: Final = 600
#: Interval of a consumer that has to ask a queue whether messages have come.
POLL_S: Final = 0.002


class Offer(Enum):
    """A feature that a workload needs and not every peer has."""

    #: It stores messages, so that a consumer can check them. The others are limits.
    STORAGE = "it stores no messages"
    GROUPS = "it has no consumer groups"
    #: A failed message holds up the messages of its key only.
    KEYS = "it has no order by key"
    TIMERS = "it has no timers"
    #: A receive can return 1,000 messages.
    LARGE_RECEIVES = "a receive returns at most 32"


class Kind(Enum):
    """The type of a topic."""

    PLAIN = "normal"
    KEYED = "fifo"
    TIMED = "delay"


@dataclass(frozen=True)
class Received:
    """The messages of one receive."""

    bodies: Sequence[bytes]
    #: The driver's own: what an ack needs.
    handle: Any = None
    #: Per message: the queue within which the peer promises order. Empty: one queue.
    streams: Sequence[int] = field(default=())


NOTHING: Final = Received([])


class Connection(ABC):
    """A connection of one thread."""

    @abstractmethod
    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        """Store messages in one call; return when they are synced.

        Args:
            topic: a topic made by ``create``.
            bodies: one per message.
            keys: one per message, of a KEYED topic.
            due_ms: one per message, of a TIMED topic: ms since 1970.
        """

    @abstractmethod
    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        """Return up to ``limit`` messages; wait for the first one."""

    @abstractmethod
    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        """Ack a receive; the messages at the indices ``failed`` return after RETRY_MS."""

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
        """Ack a receive, and receive the next messages: in one call, where the peer has one.

        Args:
            done: the receive to ack; one without messages is not acked.
            failed: as for ``ack``.
        """
        if done.bodies:
            self.ack(done, failed)
        return self.receive(topic, group, limit=limit, wait_s=wait_s)

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


class Driver(ABC):
    """A peer; started and stopped once."""

    name: ClassVar[str]
    #: What the server does before it answers, as the table prints it.
    durability: ClassVar[str]
    offers: ClassVar[frozenset[Offer]]
    #: A limit: what several producers send side by side is one call.
    shares_writes: ClassVar[bool] = False
    #: Known when the server runs.
    version: str = ""

    @classmethod
    def missing(cls) -> str | None:
        """Return what is not installed here; None if the peer can run."""
        return None

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Start the server with its data in a folder; return when it takes connections."""

    @abstractmethod
    def pids(self) -> Sequence[int]:
        """Return the server's processes without their children; none: it runs in the client."""

    @abstractmethod
    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create a topic that these groups read from its first message on."""

    @abstractmethod
    def connect(self) -> Connection:
        """Return a new connection, for the calling thread."""

    def connect_to_check(self) -> Connection:
        """Return a connection that reads, outside of the measured time, what was sent."""
        return self.connect()

    @abstractmethod
    def drop(self, topic: str) -> None:
        """Delete a topic."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server."""


class LoopConnection(Connection, ABC):
    """A connection of an asyncio client, with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Close the connection and its loop."""
        self.run(self.disconnect())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self.run(asyncio.sleep(0))
        self._loop.close()

    @abstractmethod
    async def disconnect(self) -> None:
        """End the connection."""
