"""Plain connections of the Flight endpoint: a thread for each, one call after the other.

The rules are those of ``service``: the headers are checked before the first command is read, and
the command before the body. Connections that no thread can be had for are refused; their callers
go on through gRPC.
"""

import hmac
import json
import logging
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from rmq_pipeline import errors
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import holder_of
from rmq_pipeline.clock import Deadline
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.service import Exchange
from rmq_pipeline.flight.tcp_stream import (
    BODY_BYTES,
    COMMAND_BYTES,
    END,
    HEADERS_BYTES,
    KEY_BYTES,
    LENGTH,
    LENGTHS,
    MAGIC,
    Stream,
)

log = logging.getLogger(__name__)

#: Connections at most.
CONNECTIONS: Final = 1024
#: A connection without a call for this long is closed; a client uses none that is half as idle.
IDLE_S: Final = 60.0
#: Time for one piece of an answer: a caller that reads nothing must not keep its thread.
_ANSWER_S: Final = 60.0
#: A caller is asked for signs of life after so many seconds of silence, so often, so many times.
_SIGNS: Final = {"silent_s": 30, "again_s": 10, "times": 2}
#: Running calls get this long when the endpoint closes.
_GRACE_S: Final = 60.0


class TcpService:
    """Listens for plain connections, and answers their calls."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        exchange: Exchange,
        greet: Callable[[dict[str, str]], object],
        certificate: Certificate | None,
        silent_s: float,
    ) -> None:
        """Listen.

        Args:
            host: where the Flight endpoint listens.
            port: 0 chooses a free port.
            exchange: yields the answers to a call, or raises its refusal.
            greet: raises the refusal of the headers of a connection.
            certificate: encrypts connections.
            silent_s: time for a greeting; a body is refused if nothing arrives for this long.

        Raises:
            RequestError: the port is in use.
        """
        self._exchange = exchange
        self._greet = greet
        self._silent_s = silent_s
        self._encryption: ssl.SSLContext | None = None
        if certificate is not None:
            self._encryption = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._encryption.load_cert_chain(certificate.path, certificate.key_path)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        #: Open connections; True while a call is under way.
        self._open: dict[Stream, bool] = {}
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        try:
            self._listener = socket.create_server(
                (host, port), family=family, backlog=128, dualstack_ipv6=both
            )
        except OSError as error:
            raise errors.RequestError(
                f"The broker cannot listen for plain connections at {host}:{port}: "
                f"{os.strerror(error.errno or 0)}{holder_of(port)}.",
                remedy="Choose another tcp_port.",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="rmq-tcp", daemon=True).start()

    def announcement(self) -> bytes:
        """Return the answer to ``PORT_ACTION``."""
        return LENGTH.pack(self.port) + self._key

    def stop(self) -> None:
        """Stop listening, and end connections without a call."""
        with self._lock:
            self._closing = True
            idle = [stream for stream, is_busy in self._open.items() if not is_busy]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for stream in idle:
            stream.end()

    def wait(self) -> None:
        """Wait for running calls; end those that take too long."""
        with self._ended:
            self._ended.wait_for(lambda: not self._open, _GRACE_S)
            late = list(self._open)
        for stream in late:
            stream.end()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if not self._closing:  # no descriptors left, for example
                    log.warning("a plain connection was not accepted: %s", error)
                    with self._ended:
                        self._ended.wait_for(lambda: self._closing, 1.0)
                continue
            try:
                self._begin(connected, _peer(address))
            except (OSError, RuntimeError) as error:
                log.warning("no thread for a plain connection: %s", error)
                connected.close()

    def _begin(self, connected: socket.socket, peer: str) -> None:
        connected.settimeout(self._silent_s)
        stream = Stream(connected)
        with self._lock:
            if self._closing or len(self._open) >= CONNECTIONS:
                stream.close()
                return
            self._open[stream] = False
        try:
            threading.Thread(
                target=self._serve, args=(stream, peer), name="rmq-tcp-call", daemon=True
            ).start()
        except RuntimeError:
            self._forget(stream)
            raise

    def _serve(self, stream: Stream, peer: str) -> None:
        """Serve one connection until it ends."""
        try:
            stream.watch(**_SIGNS)
            if self._encryption is not None:
                stream.encrypt(self._encryption)
            headers = self._greeted(stream, peer)
            while headers is not None and self._called(stream, headers, peer=peer):
                continue
        except (EOFError, OSError, ssl.SSLError) as error:
            log.debug("a plain connection ended: %s", error)
        except Exception:
            log.exception("a plain connection failed")
        finally:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        stream.close()
        with self._ended:
            self._open.pop(stream, None)
            self._ended.notify_all()

    def _greeted(self, stream: Stream, peer: str) -> dict[str, str] | None:
        """Read the greeting and answer it; return its headers, None if they are refused."""
        until = Deadline(self._silent_s)
        half = KEY_BYTES // 2
        expected = MAGIC + self._key[:half]
        if not hmac.compare_digest(stream.read(len(expected), until=until), expected):
            log.warning("%s greets another broker, or is no client", peer)
            return None
        stream.write(self._key[half:])
        (size,) = LENGTH.unpack(stream.read(LENGTH.size, until=until))
        if size > HEADERS_BYTES:
            log.warning("%s sends headers of %s bytes", peer, size)
            return None
        try:
            headers = _headers(stream.read(size, until=until))
            self._greet(headers)
        except errors.RocketMQError as error:
            _write(stream, [wire.refusal(error)])
            return None
        _write(stream, [])
        return headers

    def _called(self, stream: Stream, headers: dict[str, str], *, peer: str) -> bool:
        """Answer the next call; return False if the connection must end."""
        stream.wait_at_most(IDLE_S)
        sizes = LENGTHS.unpack(stream.read(LENGTHS.size))
        if not self._set_busy(stream, busy=True):
            return False
        call = _Call(stream, headers, peer=peer, sizes=sizes, silent_s=self._silent_s)
        written = 0
        try:
            for piece in self._exchange(call):
                stream.wait_at_most(_ANSWER_S)
                stream.write(LENGTH.pack(len(piece)), piece, more=True)
                written += 1
            stream.write(END)
        except errors.RocketMQError as error:
            if written:  # the caller waits for the end, and does not get it
                return False
            _write(stream, [wire.refusal(error)])
        return call.skip_rest() and self._set_busy(stream, busy=False)

    def _set_busy(self, stream: Stream, *, busy: bool) -> bool:
        """Note whether a call is under way; return False once the endpoint closes."""
        with self._lock:
            self._open[stream] = busy
            return not self._closing


class _Call:
    """A call over a plain connection."""

    is_action: Final = False

    def __init__(
        self,
        stream: Stream,
        headers: dict[str, str],
        *,
        peer: str,
        sizes: tuple[int, int],
        silent_s: float,
    ) -> None:
        self.headers = headers
        self.peer = peer
        self.is_active = stream.is_open
        self._stream = stream
        self._silent_s = silent_s
        #: Bytes that the caller has still to send.
        self._command, self._body = sizes
        self.messages = self._commands()

    def _commands(self) -> Iterator[framing.Message]:
        """Yield the one message with the command.

        Raises:
            RequestError: it is too long, or its body is; or it does not come.
        """
        if self._command > COMMAND_BYTES or self._body > BODY_BYTES:
            raise errors.RequestError(
                f"The call has a command of {self._command} bytes and a body of {self._body}."
                f" The limits of plain connections are {COMMAND_BYTES} and {BODY_BYTES}.",
                remedy="Make this call through gRPC.",
            )
        try:
            command = self._stream.read(self._command, until=Deadline(self._silent_s))
        except (EOFError, OSError) as error:
            raise errors.RequestError(
                "The caller has gone before the call was complete."
            ) from error
        self._command = 0
        yield framing.Message(command, None)

    def read(self, timeout_s: float) -> framing.Message | None:
        """Return the next bytes of the body, or None at the end; raises TimeoutError."""
        if not self._body:
            return None
        self._stream.wait_at_most(timeout_s)
        try:
            data = self._stream.read_some(self._body)
        except EOFError:
            self._body = 0
            return None
        self._body -= len(data)
        return framing.Message(None, data)

    def skip_rest(self) -> bool:
        """Read what a refused caller still sends; return False if the connection must end."""
        if self._command > COMMAND_BYTES or self._body > BODY_BYTES:
            return False
        until = Deadline(self._silent_s)
        left = self._command + self._body
        while left and not until.is_over:
            self._stream.wait_at_most(self._silent_s)
            left -= len(self._stream.read_some(left))
        is_usable = not left and not self._command
        self._command = self._body = 0
        return is_usable


def _headers(said: bytes) -> dict[str, str]:
    """Decode the headers of a greeting.

    Raises:
        RequestError: they are no JSON object of texts.
    """
    try:
        found = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise errors.RequestError("The headers of the connection are not JSON.") from error
    if not isinstance(found, dict) or not all(
        isinstance(text, str) and text.isascii() for text in found.values()
    ):
        raise errors.RequestError("The headers of the connection are not ASCII texts by name.")
    return found


def _write(stream: Stream, answer: list[bytes]) -> None:
    """Write an answer of short pieces."""
    framed = [part for piece in answer for part in (LENGTH.pack(len(piece)), piece)]
    stream.write(*framed, END)


def _peer(address: tuple[str, int]) -> str:
    """Return an address as gRPC names it."""
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
