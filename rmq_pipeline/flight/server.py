"""The table door: decode a call, ask the broker, encode the answer."""

import inspect
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import flight
from typing_extensions import override

from rmq_pipeline import errors, limits
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight import wire

log = logging.getLogger(__name__)

#: How long a long poll may wait before it looks whether its caller is still there.
SLICE_MS = 1_000


class FlightServer(flight.FlightServerBase):
    """Serves any object that has the broker's verbs; it answers as soon as it is made."""

    def __init__(
        self,
        broker: object,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Listen.

        Args:
            broker: has the verbs of ``wire.VERBS`` as methods; they are called from many threads.
            address: host:port; port 0 picks a free one.
            token: a call that carries another token is refused.
            clock: the broker's, for the slices of a long poll.

        Raises:
            RequestError: the address is none, lies beyond loopback, or is taken.
        """
        host, port = loopback(address)
        _check_free(host, port)
        self._broker = broker
        self._token = token
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        super().__init__((f"[{host}]" if ":" in host else host, port))
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def ping(self) -> dict[str, Any]:
        """Which process answers here."""
        return {"pid": os.getpid()}

    def refuse(self) -> None:
        """From now on answer every call, waiting ones too, that the broker is stopping."""
        self._closing.set()

    @override
    def shutdown(self) -> None:
        """Refuse new calls, wait for running ones, stop listening."""
        self.refuse()
        super().shutdown()

    @override
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Carry out one call (see ``wire``)."""
        writer.begin(wire.PIECE)
        try:
            # All input is read before anything is answered: a client that still writes would
            # see a broken stream instead of the answer.
            pieces = list(wire.read_pieces(reader))
            answer = self._answer(descriptor.command, pieces, is_cancelled=context.is_cancelled)
        except errors.RocketMQError as error:
            writer.write_metadata(pa.py_buffer(wire.error_answer(error)))
            return
        if isinstance(answer, bytes):
            writer.write_metadata(pa.py_buffer(answer))
            return
        for name, piece in answer:
            writer.write_with_metadata(piece, pa.py_buffer(name.encode()))

    def _answer(
        self, command: bytes, pieces: list[wire.Piece], *, is_cancelled: Callable[[], bool]
    ) -> bytes | list[wire.Piece]:
        if self._closing.is_set():
            raise errors.BrokerUnavailableError("The broker is stopping.")
        verb, plain, token = wire.read_command(command)
        if token and self._token and token != self._token:
            raise errors.BrokerUnavailableError("Another broker answers at this address.")
        result = self._call(
            verb, wire.arguments(verb, plain, pieces=pieces), is_cancelled=is_cancelled
        )
        if isinstance(result, pa.Table):
            return list(wire.pack(wire.ANSWER, result))
        return wire.value_answer(result)

    def _call(
        self, verb: wire.Verb, args: dict[str, Any], *, is_cancelled: Callable[[], bool]
    ) -> object:
        owner = self if verb.name == "ping" else self._broker
        method: Callable[..., object] = getattr(owner, verb.name)
        try:
            if verb.long_poll and _is_long(args.get("wait_ms")):
                return self._poll(method, args, is_cancelled=is_cancelled)
            return method(**args)
        except errors.RocketMQError:
            raise
        except Exception as error:
            raise self._translated(verb.name, error, bound=(method, args)) from error

    def _poll(
        self,
        method: Callable[..., object],
        args: dict[str, Any],
        *,
        is_cancelled: Callable[[], bool],
    ) -> object:
        """Wait in slices, so that no message is leased to a caller that has gone."""
        until_ms = self._clock.now_ms() + args["wait_ms"]
        while True:
            left_ms = max(0, until_ms - self._clock.now_ms())
            result = method(**{**args, "wait_ms": min(left_ms, SLICE_MS)})
            if left_ms <= SLICE_MS or is_cancelled() or self._closing.is_set():
                return result
            if not isinstance(result, pa.Table) or result.num_rows:
                return result

    def _translated(
        self, name: str, error: Exception, *, bound: tuple[Callable[..., object], dict[str, Any]]
    ) -> errors.RocketMQError:
        if self._closing.is_set():
            return errors.BrokerUnavailableError("The broker is stopping.")
        if isinstance(error, TypeError):
            method, args = bound
            try:
                inspect.signature(method).bind(**args)
            except TypeError as unbound:
                return errors.RequestError(f"{name}: {unbound}.")
        log.error("%s failed", name, exc_info=error)
        return errors.RocketMQError(f"{name} failed: {type(error).__name__}: {error}.")


def _is_long(wait_ms: object) -> bool:
    # What is out of range is for the broker to refuse.
    return isinstance(wait_ms, int) and SLICE_MS < wait_ms <= limits.POLL_MAX_MS


def loopback(address: str) -> tuple[str, int]:
    """Host and port of an address on this machine; the host as a number.

    Raises:
        RequestError: it is no host:port, or lies beyond loopback.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise errors.RequestError(f"{address!r} is not HOST:PORT.")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        if ipaddress.ip_address(host).is_loopback:
            return host, int(port)
    except ValueError:
        pass
    raise errors.RequestError(
        f"{address!r} is not on loopback, and there is no access control yet."
    )


def _check_free(host: str, port: int) -> None:
    # gRPC says only that it did not start.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise errors.RequestError(f"Cannot listen on {host}:{port}: {error}.") from error
