"""The door: a thread with an event loop, and gRPC's server in it."""

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
from rmq_pipeline.errors import RequestError
from rmq_pipeline.rocketmq.alarm import Alarm
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.clients import Clients
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.groups import Groups
from rmq_pipeline.rocketmq.leases import Leases
from rmq_pipeline.rocketmq.polls import Polls
from rmq_pipeline.rocketmq.service import Service

log = logging.getLogger(__name__)

#: Calls under way get this long to end when the door closes.
_GRACE_S: Final = 5.0
#: Between tries to listen again.
_AGAIN_S: Final = 0.1
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.GRPC_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    # Clients ping without calls, some every 10 s: a server with the defaults sends them away.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A client whose machine has gone without a word is found out by our own pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # By default gRPC asks for the delay of a connection with a ping whenever something comes on it,
    # which is half of what a heartbeat takes of its threads; windows are fixed instead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # Else two brokers could listen on one port, and share its calls.
    ("grpc.so_reuseport", 0),
)


class GrpcDoor:
    """Serves a broker to RocketMQ 5 clients; it answers as soon as it is made."""

    def __init__(
        self,
        broker: Broker,
        address: str = "127.0.0.1:0",
        *,
        tls_address: str | None = None,
        certificates: tuple[bytes, bytes] | None = None,
        access: Access | None = None,
    ) -> None:
        """Listen.

        Args:
            broker: an open one.
            address: host:port; port 0 picks a free one.
            tls_address: where it listens for TLS, too.
            certificates: for TLS: the private key and the chain of certificates, as PEM.
            access: asked for every call, when it is enabled.

        Raises:
            RequestError: an address is none, or is taken.
        """
        self._broker = broker
        self._access = access
        self._listen = (address, tls_address, certificates)
        self.address = address
        self.tls_address = tls_address
        self._loop = _new_loop()
        self._started = threading.Event()
        self._failures: list[Exception] = []
        self._stopping: asyncio.Event
        self._service: Service
        self._bridge: Bridge
        self._thread = threading.Thread(target=self._run, name="rmq-grpc-door", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failures:
            self._thread.join()
            raise self._failures[0]

    def refuse(self) -> None:
        """From now on answer every call that the broker is stopping."""
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
        server = grpc.aio.server(options=_OPTIONS)
        self._bind(server)
        self._listen = (self.address, self.tls_address, self._listen[2])
        alarm = Alarm(self._broker.engine.clock)
        context = self._context(alarm)
        self._service = Service(context)
        others = self._broker.engine.members.others
        others.append(context.clients.of_group)
        alarm.start()
        serving = await self._served_by(server)
        self._started.set()
        while not await self._stops_before(serving):
            log.error("gRPC's server has ended by itself; another takes its place")
            successor = await self._successor(server)
            if successor is None:
                break
            server, serving = successor, await self._served_by(successor)
        context.polls.close()
        await self._service.idle(_GRACE_S)
        # What is left are telemetry streams, which clients never end.
        await server.stop(None)
        self._service.close()
        others.remove(context.clients.of_group)
        context.leases.close()
        alarm.close()
        self._bridge.close()

    async def _served_by(self, server: grpc.aio.Server) -> set[asyncio.Task[Any]]:
        """Begin to serve; the tasks that the server begins with, of which one is its loop."""
        server.add_generic_rpc_handlers(self._service.handlers())
        before = asyncio.all_tasks()
        await server.start()
        return asyncio.all_tasks() - before

    async def _stops_before(self, serving: set[asyncio.Task[Any]]) -> bool:
        """Wait until the door is to close, or its server has failed; whether the first came first.

        gRPC's server takes no more calls, and no connections, once one call has a path that is no
        UTF-8: whoever reaches the port could shut it for all.
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
        """A server at the same addresses, once they are free; None when the door is to close."""
        with contextlib.suppress(Exception):  # it says again why it has ended
            await asyncio.wait_for(ended.stop(None), _GRACE_S)
        while not self._stopping.is_set():
            server = grpc.aio.server(options=_OPTIONS)
            try:
                self._bind(server)
            except RequestError as error:
                log.warning("the door is not open again yet: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                return server
        return None

    def _bind(self, server: grpc.aio.Server) -> None:
        address, tls_address, certificates = self._listen
        # Both before one is taken: a server that was never started does not let go of it.
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

    def _context(self, alarm: Alarm) -> Context:
        broker, bridge = self._broker, self._bridge
        engine = broker.engine
        clients = Clients(engine.clock, most=engine.settings.grpc_clients)
        return Context(
            broker=broker,
            bridge=bridge,
            clients=clients,
            groups=Groups(broker, bridge),
            alarm=alarm,
            polls=Polls(engine.arrivals, bridge, alarm=alarm),
            leases=Leases(engine.clock, bridge, alarm=alarm, clients=clients),
            address=self.address,
            access=self._access,
        )


def _listening(address: str, listen: Callable[[str], int]) -> str:
    """The address that is listened on.

    Raises:
        RequestError: it is none, or is taken.
    """
    host, colon, _ = address.rpartition(":")
    if not colon:
        raise RequestError(f"{address!r} is not HOST:PORT.")
    try:
        port = listen(address)
    except RuntimeError as error:
        raise RequestError(f"Cannot listen on {address}: {error}.") from error
    return f"{host}:{port}"


def _new_loop() -> asyncio.AbstractEventLoop:
    """The loop of uvloop where it is installed: small calls take a fifth less of the processor."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
