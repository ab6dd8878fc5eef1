"""Users at the endpoint: whose a client is, and what they are shown and may end."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from rmq_pipeline.access import credentials
from rmq_pipeline.access.policy import Policy
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.clients import LIVE_MS
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.talking import Talk, producer
from tests.waiting import until

PASSWORD = "password-of-everybody"
FIRST_MS = 6_000
#: ``sign_in("ann", client_id="c")``.
SignIn = Callable[..., Raw]


@pytest.fixture(autouse=True)
def _users(broker: Broker) -> None:
    for name in ("ann", "bob"):
        broker.create_user(name, password=PASSWORD)
    broker.create_topic("tx", type="transaction")
    broker.create_topic("other", type="transaction")
    allow(broker, "ann", "topic:tx", "pub")
    allow(broker, "bob", "topic:other", "pub")


@pytest.fixture
def sign_in(broker: Broker) -> Iterator[SignIn]:
    endpoint = GrpcEndpoint(broker, access=broker.access)
    with contextlib.ExitStack() as stack:
        stack.callback(endpoint.shutdown)

        def connect(user: str, client_id: str = "") -> Raw:
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            proof = credentials.sign(PASSWORD, now).hex()
            signed = f"{credentials.ALGORITHM} Credential={user}, Signature={proof}"
            metadata = {"x_mq_date_time": now, "authorization": signed}
            return stack.enter_context(Raw(endpoint.address, client_id=client_id, **metadata))

        yield connect


def allow(broker: Broker, user: str, resource: str, *actions: str) -> None:
    policy = Policy.make(user, resource=resource, effect="allow", actions=actions)
    broker.access.put_policy(policy)


def begin(client: Raw, topic: str) -> str:
    answer = client("SendMessage", raw.sends(raw.message(topic, kind="TRANSACTION")))
    assert raw.code(answer) == "OK"
    transaction_id: str = answer.entries[0].transaction_id
    return transaction_id


def asked(talk: Talk) -> int:
    questions = (heard.WhichOneof("command") for heard in list(talk.heard))
    return list(questions).count("recover_orphaned_transaction_command")


def test_no_user_takes_the_client_id_of_another_user(sign_in: SignIn, clock: ManualClock) -> None:
    with producer(sign_in("ann", "shared"), "tx"), Talk(sign_in("bob", "shared")) as theirs:
        thief = sign_in("bob", "shared")
        for rpc in ("Heartbeat", "NotifyClientTermination"):
            assert raw.code(thief(rpc, getattr(pb, f"{rpc}Request")())) == "FORBIDDEN"
        assert theirs.over.wait(60)
    clock.advance(LIVE_MS)

    assert raw.code(thief("Heartbeat", pb.HeartbeatRequest())) == "OK"
    assert raw.code(sign_in("ann", "shared")("Heartbeat", pb.HeartbeatRequest())) == "FORBIDDEN"


def test_half_messages_are_not_shown_to_who_may_send_no_more(
    broker: Broker, sign_in: SignIn, clock: ManualClock
) -> None:
    allow(broker, "bob", "topic:tx", "pub")
    with producer(sign_in("bob"), "tx") as locked_out, producer(sign_in("ann"), "tx") as still:
        for _ in range(4):
            begin(sign_in("ann"), "tx")
        broker.delete_policy("bob", resource="topic:tx")

        clock.advance(FIRST_MS)
        broker.check_transactions()
        until(lambda: asked(still) == 4)

        assert asked(locked_out) == 0


def test_a_transaction_is_ended_by_who_may_send_to_its_topic(
    broker: Broker, sign_in: SignIn
) -> None:
    """Another endpoint lets producer groups have the name of any topic."""
    message = pa.table({"body": [b"half"]})
    half = broker.send_half("tx", message, producer_group="other")
    transaction_id = half.column("transaction_id")[0].as_py()

    ending = raw.ends("other", transaction_id, resolution="COMMIT")

    assert raw.code(sign_in("bob")("EndTransaction", ending)) == "BAD_REQUEST"
    assert broker.read("tx", 0, offset=0, limit=1).num_rows == 0


def test_what_has_no_name_is_no_group_of_a_namespace(broker: Broker, sign_in: SignIn) -> None:
    broker.create_topic("n%t")
    allow(broker, "bob", "topic:n%t", "sub")
    request = raw.receives("t", "")
    request.message_queue.topic.resource_namespace = "n"
    request.group.resource_namespace = "n"

    for absent in (False, True):
        if absent:
            request.ClearField("group")
            request.message_queue.topic.name = "n%t"
            request.message_queue.topic.resource_namespace = ""
        frames = sign_in("bob")("ReceiveMessage", request)

        assert raw.code(frames) == "ILLEGAL_CONSUMER_GROUP"
    assert "n%" not in [row["name"] for row in broker.list_groups().to_pylist()]
