"""Connected clients: their settings, their streams, and when each was last heard from."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from rmq_pipeline.access.access import Access
from rmq_pipeline.access.users import Principal
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import BusyError, ClientIdRequiredError, ForbiddenError
from rmq_pipeline.metrics.declared import Samples
from rmq_pipeline.topic import DLQ_PREFIX, RETRY_PREFIX


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call."""

    #: The client id, which stays the same while the client runs.
    client_id: str
    #: The x-mq-language header. Node sends HTTP there; its settings name the real language.
    language: str
    #: The namespace of resources that name none.
    namespace: str
    #: None: access control is off.
    user: Principal | None
    #: gRPC's context of the call.
    call: Any

    @property
    def peer(self) -> str:
        """The caller's address without the port."""
        kind, _, rest = unquote(self.call.peer()).partition(":")
        return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest

    def remaining_ms(self) -> int | None:
        """Return the time until the call's deadline, in ms; None without a deadline."""
        remaining = self.call.time_remaining()
        return None if remaining is None else int(remaining * 1000)

    def named(self, resource: Any) -> str:
        """Return the broker's name of a topic or a group: ``namespace%name`` in a namespace.

        A group's own topics carry the group's whole name: ``%DLQ%namespace%group``. An empty name
        stays empty.
        """
        name = str(resource.name)
        namespace = resource.resource_namespace or self.namespace
        if not (namespace and name):  # an empty name stays empty in a namespace, too
            return name
        for prefix in (DLQ_PREFIX, RETRY_PREFIX):
            if name.startswith(prefix):
                return f"{prefix}{namespace}%{name.removeprefix(prefix)}"
        return f"{namespace}%{name}"


def caller_of(call: Any, access: Access | None) -> Caller:
    """Return the caller of a call, as its metadata name it; of a repeated key, the last value.

    Args:
        call: gRPC's context.
        access: checks the credentials while access control is enabled.

    Raises:
        UnauthorizedError: the credentials are missing or wrong.
        ClientIdRequiredError: the metadata have no x-mq-client-id.
    """
    metadata = {key: value for key, value in call.invocation_metadata() if isinstance(value, str)}
    user = None
    if access is not None and access.enabled:
        user = access.authenticate_mq(metadata.get("authorization"), metadata.get("x-mq-date-time"))
    client_id = metadata.get("x-mq-client-id", "").strip()
    if not client_id:
        raise ClientIdRequiredError("The call has no x-mq-client-id.")
    return Caller(
        client_id=client_id,
        language=metadata.get("x-mq-language", ""),
        namespace=metadata.get("x-mq-namespace", ""),
        user=user,
        call=call,
    )


#: Clients send a heartbeat every 10 s. A client with an open stream gets more time: it is alive
#: unless its machine vanished without closing the connection.
LIVE_MS: Final = 30_000
LIVE_WITH_STREAM_MS: Final = 90_000
#: Clients that are remembered without a stream, and the interval at which dead ones are dropped
#: when there are more.
_REMEMBERED: Final = 10_000
_LOOK_MS: Final = 1_000
#: Maximum duration of a push; after it, the client counts as not reading.
_PUSH_S: Final = 3.0


class Stream:
    """An open telemetry stream; commands are written whole and one at a time."""

    def __init__(self, caller: Caller) -> None:
        #: The caller that opened the stream; its user must be allowed to see what is pushed.
        self.caller = caller
        self._call = caller.call
        self._lock = asyncio.Lock()
        #: A write that the client has not read in time.
        self._unread: asyncio.Task[None] | None = None

    async def send(self, command: Any) -> None:
        """Push a TelemetryCommand; raises gRPC's error if the client has gone."""
        async with self._lock:
            await self._call.write(command.SerializeToString())

    async def send_if_open(self, command: Any) -> bool:
        """Push a TelemetryCommand and return whether the client took it in time.

        A client that does not read counts as absent until it does, so that other clients need not
        wait.
        """
        if self._unread is not None and not self._unread.done():
            return False
        sending = asyncio.create_task(self.send(command))
        done, _ = await asyncio.wait({sending}, timeout=_PUSH_S)
        if not done:
            self._unread = sending
            sending.add_done_callback(_failed)  # retrieve the error, or asyncio logs it
            return False
        return not _failed(sending)  # grpc has several errors for an ended stream


def _failed(sending: "asyncio.Task[None]") -> bool:
    return sending.cancelled() or sending.exception() is not None


@dataclass(slots=True, eq=False)
class Client:
    """State of one client. Changed by the loop's thread only."""

    client_id: str
    #: The name of the client's user; None: access control was off so far.
    user: str | None = None
    #: From the client's settings, or else from its calls; upper case.
    language: str = ""
    #: The protocol's ClientType; 0 until the client sends settings.
    type: int = 0
    #: A producer's topics: the Resource as the client names it, by the broker's name. Like type and
    #: group they outlive the stream on which they arrived.
    topics: dict[str, Any] = field(default_factory=dict)
    #: A consumer's group, by its name in the broker, and the topics it subscribed to.
    group: str | None = None
    subscribed: tuple[str, ...] = ()
    seen_ms: int = 0
    streams: list[Stream] = field(default_factory=list)

    def is_of_another(self, caller: Caller) -> bool:
        """Return whether the client belongs to a user other than the caller's."""
        return caller.user is not None and self.user not in {None, caller.user.name}

    def is_live(self, now_ms: int) -> bool:
        """Return whether the client counts as running."""
        return now_ms - self.seen_ms < (LIVE_WITH_STREAM_MS if self.streams else LIVE_MS)


class Clients:
    """All clients of an endpoint, by client id. Written by the loop's thread, read by any."""

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
        """Note that a client is alive, and return it.

        Raises:
            BusyError: the endpoint remembers as many clients as it may.
            ForbiddenError: a live client of another user has this id.
        """
        client, now_ms = self._clients.get(caller.client_id), self._clock.now_ms()
        if client is not None and client.is_of_another(caller):
            if client.is_live(now_ms):
                raise ForbiddenError(
                    f"Client id {caller.client_id} is in use by a client of another user.",
                    remedy="Give each client an id of its own.",
                )
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
        """Note that a client begins transactions in a topic, so that checks may be pushed to it.

        Its settings list the topic, too, but the Python client sends them late after a broker
        restart.

        Args:
            topic: its name in the broker.
            resource: as the client names it.
        """
        client = self._clients.get(caller.client_id)
        if client is not None:
            client.topics.setdefault(topic, resource)

    def find(self, client_id: str) -> Client | None:
        """Return a client by its id; None if it is unknown."""
        return self._clients.get(client_id)

    def is_live(self, client_id: str) -> bool:
        """Return whether a client counts as running."""
        client = self._clients.get(client_id)
        return client is not None and client.is_live(self._clock.now_ms())

    def opened(self, caller: Caller) -> tuple[Client, Stream]:
        """Register a telemetry stream.

        Raises:
            BusyError: as many clients are connected as may be.
            ForbiddenError: a live client of another user has this id.
        """
        if self._streams >= self._most:
            raise BusyError(
                f"{self._streams} clients are connected, the maximum of the setting grpc_clients."
            )
        client, stream = self.seen(caller), Stream(caller)
        client.streams.append(stream)
        self._streams += 1
        return client, stream

    def closed(self, client: Client, stream: Stream) -> None:
        """Unregister a telemetry stream; the client's settings stay."""
        client.streams.remove(stream)
        self._streams -= 1

    def terminated(self, client_id: str) -> None:
        """Forget a client that announced its end, and tell the listeners."""
        client = self._clients.pop(client_id, None)
        if client is not None:
            client.seen_ms = 0
        for listener in self._gone:
            listener(client_id)

    def on_gone(self, listener: Callable[[str], None]) -> None:
        """Register a listener that gets the id of a client that ends; runs in the loop's thread."""
        self._gone.append(listener)

    def of_group(self, group: str) -> dict[str, dict[str, Any]]:
        """Return the live consumers of a group by client id, for the status pages."""
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

    def measure(self, samples: Samples) -> None:
        """Add the live producers by language, and the consumers by group and language."""
        now_ms = self._clock.now_ms()
        live = [client for client in list(self._clients.values()) if client.is_live(now_ms)]
        producers = Counter(client.language.lower() for client in live if client.topics)
        consumers = Counter((c.group, c.language.lower()) for c in live if c.group is not None)
        for language, n in producers.items():
            samples.add("rocketmq_producer_connections", n, language)
        for (group, language), n in consumers.items():
            samples.add("rocketmq_consumer_connections", n, group, language, "push", "false")

    def with_stream(self) -> Iterator[Client]:
        """Return the clients to which commands can be pushed."""
        return (client for client in list(self._clients.values()) if client.streams)

    def _make_room(self, now_ms: int) -> None:
        """Drop dead clients when there are too many.

        Raises:
            BusyError: all of them are alive.
        """
        most = _REMEMBERED + self._streams
        if len(self._clients) >= most and now_ms >= self._look_ms:
            self._look_ms = now_ms + _LOOK_MS
            live = {i: c for i, c in self._clients.items() if c.streams or c.is_live(now_ms)}
            self._clients = live
        if len(self._clients) >= most:
            raise BusyError(f"{len(self._clients)} clients are live, the maximum.")
