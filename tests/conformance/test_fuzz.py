"""The endpoint answers any bytes with a status, continues, and leases nothing to a gone client.

RMQ_FUZZ_SECONDS says for how long (`make chaos`: an hour), RMQ_FUZZ_SEED where it begins.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import grpc
import pytest

from rmq_pipeline.clock import SystemClock
from rmq_pipeline.rocketmq import protocol as pb
from tests.accidents import mutated
from tests.conformance import http2, raw
from tests.conformance.hosted import Hosted, furnish, hosting, settings
from tests.conformance.raw import Raw
from tests.conformance.requests import sound
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS: Final = float(os.environ.get("RMQ_FUZZ_SECONDS", "5"))
SEED: Final = int(os.environ.get("RMQ_FUZZ_SEED", "1"))
#: Calls under way at once, and how long any may take: long polls end before that.
AT_ONCE: Final = 48
PATIENCE_S: Final = 4.0
#: However long they take: so many rounds of calls, connections, and streams of commands meet what
#: is to be seen.
ROUNDS: Final = 20
CONNECTIONS: Final = 20
STREAMED: Final = 40
#: How long a call may take on a machine that stands still for seconds.
STALL_S: Final = 30.0
MODULE: Final = "rmq_pipeline.rocketmq.grpc_endpoint"
STREAMS: Final = ("ReceiveMessage", "PullMessage")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


@pytest.fixture
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    home = tmp_path_factory.mktemp("fuzz") / "home"
    with hosting(home, clock=SystemClock()) as hosted:
        furnish(hosted)
        for _ in range(20):
            hosted.client("SendMessage", raw.sends(raw.message("normal"), raw.message("normal")))
        yield hosted


class Fuzzer:
    """Calls with accidents, many at once; every answer is looked at."""

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted
        self.codes: Counter[tuple[str, str]] = Counter()
        self.delivered: set[str] = set()
        self._waiting: list[tuple[str, bytes, Any]] = []

    def call(self, rpc: str, data: bytes) -> None:
        self._waiting.append((rpc, data, self._begin(rpc, data)))
        if len(self._waiting) >= AT_ONCE:
            self._look(*self._waiting.pop(0))

    def drain(self) -> None:
        while self._waiting:
            self._look(*self._waiting.pop(0))

    def _begin(self, rpc: str, data: bytes, *, timeout_s: float = PATIENCE_S) -> Any:
        kind = self.hosted.client.channel
        make: Callable[..., Any] = kind.unary_stream if rpc in STREAMS else kind.unary_unary
        method = make(f"/{pb.SERVICE}/{rpc}", response_deserializer=lambda reply: reply)
        how = {"metadata": self.hosted.client.metadata, "timeout": timeout_s}
        return method(data, **how) if rpc in STREAMS else method.future(data, **how)

    def _replies(self, rpc: str, running: Any) -> list[Any]:
        kind = getattr(pb, f"{rpc}Response")
        replies: list[Any] = []
        try:
            came = running if rpc in STREAMS else [running.result()]
            replies.extend(kind.FromString(reply) for reply in came)
        finally:
            # Also of an answer that does not come to its end: what has come is leased to us.
            if rpc == "ReceiveMessage":
                self.delivered.update(m.system_properties.message_id for m in raw.received(replies))
        return replies

    def _look(self, rpc: str, data: bytes, running: Any) -> None:
        try:
            try:
                replies = self._replies(rpc, running)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                # Time to stand still in is no time for long polls: only who was late has it. What
                # hangs does so once more.
                replies = self._replies(rpc, self._begin(rpc, data, timeout_s=STALL_S))
        except grpc.RpcError as error:
            pytest.fail(f"{rpc} of {data.hex()}: {error}")
        status = raw.code(replies if rpc in STREAMS else replies[0])
        assert status not in ("NONE", "CODE_UNSPECIFIED", "INTERNAL_SERVER_ERROR"), (
            f"{rpc} of {data.hex()}: {replies[0]}"
        )
        self.codes[rpc, status] += 1


def leased(hosted: Hosted) -> set[str]:
    """The ids of messages that somebody is said to have."""
    now_ms = hosted.clock.now_ms()
    found = hosted.broker.sql(f"SELECT message_id FROM in_flight WHERE visible_at_ms > {now_ms}")
    return set(found["message_id"].to_pylist())


def leave(client: Raw, chance: random.Random) -> None:
    """Ask for messages, and go before they come."""
    request = raw.receives("normal", "readers", wait_ms=50, invisible_ms=None, auto_renew=True)
    running = client.stub.ReceiveMessage(request, metadata=client.metadata, timeout=STALL_S)
    if chance.random() < 0.5:
        next(iter(running), None)
    running.cancel()


def test_mutated_requests_have_a_status_and_leak_nothing(hosted: Hosted) -> None:
    chance = random.Random(SEED)
    fuzzer = Fuzzer(hosted)
    leaver = Raw(hosted.endpoint.address)
    fuzzer.delivered.add(hosted.delivered_id)
    until_s = time.monotonic() + SECONDS * 0.6
    rounds = 0

    while time.monotonic() < until_s or rounds < ROUNDS:
        rounds += 1
        for rpc, request in sound(hosted, chance).items():
            fuzzer.call(rpc, mutated(request.SerializeToString(), chance))
        leave(leaver, chance)
    fuzzer.drain()
    leaver("NotifyClientTermination", pb.NotifyClientTerminationRequest())

    called = {rpc for rpc, _ in fuzzer.codes}
    assert called == set(sound(hosted, chance))
    assert {code for _, code in fuzzer.codes} >= {"OK", "BAD_REQUEST", "ILLEGAL_TOPIC"}
    until(
        lambda: leased(hosted) <= fuzzer.delivered,
        what="leases of nobody to end",
    )
    until(lambda: not len(hosted.endpoint._service._context.bridge), what="polls to end")


def frames(speaker: http2.Speaker, hosted: Hosted, chance: random.Random) -> Iterator[bytes]:
    """Calls and what is said beside them, with few accidents: one is enough to end it all."""
    yield http2.PREFACE + http2.frame(http2.SETTINGS)
    headers = {**dict(hosted.client.metadata), "x-mq-client-id": f"frames-{chance.randrange(9)}"}
    for _ in range(chance.randrange(1, 12)):
        requests = {**sound(hosted, chance), "Telemetry": settings("PUSH_CONSUMER")}
        rpc, request = chance.choice(list(requests.items()))
        data = request.SerializeToString()
        for one in speaker.call(f"/{pb.SERVICE}/{rpc}", data, headers=headers):
            yield mutated(one, chance) if chance.random() < 0.02 else one
        if chance.random() < 0.3:
            yield speaker.aside()


def answers(hosted: Hosted) -> bool:
    """Whether the endpoint answers somebody who does nothing wrong."""
    request = pb.QueryRouteRequest(topic=raw.resource("normal"))
    try:
        return raw.code(hosted.client("QueryRoute", request, timeout_s=PATIENCE_S)) == "OK"
    except grpc.RpcError:
        return False


def test_damaged_frames_harm_no_other_client(
    hosted: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(SEED)
    service = hosted.endpoint._service
    until_s = time.monotonic() + SECONDS * 0.2
    said = whole = 0
    before = hosted.settled()

    # Also on a machine that stands still for so long, enough is said.
    while time.monotonic() < until_s or said < CONNECTIONS:
        try:
            speaker = http2.Speaker(hosted.endpoint.address, chance, patience_s=PATIENCE_S)
        except OSError:  # a path was no text: gRPC's server has ended, and the next one begins
            until(lambda: answers(hosted), what="the endpoint to open again")
            continue
        with speaker:
            listened = True
            for one in frames(speaker, hosted, chance):
                listened = listened and speaker.say([one])
                if chance.random() < 0.2:
                    speaker.hear()
            said, whole = said + 1, whole + listened
            for _ in range(chance.choice((0, 0, 1, 4))):
                speaker.hear(within_s=0.05)
            if chance.random() < 0.3:
                speaker.hear_out()
        if not said % 100:
            until(lambda: answers(hosted), what="an answer")

    until(lambda: answers(hosted), what="an answer")
    # Most are understood to their end, or nothing is tried here.
    assert whole > said / 4
    assert hosted.settled()[0] > before[0]
    until(lambda: not service._running, what="calls to end")
    assert service._bytes == service._calls == service._streams == 0
    until(lambda: not len(hosted.endpoint._service._context.clients), what="streams to end")
    # gRPC tells of headers in no encoding, and its server ends of a path in none; whatever else is
    # ours or the loop's was foreseen by nobody.
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    texts = [r.getMessage() for r in errors if not r.name.startswith(("grpc.", MODULE))]
    assert not [text for text in texts if "UnicodeDecodeError" not in text]


def test_telemetry_survives_what_is_no_command(hosted: Hosted) -> None:
    chance = random.Random(SEED)
    stream = hosted.client.channel.stream_stream(f"/{pb.SERVICE}/Telemetry")
    ended: Counter[Any] = Counter()
    until_s = time.monotonic() + SECONDS * 0.1

    while time.monotonic() < until_s or ended.total() < STREAMED:
        kind = chance.choice(("PRODUCER", "PUSH_CONSUMER", "LITE_SIMPLE_CONSUMER"))
        command = settings(kind).SerializeToString()
        commands = [mutated(command, chance) for _ in range(chance.randrange(1, 4))]
        call = stream(iter(commands), metadata=hosted.client.metadata, timeout=STALL_S)
        try:
            replies = [pb.TelemetryCommand.FromString(reply) for reply in call]
        except grpc.RpcError as error:
            ended[error.code()] += 1
        else:
            ended[grpc.StatusCode.OK] += 1
            assert all(raw.code(reply) == "OK" for reply in replies)

    assert set(ended) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    until(lambda: not len(hosted.endpoint._service._context.clients), what="streams to end")


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("x-mq-client-id", "x" * 4000)],
        [("x-mq-client-id", "x"), ("x-mq-namespace", "/%|" * 100)],
        [("x-mq-client-id", "x"), ("authorization", "MQv2-HMAC-SHA1 Credential=,,=")],
        [("x-mq-client-id", "x"), ("x-mq-client-id", "y"), ("x-mq-language-bin", b"\xff\0")],
        [("x-mq-client-id", "x"), ("x-mq-date-time", "no time"), ("x-mq-protocol", "v9")],
    ],
)
def test_odd_metadata_have_a_status(
    hosted: Hosted, metadata: list[tuple[str, str | bytes]]
) -> None:
    request = pb.QueryRouteRequest(topic=raw.resource("normal"))

    answer = hosted.client.stub.QueryRoute(request, metadata=metadata, timeout=STALL_S)

    codes = ("OK", "CLIENT_ID_REQUIRED", "TOPIC_NOT_FOUND", "ILLEGAL_TOPIC", "BAD_REQUEST")
    assert raw.code(answer) in codes


def test_the_port_survives_what_is_no_http(hosted: Hosted) -> None:
    chance = random.Random(SEED)
    host, _, port = hosted.endpoint.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    until_s = time.monotonic() + SECONDS * 0.1

    while time.monotonic() < until_s:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            start = chance.choice((b"", preface, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"))
            connection.sendall(start + chance.randbytes(chance.randrange(300)))

    answer = hosted.client("QueryRoute", pb.QueryRouteRequest(topic=raw.resource("normal")))
    assert raw.code(answer) == "OK"
