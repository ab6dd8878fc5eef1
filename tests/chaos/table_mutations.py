"""Tables and requests with accidents, sent to both endpoints of a broker whose memory is bounded.

Payloads are remembered for two rounds, and requests to send over gRPC for the whole attack: some
are stored an hour later, when they are due. A stored body must be bytes of one of them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import random
import struct
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
import pyarrow as pa
from pyarrow import flight

from rmq_pipeline import errors
from rmq_pipeline.clock import SystemClock
from rmq_pipeline.flight import framing
from rmq_pipeline.flight.client import Client
from rmq_pipeline.rocketmq import protocol as pb
from tests.accidents import mutated
from tests.conformance import raw
from tests.conformance.hosted import TOPICS, Hosted, furnish
from tests.conformance.raw import Raw
from tests.conformance.requests import sound
from tests.damaged_tables import DAMAGES
from tests.flight.exchange import action, exchange, message
from tests.verb_tables import BESIDE, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance.brokers import Served

log = logging.getLogger(__name__)

MIB: Final = 1 << 20
TOPIC: Final = "t"
#: The user beside the attackers; no message of theirs may hold these bytes.
SECRET: Final = b"ONLY-THE-OTHER-USER-SENT-THIS"
#: Foreign bytes shorter than this are found in any payload by chance.
MEANINGFUL_BYTES: Final = 8
#: How long a sound call may take beside the accidents on a machine that stands still for seconds.
PATIENCE_S: Final = 120.0
#: Large payloads under way at a time, and how large.
LARGE: Final = 3
LARGE_MIB: Final = (30, 240)
#: A compressed column of this size takes some hundred KiB.
BOMB_BYTES: Final = 512 * MIB
#: Errors of Flight that say what was wrong with the call; others mean a broken connection.
_TOLD: Final = (
    flight.FlightUnauthenticatedError,
    flight.FlightUnauthorizedError,
    pa.ArrowInvalid,
    pa.ArrowNotImplementedError,
)

#: Statuses, and the error, that do not say what was wrong with the call.
_WITHOUT_A_CODE: Final = (
    "RocketMQError",
    "UNKNOWN",
    "INTERNAL",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
)


@dataclass
class Findings:
    """What calls were answered, and what broke a promise."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    stored: int = 0
    slowest_s: float = 0.0

    def report(self) -> str:
        """A line for each kind of answer."""
        lines = [
            f"{where}: {code} {count}" for (where, code), count in sorted(self.answers.items())
        ]
        return "\n".join([f"stored {self.stored}, slowest {self.slowest_s:.1f} s", *lines])


class Attack:
    """Attackers at both endpoints of a broker, a sound user beside them, and looks at the store."""

    def __init__(self, served: Served, *, seed: int, large: bool = True) -> None:
        """Create the topics and groups that the accidents speak about.

        Args:
            served: the broker.
            seed: of all chance.
            large: send payloads of up to 240 MiB, too.
        """
        self.findings = Findings()
        self._served = served
        self._seed = seed
        self._large = threading.Semaphore(LARGE if large else 0)
        #: Of this round, and of the one before it: no call takes two rounds.
        self._payloads: list[bytes] = []
        self._before: list[bytes] = []
        #: Of all rounds: scheduled messages are stored when they are due.
        self._sends: list[bytes] = []
        self._large_body = os.urandom(MIB)
        self._ended = threading.Event()
        self._read: dict[tuple[str, int], int] = {}
        self._client = Client(home=served.home, retry_s=PATIENCE_S)
        self._raw = Raw(served.grpc)
        self._flight = grpc.insecure_channel(served.flight)
        with contextlib.suppress(errors.ConflictError):
            for name in TOPICS:
                self._client.create_topic(name, type=name, queues=2)
            self._client.create_topic(TOPIC, queues=1)
            self._client.create_topic("half", type="transaction", queues=1)
            self._client.create_topic("secrets", queues=1)
            for group in ("g", "readers", "owner"):
                self._client.create_group(group)
            self._client.create_group("ordered", order="message_group")
        broker: Any = self._client
        endpoint: Any = None
        self._hosted = Hosted(broker, endpoint, SystemClock(), self._raw)
        furnish(self._hosted)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
        self._raw.close()
        self._flight.close()

    def run(self, seconds: float, *, attackers: int) -> None:
        """Attack for so long, with so many threads at each endpoint."""
        until_s = time.monotonic() + seconds
        kinds: list[Callable[[random.Random], None]] = [self._at_flight, self._at_grpc] * attackers
        threads = [
            threading.Thread(target=self._repeat, args=(kind, self._seed * 1000 + number))
            for number, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() < until_s and not self.findings.broken:
                self._use()
                self._look()
                self._ended.wait(1)
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        self._use()
        self._look()

    def _repeat(self, attack: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        while not self._ended.is_set():
            try:
                attack(chance)
            except Exception as error:
                if self._ended.is_set():
                    return
                self.findings.broken.append(f"{attack.__name__}: {type(error).__name__}: {error}")
                log.exception("seed %d", seed)
                return

    # ------------------------------------------------------------------------------- Flight

    def _at_flight(self, chance: random.Random) -> None:
        if chance.random() < 0.1:
            self._below_flight(chance)
            return
        (verb, name), (column, args) = chance.choice(list(TABLES.items()))
        if chance.random() < 0.5:
            verb, name, column, args = "send", "messages", "body", {"topic": TOPIC}
        stream, is_large = self._stream(column, name, chance)
        pieces = [(name, stream)]
        if verb == "settle" and name != "outcomes":
            pieces.append(("outcomes", _bytes_of(_NO_OUTCOMES)))
        if not is_large:
            self._payloads.append(stream)
        code, said = "OK", ""
        try:
            exchange(
                self._served.flight, {"verb": verb, "args": args}, pieces, timeout_s=PATIENCE_S
            )
        except (errors.RocketMQError, *_TOLD) as error:
            code, said = type(error).__name__, str(error)
        finally:
            if is_large:
                self._large.release()
        self.findings.answers["flight", code] += 1
        if code == errors.RocketMQError.__name__:
            self.findings.broken.append(f"{verb} of {stream[:9000].hex()}: {said}")

    def _below_flight(self, chance: random.Random) -> None:
        """Send Flight's own messages with accidents."""
        stream = _bytes_of(pa.table({"body": pa.array([chance.randbytes(40)], pa.binary())}))
        args = {"topic": TOPIC}
        said = {"verb": "send", "args": args, "parts": [["messages", len(stream)]]}
        command = json.dumps(said).encode()
        if chance.random() < 0.5:
            body = framing.action(command, [("messages", pa.py_buffer(stream))])
            method, messages = "DoAction", [action(body)]
        else:
            method, messages = "DoExchange", [message(command), framing.write_message(stream)]
        data = [mutated(one, chance) for one in messages]
        self._payloads.extend(data)
        call = self._flight.stream_stream(f"/arrow.flight.protocol.FlightService/{method}")
        how = {"compression": grpc.Compression.Gzip} if chance.random() < 0.1 else {}
        code = "answered"
        try:
            if b'"RocketMQError"' in b"".join(call(iter(data), timeout=PATIENCE_S, **how)):
                code = "RocketMQError"
        except grpc.RpcError as error:
            code = error.code().name
        self.findings.answers["Flight's messages", code] += 1
        if code in _WITHOUT_A_CODE:
            self.findings.broken.append(f"{method} of {[one.hex() for one in data]}: {code}")

    def _stream(self, column: str, table: str, chance: random.Random) -> tuple[bytes, bool]:
        others = BESIDE.get(table, {})
        kind = chance.randrange(10)
        if kind < 2:
            return chance.choice(list(DAMAGES.values())).stream(column, **others), False
        if kind == 2 and chance.random() < 0.1 and self._large.acquire(blocking=False):
            size = chance.randrange(*LARGE_MIB) * MIB
            bodies = pa.array([self._large_body] * (size // MIB), pa.binary())
            found = bytearray(_bytes_of(pa.table({column: bodies})))
            # Its offsets are in front, its bodies behind; mostly it is refused.
            if chance.random() < 0.9:
                struct.pack_into("<i", found, found.index(struct.pack("<2i", 0, MIB)) + 8, -1)
            return bytes(found), True
        bodies = _column(chance)
        given = pa.table({column: bodies, **{n: v[:1] * len(bodies) for n, v in others.items()}})
        if kind == 3:
            return _bytes_of(given, compression=chance.choice(("lz4", "zstd"))), False
        if kind == 4 and chance.random() < 0.02:
            bomb = pa.table({column: pa.array([bytes(BOMB_BYTES)], pa.binary())})
            return _bytes_of(bomb, compression="zstd"), False
        stream = _bytes_of(given)
        if kind == 5:
            return stream, False
        if kind in (6, 7):
            return _with_a_number(stream, chance), False
        return mutated(stream, chance), False

    # --------------------------------------------------------------------------------- gRPC

    def _at_grpc(self, chance: random.Random) -> None:
        rpc, request = chance.choice(list(sound(self._hosted, chance).items()))
        if rpc == "SendMessage":
            for message in request.messages:
                message.system_properties.message_id = raw.message_id()
                message.body = chance.randbytes(40)
                if chance.random() < 0.2:
                    self._sends.append(bytes(message.body))
                    message.body = gzip.compress(message.body)
                    message.system_properties.body_encoding = 2
            if chance.random() < 0.01:
                request.messages[0].body = _BOMB
                request.messages[0].system_properties.body_encoding = 2
        data = request.SerializeToString()
        data = mutated(data, chance)
        (self._sends if rpc == "SendMessage" else self._payloads).append(data)
        streamed = rpc in ("ReceiveMessage", "PullMessage")
        channel = self._raw.channel
        make: Callable[..., Any] = channel.unary_stream if streamed else channel.unary_unary
        decoded = getattr(pb, f"{rpc}Response").FromString
        method = make(f"/{pb.SERVICE}/{rpc}", response_deserializer=decoded)
        how: dict[str, Any] = {"metadata": self._raw.metadata, "timeout": PATIENCE_S}
        if chance.random() < 0.1:
            how["compression"] = grpc.Compression.Gzip
        answer = method(data, **how)  # A grpc.RpcError is no answer, and breaks the promise.
        code = raw.code(list(answer) if streamed else answer)
        self.findings.answers["grpc", code] += 1
        if code in ("NONE", "CODE_UNSPECIFIED", "INTERNAL_SERVER_ERROR"):
            self.findings.broken.append(f"{rpc} of {data[:4000].hex()}: {code}")

    # ---------------------------------------------------------------------------- the others

    def _use(self) -> None:
        """Send, receive and acknowledge as a user does who is not told of all this."""
        began = time.monotonic()
        self._client.send("secrets", pa.table({"body": [SECRET + os.urandom(20)] * 5}))
        got = self._client.receive("owner", "secrets", limit=100)
        assert all(body.startswith(SECRET) for body in got["body"].to_pylist())
        self._client.ack(got.select(["receipt_handle"]))
        self.findings.slowest_s = max(self.findings.slowest_s, time.monotonic() - began)
        exit_code = self._served.process.poll()
        assert exit_code is None, f"the broker ended with {exit_code}"

    def _look(self) -> None:
        """Read all that was stored since the last look, and search the payloads for it."""
        rows = [
            (topic, *row)
            for topic, queues in {TOPIC: 1, **dict.fromkeys(TOPICS, 2)}.items()
            for queue in range(queues)
            for row in self._stored(topic, queue)
        ]
        # Payloads are noted before they are sent: taken after the reading, they cover all rows.
        now, self._payloads = self._payloads, []
        sent = b"\0".join([*self._before, *now, *self._sends, self._large_body])
        self._before = now
        for topic, offset, body in rows:
            self.findings.stored += 1
            if SECRET in body or (len(body) >= MEANINGFUL_BYTES and body not in sent):
                self.findings.broken.append(
                    f"{topic} {offset}: {len(body)} bytes nobody sent: {body[:60]!r}"
                )

    def _stored(self, topic: str, queue: int) -> Iterator[tuple[int, bytes]]:
        """Offsets and bodies since the last look."""
        while True:
            at = self._read.get((topic, queue), 0)
            found = self._client.read(topic, queue, offset=at, limit=64)
            if not found.num_rows:
                return
            found.validate(full=True)
            offsets = found["queue_offset"].to_pylist()
            yield from zip(offsets, found["body"].to_pylist(), strict=True)
            self._read[topic, queue] = offsets[-1] + 1


_NO_OUTCOMES: Final = pa.table(
    {"receipt_handle": pa.array([], pa.string()), "outcome": pa.array([], pa.string())}
)
_BOMB: Final = gzip.compress(bytes(64 * MIB))
#: Numbers that lengths, offsets and indices are not.
_WRONG: Final = (-1, -8, 1, 1 << 20, (1 << 31) - 1, -(1 << 31))


def _column(chance: random.Random) -> pa.Array:
    """Bodies in one of the types that Arrow has for bytes."""
    bodies: list[Any] = [chance.randbytes(chance.randrange(1, 60)) for _ in range(5)]
    if chance.random() < 0.1:
        bodies[0] = None
    texts = [None if body is None else body.hex() for body in bodies]
    kind = chance.randrange(9)
    if kind == 0:
        return pa.array(bodies, pa.binary()).dictionary_encode()
    if kind == 1:
        return pa.array([[text] for text in texts], pa.list_(pa.string()))
    if kind == 2:
        return pa.array([{"a": text} for text in texts])
    if kind == 3:
        ends = pa.array([2, 3, 5], pa.int32())
        return pa.RunEndEncodedArray.from_arrays(ends, pa.array(bodies[:3], pa.binary()))
    if kind < 6:
        of_type = pa.string() if kind == 4 else pa.string_view()
        return pa.array(texts, of_type)
    return pa.array(bodies, (pa.binary(), pa.large_binary(), pa.binary_view())[kind - 6])


def _bytes_of(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _with_a_number(stream: bytes, chance: random.Random) -> bytes:
    """Another number at one to three places where numbers of 4 bytes lie."""
    found = bytearray(stream)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(found) // 4 - 1) * 4
        (number,) = struct.unpack_from("<i", found, at)
        other = chance.choice((*_WRONG, number + 1, number - 1, number * 2))
        struct.pack_into("<i", found, at, max(-(1 << 31), min(other, (1 << 31) - 1)))
    return bytes(found)
