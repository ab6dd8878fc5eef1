"""A connection to NATS for threads: an event loop of its own, and a new client after each failure.

A request that got no answer may arrive later. So callers send only what the server refuses then.
Credentials and certificates come from the environment, by the names of NATS's own command line:
NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CREDS, NATS_NKEY, NATS_CA, NATS_CERT, NATS_KEY.
"""

import asyncio
import json
import os
import random
import ssl
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from typing_extensions import override

from rmq_pipeline.errors import LogStoreError
from rmq_pipeline.limits import MIB

#: Bytes per second that a slow connection is given, beyond the time limit of every request.
_SLOWEST: Final = 4 * MIB
#: A server that answers no ping for three times as long is left for another one.
_PING_S: Final = 1
#: Longest time in which a client sends what is left.
_CLOSING_S: Final = 1.0
#: Times that a task of the client is cancelled when the connection ends.
_CANCELS: Final = 10
#: What a file of credentials has; the client reads on for ever if one is missing.
_OF_CREDENTIALS: Final = (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")
NOT_JETSTREAM: Final = "Let no other program subscribe to subjects that begin with rmq_log or $JS."
#: Reasons of the server that another password or right removes.
_REFUSED: Final = ("authorization", "authentication", "permissions")


class _Client(Client):
    """A client that sends no credentials without TLS if it was told to use TLS.

    nats-py takes ``tls://`` for a hint, and believes a server that says it has no TLS.
    """

    @override
    def _connect_command(self) -> bytes:
        server = self._current_server
        needs_tls = "tls" in self.options or (server is not None and server.uri.scheme == "tls")
        if needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error(
                "the server requires no TLS, and the address begins tls://, or NATS_CA or"
                " NATS_CERT is set"
            )
        return super()._connect_command()


class NatsConnection:
    """A connection to one of several servers. Thread-safe; all methods raise LogStoreError."""

    def __init__(self, address: str, servers: list[str], *, timeout_s: float) -> None:
        """Prepare the connection; the first request connects.

        Args:
            address: without secrets, for people.
            timeout_s: longest time of a request, in addition to the time of large ones.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._servers = random.sample(servers, len(servers))
        self._client: Client | None = None
        self._max_payload = MIB
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rmq-log-nats", daemon=True)
        self._starting = threading.Lock()
        self._is_closed = False
        self._connecting = asyncio.Lock()
        #: Requests under way, and the client that each was sent by.
        self._asking: dict[asyncio.Task[Any], Client] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        #: What the client has last complained of.
        self._said = ""

    @property
    def max_payload(self) -> int:
        """Most bytes of a message, as the server that is connected says."""
        client = self._client
        if client is not None:
            self._max_payload = client.max_payload
        return self._max_payload

    def call(
        self, api: str, body: dict[str, Any], *, limit_s: float | None = None
    ) -> dict[str, Any]:
        """Call JetStream's API; return its answer, which may be an error."""
        return self.request(f"$JS.API.{api}", json.dumps(body).encode(), limit_s=limit_s)

    def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a message and return the answer of JetStream, which may be an error.

        Args:
            limit_s: time limit of the caller's, instead of the connection's.
        """
        limit_s = (limit_s or self.timeout_s) + len(data) / _SLOWEST
        with self._starting:
            if self._is_closed:
                raise LogStoreError(f"The connection to {self.address} is closed.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            asking = asyncio.run_coroutine_threadsafe(
                self._request(subject, data, headers=headers, limit_s=limit_s), self._loop
            )
        try:
            answer = json.loads(asking.result())
            if not isinstance(answer, dict):
                raise TypeError("no object")
        except CancelledError as error:
            raise LogStoreError(f"The connection to {self.address} was closed.") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise LogStoreError(
                f"JetStream did not answer, but something else at {self.address}: {error}.",
                remedy=NOT_JETSTREAM,
            ) from error
        return answer

    def _run(self) -> None:
        assert self._loop is not None, "the first request has made it"
        self._loop.run_forever()
        self._loop.close()

    async def _request(
        self, subject: str, data: bytes, *, headers: dict[str, str] | None, limit_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                client = await self._connected()
                asking = asyncio.ensure_future(
                    client.request(subject, data, timeout=limit_s, headers=headers)
                )
                self._asking[asking] = client
                try:
                    await asyncio.wait({asking})
                finally:
                    del self._asking[asking]
                    asking.cancel()
                if asking.cancelled():
                    raise self._away("the connection was lost")
                return bytes(asking.result().data)
        except nats.errors.NoRespondersError as error:
            raise LogStoreError(
                f"No server answers for the stream in {self.address}.",
                remedy="Enable JetStream for the account; wait until a majority of the stream's"
                " servers runs.",
            ) from error
        except TimeoutError as error:
            if limit_s >= self.timeout_s:
                self._leave()
            raise self._away(self._said or "it does not answer in time") from error
        except LogStoreError:
            raise
        except Exception as error:  # nats-py has errors of its own, and many others
            raise self._away(error) from error

    async def _connected(self) -> Client:
        """Return a client that is connected; try each server once, the last one that failed last.

        The client's own attempts leave sockets open, and send what nobody waits for any more.
        """
        async with self._connecting:
            for _ in self._servers:
                if self._client is not None and not self._client.is_closed:
                    break
                self._client = None
                client, self._said = _Client(), ""
                how = self._how(client)
                self._servers.append(self._servers.pop(0))
                try:
                    await client.connect(self._servers[-1:], **how)
                except asyncio.CancelledError:
                    await _closed(client)
                    raise
                except Exception as error:  # noqa: BLE001 also of nkeys, and of what a file has
                    no_server = isinstance(error, nats.errors.NoServersError)
                    said = self._said if no_server else _text(error)
                    await _closed(client)
                    self._said = said
                else:
                    self._client = client
            if self._client is None:
                raise nats.errors.Error(self._said)
            return self._client

    def _leave(self) -> None:
        """Let the next request connect again: this server may hang, or be cut off from others."""
        client, self._client = self._client, None
        if client is not None:
            leaving = asyncio.create_task(_closed(client))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    def _how(self, client: Client) -> dict[str, Any]:
        """Return the options of a client."""

        async def lose() -> None:  # the answers were for a connection that is lost
            for task in [task for task, by in self._asking.items() if by is client]:
                task.cancel()

        found = {
            "name": "rmq_pipeline commit log",
            "error_cb": self._note,
            "disconnected_cb": lose,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "connect_timeout": self.timeout_s,
            "ping_interval": _PING_S,
            "user": os.environ.get("NATS_USER") or None,
            "password": os.environ.get("NATS_PASSWORD") or None,
            "token": os.environ.get("NATS_TOKEN") or None,
            "user_credentials": _path("NATS_CREDS", has=_OF_CREDENTIALS),
            "nkeys_seed": _path("NATS_NKEY"),
        }
        ca, certificate = _path("NATS_CA"), _path("NATS_CERT")
        if ca or certificate or self._servers[0].startswith("tls://"):
            context = ssl.create_default_context(cafile=ca)
            if certificate:
                context.load_cert_chain(certificate, _path("NATS_KEY"))
            found["tls"] = context
        return found

    async def _note(self, error: Exception) -> None:
        self._said = _text(error)

    def _away(self, why: object) -> LogStoreError:
        said = _text(why).removeprefix("nats: ").rstrip(".")
        if any(word in said.lower() for word in _REFUSED):
            return LogStoreError(
                f"{self.address} refuses the credentials, or a right of them: {said}.",
                remedy="Set NATS_USER and NATS_PASSWORD, NATS_TOKEN, NATS_CREDS or NATS_NKEY of a"
                " user with the rights that docs/replication.md lists.",
            )
        return LogStoreError(f"The commit log in {self.address} cannot be reached: {said}.")

    def close(self) -> None:
        """End the connection and its thread. Idempotent."""
        with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _end(self) -> None:
        if self._client is not None:
            await _closed(self._client)
        for _ in range(_CANCELS):  # the client swallows some
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                for each in left:
                    each.cancel()
                await asyncio.wait(left, timeout=_CLOSING_S / _CANCELS)


async def _closed(client: Client) -> None:
    """Close a client; what it has not sent may be lost."""
    with suppress(Exception):  # it fails in several ways after a lost connection
        async with asyncio.timeout(_CLOSING_S):
            await client.close()


def _path(variable: str, *, has: tuple[bytes, ...] = ()) -> str | None:
    """Return the path in a variable of the environment, if its file can be read.

    The variable may have the secret itself by mistake, so no error shows it.

    Args:
        has: what is in the file.
    """
    path = os.environ.get(variable) or None
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise nats.errors.Error(f"the file that {variable} names cannot be read: {said}") from None
    if not all(each in content for each in has):
        raise nats.errors.Error(f"the file of {variable} has no JWT or no seed of a user")
    return path


def _text(error: object) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
