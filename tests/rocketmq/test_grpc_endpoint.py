"""The endpoint itself: who calls, how much, what is no request, and how it closes."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from tests.conformance import http2, raw
from tests.conformance.raw import Raw
from tests.rocketmq.conftest import Open, Opened
from tests.waiting import until

Clients = Callable[..., Raw]
UNARY = [
    method.name
    for method in pb.SendMessageRequest.DESCRIPTOR.file.services_by_name["MessagingService"].methods
    if method.name not in ("ReceiveMessage", "PullMessage", "Telemetry")
]


def bytes_to(client: Raw, rpc: str, request: bytes) -> bytes:
    """What an RPC answers to these bytes."""
    call = client.channel.unary_unary(f"/{pb.SERVICE}/{rpc}")
    answer: bytes = call(request, metadata=client.metadata, timeout=20)
    return answer


@pytest.mark.parametrize("rpc", UNARY)
def test_what_is_no_request_is_answered(client: Clients, rpc: str) -> None:
    reply = getattr(pb, f"{rpc}Response")

    answer = reply.FromString(bytes_to(client(), rpc, b"\xff\xff\xff"))

    assert raw.code(answer) == "BAD_REQUEST"
    assert "is not a valid " in answer.status.message


@pytest.mark.parametrize("rpc", ["ReceiveMessage", "PullMessage"])
def test_what_is_no_receive_is_answered(client: Clients, rpc: str) -> None:
    one = client()
    call = one.channel.unary_stream(f"/{pb.SERVICE}/{rpc}")
    reply = getattr(pb, f"{rpc}Response")

    frames = [reply.FromString(each) for each in call(b"\xff", metadata=one.metadata, timeout=20)]

    assert raw.code(frames) == "BAD_REQUEST"
    assert len(frames) == 1


def test_a_path_that_is_no_text_does_not_shut_the_endpoint(opened: Opened, client: Clients) -> None:
    broker, endpoint, _ = opened
    broker.create_topic("t")
    one = client()
    assert raw.code(one("SendMessage", raw.sends(raw.message("t")))) == "OK"
    chance = random.Random(1)
    for _ in range(2):
        with http2.Speaker(endpoint.address, chance, patience_s=20) as speaker:
            said = speaker.call("/?", b"", headers={})
            speaker.say([http2.PREFACE, http2.frame(http2.SETTINGS), *said])
            speaker.hear(within_s=5)
            speaker.say(
                each.replace(b"/?", b"/\xb2") for each in speaker.call("/?", b"", headers={})
            )
            speaker.hear_out()

        # Whoever was connected is cut off, and connects again.
        until(lambda: _answers(one))
        with client() as other:
            until(lambda: _answers(other))


def _answers(client: Raw) -> bool:
    try:
        answer = client("SendMessage", raw.sends(raw.message("t")), timeout_s=1)
    except grpc.RpcError:
        return False
    return raw.code(answer) == "OK"


def test_a_call_without_a_message_does_no_harm(
    client: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    one = client()
    for rpc in ("QueryRoute", "ReceiveMessage"):
        call = one.channel.stream_stream(f"/{pb.SERVICE}/{rpc}")
        with pytest.raises(grpc.RpcError) as refusal:
            list(call(iter(()), metadata=one.metadata, timeout=0.5))
        # gRPC's server leaves it to the client's patience.
        codes = (grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert refusal.value.code() in codes

    assert raw.code(one("Heartbeat", pb.HeartbeatRequest())) == "OK"
    # It is nothing that an operator is to look into.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("client_id", ["", "  "])
def test_every_call_says_who_makes_it(opened: Opened, client_id: str) -> None:
    with Raw(opened[1].address) as nobody:
        nobody.metadata = [("x-mq-client-id", client_id)] if client_id else []
        for rpc in UNARY:
            answer = getattr(nobody.stub, rpc)(
                getattr(pb, f"{rpc}Request")(), metadata=nobody.metadata, timeout=20
            )
            assert raw.code(answer) == "CLIENT_ID_REQUIRED", rpc
        assert raw.code(nobody("ReceiveMessage", raw.receives("t", "g"))) == "CLIENT_ID_REQUIRED"


def test_more_receives_than_may_be_are_refused(open_endpoint: Open) -> None:
    broker, endpoint, clock = open_endpoint(grpc_receives=1)
    broker.create_topic("t")
    broker.create_group("g")
    polls = endpoint._service._context.bridge
    answers: list[object] = []
    with Raw(endpoint.address) as one:
        waits = threading.Thread(
            target=lambda: answers.append(
                one("ReceiveMessage", raw.receives("t", "g", wait_ms=10_000))
            )
        )
        waits.start()
        until(lambda: len(polls) == 1)

        refused = one("ReceiveMessage", raw.receives("t", "g"))

        assert raw.code(refused) == "TOO_MANY_REQUESTS"
        clock.advance(10_000)
        waits.join(20)
        assert raw.code(answers[0]) == "MESSAGE_NOT_FOUND"
        assert raw.code(one("ReceiveMessage", raw.receives("t", "g"))) == "MESSAGE_NOT_FOUND"


@contextlib.contextmanager
def held_up(broker: Broker) -> Iterator[None]:
    """Nothing is stored meanwhile, so that calls stay under way."""
    turns = broker.engine.writer._turns
    turns.take(bulk=False)
    try:
        yield
    finally:
        turns.decided()
        turns.written()


def test_more_calls_than_may_be_are_refused(open_endpoint: Open) -> None:
    broker, endpoint, _ = open_endpoint(grpc_calls=2)
    broker.create_topic("t")
    with Raw(endpoint.address) as one:
        request, how = raw.sends(raw.message("t")), {"metadata": one.metadata, "timeout": 20}
        with held_up(broker):
            under_way = [one.stub.SendMessage.future(request, **how) for _ in range(2)]
            until(lambda: endpoint._service._calls == 2)

            assert raw.code(one("SendMessage", request)) == "TOO_MANY_REQUESTS"
            assert raw.code(one("Heartbeat", pb.HeartbeatRequest())) == "TOO_MANY_REQUESTS"

        assert [raw.code(call.result()) for call in under_way] == ["OK", "OK"]
        assert raw.code(one("SendMessage", request)) == "OK"


def test_requests_that_hold_more_than_may_be_are_refused(open_endpoint: Open) -> None:
    broker, endpoint, _ = open_endpoint(grpc_request_bytes=1 << 20)
    broker.create_topic("t")
    large = raw.sends(raw.message("t", b"x" * (3 << 20)))  # one may be larger
    with Raw(endpoint.address) as one:
        how = {"metadata": one.metadata, "timeout": 20}
        with held_up(broker):
            under_way = [one.stub.SendMessage.future(large, **how)]
            until(lambda: endpoint._service._calls == 1)

            assert raw.code(one("SendMessage", large)) == "TOO_MANY_REQUESTS"
            # What is small may still come: acks are.
            small = raw.sends(raw.message("t"))
            under_way.append(one.stub.SendMessage.future(small, **how))
            until(lambda: endpoint._service._calls == 2)

        assert [raw.code(call.result()) for call in under_way] == ["OK", "OK"]
        assert raw.code(one("SendMessage", large)) == "OK"
        until(lambda: endpoint._service._bytes == 0)


def test_an_endpoint_that_refuses_says_so(opened: Opened, client: Clients) -> None:
    broker, endpoint, _ = opened
    broker.create_topic("t")
    one = client()
    assert raw.code(one("SendMessage", raw.sends(raw.message("t")))) == "OK"

    endpoint.refuse()

    answer = one("SendMessage", raw.sends(raw.message("t")))
    assert raw.code(answer) == "INTERNAL_SERVER_ERROR"
    assert "stopping" in answer.status.message


def test_a_closed_broker_ends_receives_that_wait(opened: Opened, client: Clients) -> None:
    broker, endpoint, _ = opened
    broker.create_topic("t")
    broker.create_group("g")
    one, answers = client(), list[object]()
    polls = endpoint._service._context.bridge
    waits = threading.Thread(
        target=lambda: answers.append(one("ReceiveMessage", raw.receives("t", "g", wait_ms=10_000)))
    )
    waits.start()
    until(lambda: len(polls) == 1)

    endpoint.refuse()
    broker.close()
    endpoint.shutdown()

    waits.join(20)
    assert raw.code(answers[0]) in ("MESSAGE_NOT_FOUND", "INTERNAL_SERVER_ERROR")


def test_two_endpoints_do_not_share_a_port(opened: Opened) -> None:
    broker, endpoint, _ = opened

    with pytest.raises(errors.RequestError, match="Cannot listen"):
        GrpcEndpoint(broker, endpoint.address)


def test_an_endpoint_needs_an_address(broker: Broker) -> None:
    with pytest.raises(errors.RequestError, match="not HOST:PORT"):
        GrpcEndpoint(broker, "8081")
    with pytest.raises(errors.RequestError, match="certificate"):
        GrpcEndpoint(broker, tls_address="127.0.0.1:0")


def test_a_client_that_pings_often_is_not_sent_away(opened: Opened) -> None:
    # C++ and Java ping without calls; a server as gRPC has it by default closes on the third.
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(opened[1].address, options=options) as channel:
        channel.subscribe(states.append, try_to_connect=True)
        grpc.channel_ready_future(channel).result(60)
        lost = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        with pytest.raises(AssertionError):
            until(lambda: lost in states or grpc.ChannelConnectivity.IDLE in states[1:], within_s=7)
