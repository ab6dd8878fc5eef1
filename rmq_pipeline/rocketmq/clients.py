"""Who is connected: each client's settings, streams, and when it was last heard of."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import BusyError, ForbiddenError
from rmq_pipeline.rocketmq.caller import Caller

#: Clients send a heartbeat every 10 s. One with an open stream may be late: its process is there,
#: or its machine has gone without a word.
LIVE_MS: Final = 30_000
LIVE_WITH_STREAM_MS: Final = 90_000
#: Clients that are remembered without a stream, and how often those that have gone are looked for
#: when there are more.
_REMEMBERED: Final = 10_000
_LOOK_MS: Final = 1_000
#: How long a push may take: the client reads, and its windows are large.
_PUSH_S: Final = 3.0


class Stream:
    """An open telemetry stream; what is pushed goes out whole, one after another."""

    def __init__(self, caller: Caller) -> None:
        #: Whoever opened it: what is pushed has to be for them.
        self.caller = caller
        self._call = caller.call
        self._lock = asyncio.Lock()
        #: What its client has not read in time.
        self._unread: asyncio.Task[None] | None = None

    async def send(self, command: Any) -> None:
        """Push a TelemetryCommand; an error when the client has gone."""
        async with self._lock:
            await self._call.write(command.SerializeToString())

    async def send_if_open(self, command: Any) -> bool:
        """Push a TelemetryCommand; whether the client was there for it.

        One that does not read is not, until it does: others are not to wait for it.
        """
        if self._unread is not None and not self._unread.done():
            return False
        sending = asyncio.create_task(self.send(command))
        done, _ = await asyncio.wait({sending}, timeout=_PUSH_S)
        if not done:
            self._unread = sending
            sending.add_done_callback(_failed)  # nobody else asks
            return False
        return not _failed(sending)  # grpc has several errors for a stream that has ended


def _failed(sending: "asyncio.Task[None]") -> bool:
    return sending.cancelled() or sending.exception() is not None


@dataclass(slots=True, eq=False)
class Client:
    """What is known of one client. Changed by the loop's thread only."""

    client_id: str
    #: The name of the user whose it is; None: nobody had to say, so far.
    user: str | None = None
    #: From its settings, else its calls; upper case.
    language: str = ""
    #: The protocol's ClientType; 0 for one that has sent no settings.
    type: int = 0
    #: What a producer sends to: the Resource as it names it, by the name in the broker. Like type
    #: and group it outlives the stream it came by.
    topics: dict[str, Any] = field(default_factory=dict)
    #: Of a consumer, its name in the broker, and the topics it has subscribed to.
    group: str | None = None
    subscribed: tuple[str, ...] = ()
    seen_ms: int = 0
    streams: list[Stream] = field(default_factory=list)

    def is_of_another(self, caller: Caller) -> bool:
        """Whether a user has it who is not the caller."""
        return caller.user is not None and self.user not in {None, caller.user.name}

    def is_live(self, now_ms: int) -> bool:
        """Whether it is to be taken for running."""
        return now_ms - self.seen_ms < (LIVE_WITH_STREAM_MS if self.streams else LIVE_MS)


class Clients:
    """All clients of a door, by client id. Written by the loop's thread, read by any."""

    def __init__(self, clock: Clock, *, most: int) -> None:
        self._clock = clock
        self._most = most
        self._clients: dict[str, Client] = {}
        self._streams = 0
        self._look_ms = 0
        self._gone: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return self._streams

    def seen(self, caller: Caller) -> Client:
        """The client that makes a call, which shows that it is there.

        Raises:
            BusyError: there are as many clients as are remembered.
            ForbiddenError: a client of another user has this id.
        """
        client, now_ms = self._clients.get(caller.client_id), self._clock.now_ms()
        if client is not None and client.is_of_another(caller):
            if client.is_live(now_ms):
                raise ForbiddenError(f"Client {caller.client_id} is another user's.")
            client = None
        if client is None:
            self._make_room(now_ms)
            client = self._clients[caller.client_id] = Client(caller.client_id)
        if caller.user is not None:
            client.user = caller.user.name
        if not client.language:
            client.language = caller.language.upper()
        client.seen_ms = now_ms
        return client

    def transacts(self, caller: Caller, topic: str, *, resource: Any) -> None:
        """A client begins transactions in a topic: it may be asked about them by its stream.

        Its settings say so, too, but after a restart of the broker Python tells them late.

        Args:
            topic: its name in the broker.
            resource: as the client names it.
        """
        client = self._clients.get(caller.client_id)
        if client is not None:
            client.topics.setdefault(topic, resource)

    def find(self, client_id: str) -> Client | None:
        """What is known of a client."""
        return self._clients.get(client_id)

    def is_live(self, client_id: str) -> bool:
        """Whether a client is to be taken for running."""
        client = self._clients.get(client_id)
        return client is not None and client.is_live(self._clock.now_ms())

    def opened(self, caller: Caller) -> tuple[Client, Stream]:
        """Register a telemetry stream.

        Raises:
            BusyError: as many clients are connected as may be.
            ForbiddenError: a client of another user has this id.
        """
        if self._streams >= self._most:
            raise BusyError(f"{self._streams} clients are connected.")
        client, stream = self.seen(caller), Stream(caller)
        client.streams.append(stream)
        self._streams += 1
        return client, stream

    def closed(self, client: Client, stream: Stream) -> None:
        """Its stream has ended; its settings stay."""
        client.streams.remove(stream)
        self._streams -= 1

    def terminated(self, client_id: str) -> None:
        """The client has said that it ends."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            client.seen_ms = 0
        for listener in self._gone:
            listener(client_id)

    def on_gone(self, listener: Callable[[str], None]) -> None:
        """Have a function be told the id of a client that ends, in the loop's thread."""
        self._gone.append(listener)

    def of_group(self, group: str) -> dict[str, dict[str, Any]]:
        """The consumers of a group that are there, by client id, for people to see."""
        now_ms = self._clock.now_ms()
        return {
            client.client_id: {
                "topics": list(client.subscribed),
                "seen_at_ms": client.seen_ms,
                "details": {"model": "clustering", "language": client.language},
            }
            for client in list(self._clients.values())
            if client.group == group and client.is_live(now_ms)
        }

    def with_stream(self) -> Iterator[Client]:
        """The clients that commands can be pushed to."""
        return (client for client in list(self._clients.values()) if client.streams)

    def _make_room(self, now_ms: int) -> None:
        """Drop clients that are gone, when there are too many.

        Raises:
            BusyError: all of them are there.
        """
        most = _REMEMBERED + self._streams
        if len(self._clients) >= most and now_ms >= self._look_ms:
            self._look_ms = now_ms + _LOOK_MS
            live = {i: c for i, c in self._clients.items() if c.streams or c.is_live(now_ms)}
            self._clients = live
        if len(self._clients) >= most:
            raise BusyError(f"{len(self._clients)} clients are here.")
