"""A connection to the table door: finds the broker, makes calls, reconnects."""

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import flight

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.target import Place, Target

#: A call without an answer for this long, beyond its own waiting time, counts as lost.
ANSWER_S = 300.0
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 1.0

# Every client has connections of its own, and none waits for the backoff of another: a broker that
# comes back is found at once.
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class LostConnectionError(Exception):
    """The call was sent, or not, and has no answer."""


class Connection:
    """Calls verbs on a broker that may go away and come back; for any number of threads."""

    def __init__(self, target: Target, *, retry_s: float) -> None:
        self.target = target
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._token: str | None = None
        authorization = target.authorization()
        self._headers = [(b"authorization", authorization.encode())] if authorization else []
        self._stamp: object = None
        self._closed = threading.Event()
        self._running: set[flight.FlightStreamReader] = set()

    def call(self, verb_name: str, args: Mapping[str, Any]) -> Any:
        """Make a call; one that may be repeated is, for up to ``retry_s``.

        Raises:
            BrokerUnavailableError: no broker answers; a call that may not be repeated may have
                been carried out or not.
            RocketMQError: what the broker raised.
        """
        request = wire.request(verb_name, args)
        pieces = request.pieces()
        give_up_at = time.monotonic() + self._retry_s
        pause_s = _BACKOFF_S
        while True:
            try:
                return self._once(request, pieces)
            except (LostConnectionError, errors.BrokerUnavailableError) as error:
                late = time.monotonic() + pause_s > give_up_at
                if self._closed.is_set() or late or not request.verb.may_repeat(args):
                    raise _unavailable(error) from error
            # Spread, so that many clients of one broker do not come back in step.
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    def close(self) -> None:
        """Disconnect; calls without an answer are ended."""
        self._closed.set()
        with self._lock:
            # It is not closed: another thread may just begin a call, and would take the process
            # down with it. It goes with the last call, and disconnects then.
            self._client = None
            running = list(self._running)
        for reader in running:
            reader.cancel()

    def _once(self, request: wire.Request, pieces: list[wire.Piece]) -> Any:
        client, token = self._connected()
        options = flight.FlightCallOptions(
            timeout=ANSWER_S + _waits_s(request.args), headers=self._headers
        )
        command = request.command(token)
        try:
            metadata, answer = self._exchange(client, command, pieces=pieces, options=options)
        except (flight.FlightError, pa.ArrowException, OSError, StopIteration) as error:
            self._drop(client)
            raise LostConnectionError(str(error)) from error
        if metadata is not None:
            return wire.read_answer(metadata)
        return wire.unpack(answer)[wire.ANSWER]

    def _connected(self) -> tuple[flight.FlightClient, str | None]:
        """The open client; a new one when the home's broker is another than the last time."""
        with self._lock:
            if self._closed.is_set():
                raise errors.BrokerUnavailableError("This client is closed.")
            now = self.target.stamp()
            if self._client is None or now != self._stamp:
                place = self.target.locate()
                # The old one is not closed: other threads may wait on it; it goes with the last.
                self._client = _client(place)
                self._token, self._stamp = place.token, now
            return self._client, self._token

    def _exchange(
        self,
        client: flight.FlightClient,
        command: bytes,
        *,
        pieces: list[wire.Piece],
        options: flight.FlightCallOptions,
    ) -> tuple[bytes | None, list[wire.Piece]]:
        """One round trip: the answer's metadata, or the pieces of its table."""
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        with self._watched(reader), writer:
            if pieces:
                writer.begin(wire.PIECE, options=wire.WRITE)
            for name, piece in pieces:
                writer.write_with_metadata(piece, pa.py_buffer(name.encode()))
            writer.done_writing()
            chunk = reader.read_chunk()
            if chunk.data is None:
                return chunk.app_metadata.to_pybytes(), []
            first = (chunk.app_metadata.to_pybytes().decode(), chunk.data)
            return None, [first, *wire.read_pieces(reader)]

    @contextmanager
    def _watched(self, reader: flight.FlightStreamReader) -> Iterator[None]:
        """Let ``close`` cancel this call."""
        with self._lock:
            self._running.add(reader)
        try:
            if self._closed.is_set():
                reader.cancel()
            yield
        finally:
            with self._lock:
                self._running.discard(reader)

    def _drop(self, client: flight.FlightClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None


def _client(place: Place) -> flight.FlightClient:
    if not place.encrypted:
        return flight.FlightClient(f"grpc://{place.address}", generic_options=_CHANNEL)
    return flight.FlightClient(
        f"grpc+tls://{place.address}",
        generic_options=_CHANNEL,
        tls_root_certs=place.trusted,
        override_hostname=place.server_name,
    )


def _waits_s(args: Mapping[str, Any]) -> float:
    """How long a call waits by itself; what is no such time is for the broker to refuse."""
    wait_ms, timeout_s = args.get("wait_ms"), args.get("timeout_s")
    found = 0.0
    if isinstance(wait_ms, int | float) and 0 <= wait_ms <= limits.POLL_MAX_MS:
        found += wait_ms / 1000
    if isinstance(timeout_s, int | float) and 0 <= timeout_s <= limits.QUERY_TIMEOUT_MAX_S:
        found += timeout_s
    return found


def _unavailable(error: Exception) -> errors.BrokerUnavailableError:
    if isinstance(error, errors.BrokerUnavailableError):
        return error
    return errors.BrokerUnavailableError(f"The connection to the broker was lost: {error}.")
