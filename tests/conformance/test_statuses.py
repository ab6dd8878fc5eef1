"""Every RPC answers every mistake with the protocol's status, and has changed nothing then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.consuming_mistakes import CONSUMING
from tests.conformance.hosted import Hosted, furnish, hosting, settings
from tests.conformance.raw import Raw
from tests.conformance.sending_mistakes import SENDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.sending_mistakes import Request


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosting(tmp_path_factory.mktemp("statuses") / "home") as hosted:
        furnish(hosted)
        yield hosted


@pytest.mark.parametrize(
    ("rpc", "request_for", "status"),
    [
        pytest.param(rpc, request, status, id=f"{rpc}: {wrong}")
        for rpc, wrong, request, status in SENDING + CONSUMING
    ],
)
def test_a_mistake_has_its_status_and_changes_nothing(
    hosted: Hosted, rpc: str, request_for: Request, status: str
) -> None:
    before = hosted.settled()

    answer = hosted.client(rpc, request_for(hosted))

    assert raw.code(answer) == status
    assert hosted.settled() == before


def test_an_empty_receive_has_found_no_message(hosted: Hosted) -> None:
    answer = hosted.client("ReceiveMessage", raw.receives("priority", "readers"))

    assert raw.code(answer) == "MESSAGE_NOT_FOUND"
    assert raw.received(answer) == []


def test_each_entry_of_a_mixed_acknowledgement_has_its_own_status(hosted: Hosted) -> None:
    client = hosted.client
    client("SendMessage", raw.sends(raw.message("mixed")))
    (got,) = raw.received(client("ReceiveMessage", raw.receives("mixed", "readers", n=1)))
    own = got.system_properties

    entries = [("x", "no handle"), (own.message_id, own.receipt_handle)]
    answer = client("AckMessage", raw.acks("mixed", "readers", entries))

    assert raw.code(answer) == "MULTIPLE_RESULTS"
    assert [raw.code(entry) for entry in answer.entries] == ["INVALID_RECEIPT_HANDLE", "OK"]


def test_a_receipt_of_an_ended_lease_is_invalid(hosted: Hosted) -> None:
    client = hosted.client
    client("SendMessage", raw.sends(raw.message("mixed")))
    request = raw.receives("mixed", "late", n=1, invisible_ms=10_000)
    (got, *_) = raw.received(client("ReceiveMessage", request))
    handle = got.system_properties.receipt_handle
    hosted.advance(10_000)

    answers = [
        client("AckMessage", raw.acks("mixed", "late", [("x", handle)])),
        client(
            "ChangeInvisibleDuration",
            raw.changes("mixed", "late", handle=handle, invisible_ms=10_000),
        ),
    ]
    forwarded = client(
        "ForwardMessageToDeadLetterQueue", raw.buries("mixed", "late", handle=handle)
    )

    assert {raw.code(answer) for answer in answers} == {"INVALID_RECEIPT_HANDLE"}
    # Clients ask until they are told that it is done, and consume nothing else before.
    assert raw.code(forwarded) == "OK"


def test_who_gives_a_message_up_goes_on_with_those_behind_it(hosted: Hosted) -> None:
    client = hosted.client
    messages = [raw.message("fifo", b"%d" % i, kind="FIFO", message_group="g") for i in range(3)]
    client("SendMessage", raw.sends(*messages))
    got = raw.received(client("ReceiveMessage", raw.receives("fifo", "ordered")))
    first, *rest = [one.system_properties for one in got]

    buried = client(
        "ForwardMessageToDeadLetterQueue",
        raw.buries("fifo", "ordered", handle=first.receipt_handle),
    )
    entries = [(one.message_id, one.receipt_handle) for one in rest]
    acked = client("AckMessage", raw.acks("fifo", "ordered", entries))
    again = client("ReceiveMessage", raw.receives("fifo", "ordered"))

    assert len(got) == 3
    assert [raw.code(answer) for answer in (buried, acked)] == ["OK", "OK"]
    assert raw.code(again) == "MESSAGE_NOT_FOUND"
    assert hosted.broker.describe_topic("%DLQ%ordered")["offsets"][0]["max_offset"] == 1


def test_a_transaction_ends_once(hosted: Hosted) -> None:
    client = hosted.client
    half = client("SendMessage", raw.sends(raw.message("transaction", kind="TRANSACTION")))
    transaction_id = half.entries[0].transaction_id

    said = [
        raw.code(
            client("EndTransaction", raw.ends("transaction", transaction_id, resolution=resolution))
        )
        for resolution in ("COMMIT", "COMMIT", "ROLLBACK")
    ]

    assert said == ["OK", "OK", "INVALID_TRANSACTION_ID"]


def test_a_batch_is_stored_as_a_whole_or_not_at_all(hosted: Hosted) -> None:
    before = hosted.broker.describe_topic("normal")["offsets"]

    messages = [raw.message("normal") for _ in range(99)]
    refused = hosted.client("SendMessage", raw.sends(*messages, raw.message("normal", tag="|")))
    after = hosted.broker.describe_topic("normal")["offsets"]
    stored = hosted.client("SendMessage", raw.sends(*messages))

    assert raw.code(refused) == "ILLEGAL_MESSAGE_TAG"
    assert after == before
    assert [entry.message_id for entry in stored.entries] == [
        message.system_properties.message_id for message in messages
    ]


RPCS = {
    name.removesuffix("Request"): kind
    for name, kind in vars(pb).items()
    if name.endswith("Request")
}


@pytest.mark.parametrize("rpc", RPCS)
def test_a_call_says_who_makes_it(hosted: Hosted, rpc: str) -> None:
    with Raw(hosted.endpoint.address) as nobody:
        nobody.metadata = [("x-mq-language", "PYTHON")]

        answer = nobody(rpc, RPCS[rpc]())

    assert raw.code(answer) == "CLIENT_ID_REQUIRED"


@pytest.mark.parametrize("rpc", RPCS)
def test_an_empty_request_has_a_status(hosted: Hosted, rpc: str) -> None:
    before = hosted.settled()

    answer = hosted.client(rpc, RPCS[rpc]())

    assert raw.code(answer) not in ("NONE", "CODE_UNSPECIFIED", "INTERNAL_SERVER_ERROR")
    assert hosted.settled() == before


def test_settings_of_no_kind_of_client_end_the_stream(hosted: Hosted) -> None:
    stream = hosted.client.stub.Telemetry(
        iter([pb.TelemetryCommand(settings=pb.Settings())]),
        metadata=hosted.client.metadata,
        timeout=10,
    )

    answers = []
    with pytest.raises(grpc.RpcError) as ended:
        answers += stream

    assert [raw.code(answer) for answer in answers] == ["UNRECOGNIZED_CLIENT_TYPE"]
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", ["PRODUCER", "SIMPLE_CONSUMER", "PUSH_CONSUMER"])
def test_settings_are_answered(hosted: Hosted, kind: str) -> None:
    stream = hosted.client.stub.Telemetry(
        iter([settings(kind)]), metadata=hosted.client.metadata, timeout=10
    )

    first = next(stream)
    stream.cancel()

    assert raw.code(first) == "OK"
    assert first.settings.backoff_policy.max_attempts > 0
