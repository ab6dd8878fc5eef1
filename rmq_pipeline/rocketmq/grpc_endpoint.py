"""The gRPC endpoint: gRPC's server in a thread with an event loop of its own."""

import asyncio
import contextlib
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import grpc

from rmq_pipeline import limits
from rmq_pipeline.access.access import Access
from rmq_pipeline.access.source import check_free, split_address
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.errors import AccessError, RequestError
from rmq_pipeline.rocketmq.clients import Clients
from rmq_pipeline.rocketmq.context import Context, Groups
from rmq_pipeline.rocketmq.leases import Leases
from rmq_pipeline.rocketmq.rights import Authenticating
from rmq_pipeline.rocketmq.service import Service
from rmq_pipeline.route_table import RouteFile

log = logging.getLogger(__name__)

#: Time that calls under way get when the endpoint shuts down.
_GRACE_S: Final = 5.0
#: Time that cancelled calls get, twice, to release what they leased.
_RELEASE_S: Final = 2.0
#: Pause between two attempts to listen again.
_AGAIN_S: Final = 0.1
#: Calls that may wait for the event loop: as many as may be under way.
_PENDING: Final = limits.GRPC_CALLS + limits.GRPC_RECEIVES
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.GRPC_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    # Clients ping without calls, some every 10 s; the default server closes their connections.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # The server's own pings find clients whose machine vanished without closing the connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # By default gRPC probes a connection's bandwidth with pings while data arrive, which costs its
    # threads half of a heartbeat's time. Fixed windows need no probes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # With SO_REUSEPORT two brokers could listen on one port and share its calls.
    ("grpc.so_reuseport", 0),
    # By default gRPC cancels random calls once a thousand wait for the event loop. Service reads
    # each call, and refuses calls beyond its limits with a reason.
    ("grpc.server.max_pending_requests", _PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _PENDING + 1),
    # Close a connection that sends nothing after 10 s; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class GrpcEndpoint:
    """Endpoint for RocketMQ 5 clients; it serves once the constructor has returned."""

    def __init__(
        self,
        broker: Broker,
        address: str = "127.0.0.1:0",
        *,
        tls_address: str | None = None,
        certificates: tuple[bytes, bytes] | None = None,
        access: Access | None = None,
        connections: int | None = None,
        routes: RouteFile | None = None,
    ) -> None:
        """Listen and serve.

        Args:
            broker: an open broker.
            address: host:port; port 0 picks a free one.
            tls_address: host:port of a second listener, with TLS.
            certificates: for TLS: the private key and the certificate chain, as PEM.
            access: checks every call while access control is enabled.
            connections: maximum number of open connections; None: no maximum.
            routes: topics of several brokers; None: this broker has all topics.

        Raises:
            RequestError: an address is malformed or in use.
        """
        self._broker = broker
        self._access = access
        self._routes = routes
        self._listen = (address, tls_address, certificates)
        self._options = list(_OPTIONS)
        if connections is not None:
            self._options.append(("grpc.max_allowed_incoming_connections", connections))
        self.address = address
        self.tls_address = tls_address
        self._loop = _new_loop()
        self._started = threading.Event()
        self._failures: list[Exception] = []
        self._stopping: asyncio.Event
        self._service: Service
        self._bridge: Bridge
        self._thread = threading.Thread(target=self._run, name="rmq-grpc-endpoint", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failures:
            self._thread.join()
            raise self._failures[0]

    def refuse(self) -> None:
        """Answer every further call with the error that the broker is stopping."""
        self._service.refuse()

    def shutdown(self) -> None:
        """Refuse new calls, wait for running ones, stop listening."""
        self.refuse()
        self._bridge.call_soon(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # noqa: BLE001 the caller's thread raises it
            self._failures.append(error)
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._bridge = Bridge(self._broker.engine, self._loop)
        server = self._server()
        self._bind(server)
        self._listen = (self.address, self.tls_address, self._listen[2])
        context = self._context()
        self._service = Service(context)
        others = self._broker.engine.members.others
        others.append(context.clients.of_group)
        self._bridge.timers.start()
        serving = await self._served_by(server)
        self._started.set()
        while not await self._stops_before(serving):
            log.error("gRPC's server has failed; starting another one")
            successor = await self._successor(server)
            if successor is None:
                break
            server, serving = successor, await self._served_by(successor)
        self._bridge.stop_waiting()
        await self._service.idle(_GRACE_S)
        # Telemetry streams and unread answers are still open, as clients never end the former.
        # Cancelling them releases the messages of the latter.
        await server.stop(None)
        await self._service.idle(_RELEASE_S)
        await self._bridge.finish(_RELEASE_S)
        self._service.close()
        others.remove(context.clients.of_group)
        context.leases.close()
        self._bridge.timers.close()
        self._bridge.close()

    async def _served_by(self, server: grpc.aio.Server) -> set[asyncio.Task[Any]]:
        """Start a server and return the tasks it started; its accept loop is one of them."""
        server.add_generic_rpc_handlers(self._service.handlers())
        before = asyncio.all_tasks()
        await server.start()
        return asyncio.all_tasks() - before

    async def _stops_before(self, serving: set[asyncio.Task[Any]]) -> bool:
        """Wait until the endpoint stops (return True) or its server has failed (return False).

        One call whose path is not UTF-8 ends the accept loop of gRPC's server. Any client that
        reaches the port could so shut the endpoint down for all.
        """
        stopping: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        waiting = {stopping, *serving}
        while not self._stopping.is_set():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(not task.cancelled() and task.exception() is not None for task in done):
                break
        stopping.cancel()
        return self._stopping.is_set()

    async def _successor(self, ended: grpc.aio.Server) -> grpc.aio.Server | None:
        """Return a new server once the addresses are free; None if the endpoint stops first."""
        with contextlib.suppress(Exception):  # raises the error that ended the server
            await asyncio.wait_for(ended.stop(None), _GRACE_S)
        while not self._stopping.is_set():
            server = self._server()
            try:
                self._bind(server)
            except RequestError as error:
                log.warning("the gRPC endpoint cannot listen again yet: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                return server
        return None

    def _server(self) -> grpc.aio.Server:
        def refusal(path: str, error: AccessError) -> bytes | None:
            return self._service.refusal(path, error)  # the service is created after the server

        interceptors = [] if self._access is None else [Authenticating(self._access, refusal)]
        return grpc.aio.server(options=self._options, interceptors=interceptors)

    def _bind(self, server: grpc.aio.Server) -> None:
        address, tls_address, certificates = self._listen
        # Check both before binding one: a server that was never started does not free its address.
        for where in filter(None, (address, tls_address)):
            check_free(*split_address(where))
        self.address = _listening(address, server.add_insecure_port)
        if tls_address is not None:
            if certificates is None:
                raise RequestError("A TLS address needs a certificate.")
            credentials = grpc.ssl_server_credentials([certificates])
            self.tls_address = _listening(
                tls_address, lambda where: server.add_secure_port(where, credentials)
            )

    def _context(self) -> Context:
        broker, bridge = self._broker, self._bridge
        engine = broker.engine
        clients = Clients(engine.clock, most=engine.settings.grpc_clients)
        return Context(
            broker=broker,
            bridge=bridge,
            clients=clients,
            groups=Groups(broker, bridge, routes=self._routes),
            leases=Leases(engine.clock, bridge, clients=clients),
            address=self.address,
            access=self._access,
            clock=engine.clock,
            settings=engine.settings,
            routes=self._routes,
        )


def _listening(address: str, listen: Callable[[str], int]) -> str:
    """Listen on an address and return it with the actual port.

    Raises:
        RequestError: the address is malformed or in use.
    """
    host, colon, _ = address.rpartition(":")
    if not colon:
        raise RequestError(f"{address!r} is not HOST:PORT.")
    try:
        port = listen(address)
    except RuntimeError as error:
        raise RequestError(
            f"Cannot listen on {address}: {error}.",
            remedy="Choose another address or port, or stop the process that uses this one.",
        ) from error
    return f"{host}:{port}"


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if it is installed: small calls take 20% less CPU."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
