"""Who may not, and what is too much, is told so by every RPC, and has changed nothing."""

from __future__ import annotations

import hashlib
import hmac
import random
import threading
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from tests.conformance import raw
from tests.conformance.hosted import Hosted, furnish, hosting, settings
from tests.conformance.raw import Raw
from tests.conformance.requests import sound
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RPCS = (
    "QueryRoute",
    "SendMessage",
    "QueryAssignment",
    "ReceiveMessage",
    "AckMessage",
    "ChangeInvisibleDuration",
    "ForwardMessageToDeadLetterQueue",
    "EndTransaction",
    "RecallMessage",
    "SyncLiteSubscription",
    "PullMessage",
    "GetOffset",
    "UpdateOffset",
    "QueryOffset",
    "Heartbeat",
    "NotifyClientTermination",
)
SECRET = "secret-0123456789"


def signed(user: str, secret: str) -> dict[str, str]:
    """The metadata of a call, as the official clients make them."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    proof = hmac.new(secret.encode(), when.encode(), hashlib.sha1).hexdigest()
    return {
        "x_mq_date_time": when,
        "authorization": (
            f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={proof}"
        ),
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """An endpoint that asks who calls, over a broker with a user who may do nothing."""
    with hosting(tmp_path_factory.mktemp("refusals") / "home") as hosted:
        furnish(hosted)
        hosted.broker.create_user("nobody-yet", password=SECRET)
        hosted.broker.create_user("root", password=SECRET, type="super")
        hosted.endpoint.shutdown()
        hosted.endpoint = GrpcEndpoint(hosted.broker, access=hosted.broker.access)
        yield hosted
        hosted.endpoint.shutdown()


@pytest.fixture
def caller(guarded: Hosted) -> Iterator[Callable[..., Raw]]:
    """``caller(user, secret)``: a client that signs its calls; without a user one that does not."""
    with ExitStack() as stack:
        yield lambda *who: stack.enter_context(
            Raw(guarded.endpoint.address, **(signed(*who) if who else {}))
        )


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize("who", [(), ("nobody-yet", "wrong"), ("stranger", SECRET), ("", "")])
def test_an_unsigned_call_is_unauthorized(
    guarded: Hosted, caller: Callable[..., Raw], rpc: str, who: tuple[str, ...]
) -> None:
    before = guarded.settled()

    answer = caller(*who)(rpc, sound(guarded, random.Random(0))[rpc])

    assert raw.code(answer) == "UNAUTHORIZED"
    assert guarded.settled() == before


@pytest.mark.parametrize("rpc", RPCS)
def test_what_no_policy_allows_is_forbidden(
    guarded: Hosted, caller: Callable[..., Raw], rpc: str
) -> None:
    before = guarded.settled()

    answer = caller("nobody-yet", SECRET)(rpc, sound(guarded, random.Random(0))[rpc])

    assert raw.code(answer) == "FORBIDDEN"
    assert guarded.settled() == before


def test_settings_of_what_is_forbidden_end_the_stream(caller: Callable[..., Raw]) -> None:
    client = caller("nobody-yet", SECRET)
    stream = client.stub.Telemetry(
        iter([settings("PUSH_CONSUMER")]), metadata=client.metadata, timeout=10
    )

    with pytest.raises(grpc.RpcError):
        list(stream)


def test_a_super_user_may(caller: Callable[..., Raw]) -> None:
    answer = caller("root", SECRET)("SendMessage", raw.sends(raw.message("normal")))

    assert raw.code(answer) == "OK"


def test_more_receives_than_may_wait_are_too_many(tmp_path: Path) -> None:
    with hosting(tmp_path / "home", grpc_receives=1) as hosted:
        request = raw.receives("mixed", "readers", wait_ms=20_000)
        waiting = hosted.client.stub.ReceiveMessage(
            request, metadata=hosted.client.metadata, timeout=30
        )
        until(lambda: len(hosted.endpoint._service._context.bridge) == 1)

        answer = hosted.client("ReceiveMessage", request)

        assert raw.code(answer) == "TOO_MANY_REQUESTS"
        hosted.client("SendMessage", raw.sends(raw.message("mixed")))
        assert len(raw.received(waiting)) == 1


def _until(ended: threading.Event) -> Iterator[Any]:
    """The commands of a client that stays."""
    yield settings("PRODUCER")
    ended.wait(30)


def test_more_clients_than_may_connect_are_too_many(tmp_path: Path) -> None:
    with (
        hosting(tmp_path / "home", grpc_clients=1) as hosted,
        Raw(hosted.endpoint.address) as second,
    ):
        ended = threading.Event()
        first = hosted.client.stub.Telemetry(
            _until(ended), metadata=hosted.client.metadata, timeout=30
        )
        assert raw.code(next(first)) == "OK"

        refused = second.stub.Telemetry(
            iter([settings("PRODUCER")]), metadata=second.metadata, timeout=30
        )

        assert raw.code(next(refused)) == "TOO_MANY_REQUESTS"
        with pytest.raises(grpc.RpcError):
            next(refused)
        ended.set()


def test_an_endpoint_that_closes_says_so(tmp_path: Path) -> None:
    with hosting(tmp_path / "home") as hosted:
        hosted.endpoint.refuse()

        answer = hosted.client("QueryRoute", pb.QueryRouteRequest(topic=raw.resource("normal")))

        assert raw.code(answer) not in ("OK", "CODE_UNSPECIFIED")
