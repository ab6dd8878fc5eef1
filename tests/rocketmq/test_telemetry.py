"""Settings are settled, kept, and sent again; a stream may be lost and opened again."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq import clients
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.conftest import Open, Opened
from tests.rocketmq.talking import Talk, producer, publishing, subscribing
from tests.waiting import until

Clients = Callable[..., Raw]


def test_a_producer_is_told_what_it_may_send(client: Clients) -> None:
    with Talk(client()) as talk:
        settings = talk.settle(publishing("t"))

    assert settings.publishing.max_body_size == limits.BODY_BYTES
    assert settings.publishing.validate_message_type
    assert [topic.name for topic in settings.publishing.topics] == ["t"]
    assert settings.backoff_policy.max_attempts == 3
    assert settings.backoff_policy.WhichOneof("strategy") == "exponential_backoff"
    # Python's reader of the stream dies of settings without.
    assert settings.metric.on
    assert settings.metric.endpoints.addresses[0].host == "broker.example"


@pytest.mark.parametrize(
    ("language", "strategy"),
    [
        ("PYTHON", "customized_backoff"),
        ("JAVA", "customized_backoff"),
        ("GOLANG", "customized_backoff"),
        ("NODE_JS", "exponential_backoff"),
    ],
)
def test_a_consumer_gets_the_backoff_that_its_language_knows(
    broker: Broker, client: Clients, language: str, strategy: str
) -> None:
    broker.create_topic("t")
    broker.create_group("g", backoff_ms=[1_500, 60_000], max_attempts=5)

    with Talk(client()) as talk:
        settings = talk.settle(subscribing("g", "t", language=language))

    policy = settings.backoff_policy
    assert policy.max_attempts == 5
    assert policy.WhichOneof("strategy") == strategy
    if strategy == "customized_backoff":
        assert [raw.ms(each) for each in policy.customized_backoff.next] == [1_500, 60_000]
    else:
        assert raw.ms(policy.exponential_backoff.initial) == 1_500
        assert raw.ms(policy.exponential_backoff.max) == 60_000


def test_an_exponential_group_tells_its_delays(broker: Broker, client: Clients) -> None:
    broker.create_topic("t")
    backoff = {"initial_ms": 1_000, "max_ms": 5_000, "multiplier": 2}
    broker.create_group("g", backoff=backoff, max_attempts=17)

    with Talk(client()) as talk:
        known = talk.settle(subscribing("g", "t")).backoff_policy.customized_backoff
        node = talk.settle(subscribing("g", "t", language="NODE_JS")).backoff_policy

    assert [raw.ms(each) for each in known.next] == [1_000, 2_000, 4_000, 5_000]
    assert raw.ms(node.exponential_backoff.initial) == 1_000
    assert node.exponential_backoff.multiplier == 2


def test_a_consumer_is_told_how_to_receive(broker: Broker, client: Clients) -> None:
    broker.create_topic("t")
    broker.create_topic("f", type="fifo")
    broker.create_topic("l", type="lite")
    broker.create_group("q", order="queue")

    with Talk(client()) as talk:
        plain = talk.settle(subscribing("g", "t"))
        ordered = talk.settle(subscribing("o", "t", "f"))
        by_queue = talk.settle(subscribing("q", "t"))
        lite = talk.settle(subscribing("li", "l", kind="LITE_PUSH_CONSUMER"))

    assert not plain.subscription.fifo
    assert plain.subscription.receive_batch_size == 32
    assert raw.ms(plain.subscription.long_polling_timeout) == 20_000
    assert ordered.subscription.fifo
    assert by_queue.subscription.fifo
    assert lite.subscription.lite_subscription_quota == limits.LITE_TOPICS_PER_CLIENT
    assert lite.subscription.max_lite_topic_size == 64


def test_groups_are_there_once_they_are_named(broker: Broker, client: Clients) -> None:
    broker.create_topic("t")
    broker.create_topic("f", type="fifo")

    with Talk(client()) as talk:
        talk.settle(subscribing("g", "t"))
        talk.settle(subscribing("o", "f"))

    orders = {group["name"]: group["order"] for group in broker.list_groups().to_pylist()}
    assert orders == {"g": "none", "o": "message_group"}


def test_groups_are_declared_where_an_operator_wants_that(open_endpoint: Open) -> None:
    broker, endpoint, _ = open_endpoint(grpc_create_groups=False)
    broker.create_topic("t")

    with Raw(endpoint.address) as one, Talk(one) as talk:
        talk.settle(subscribing("g", "t"))
        assigned = one(
            "QueryAssignment",
            pb.QueryAssignmentRequest(topic=raw.resource("t"), group=raw.resource("g")),
        )

    assert raw.code(assigned) == "CONSUMER_GROUP_NOT_FOUND"
    assert broker.list_groups().num_rows == 0


def test_a_group_with_other_settings_stays_as_it_is(broker: Broker, client: Clients) -> None:
    broker.create_topic("f", type="fifo")
    broker.create_group("g", max_attempts=3)

    with Talk(client()) as talk:
        settings = talk.settle(subscribing("g", "f"))

    assert not settings.subscription.fifo
    assert settings.backoff_policy.max_attempts == 3


def test_node_is_sent_its_settings_again(opened: Opened, client: Clients) -> None:
    _, endpoint, clock = opened
    with Talk(client()) as talk:
        talk.settle(publishing("t", language="NODE_JS"))
        assert len(talk.heard) == 1

        for wait_ms, times in ((199, 1), (1, 2), (799, 2), (1, 3), (2_000, 4), (60_000, 4)):
            clock.advance(wait_ms)
            _until_heard(talk, times)
            assert len(talk.heard) == times

    assert len({command.SerializeToString(deterministic=True) for command in talk.heard}) == 1
    assert len(endpoint._service._context.clients) == 0


def _until_heard(talk: Talk, times: int) -> None:
    until(lambda: len(talk.heard) >= times)


def test_others_are_sent_their_settings_once(client: Clients, clock: ManualClock) -> None:
    one = client()
    with Talk(one) as talk:
        talk.settle(publishing("t"))
        clock.advance(10_000)
        # What was due before it has been done when this is answered.
        one("Heartbeat", pb.HeartbeatRequest(client_type=pb.ClientType.PRODUCER))

        assert len(talk.heard) == 1


def test_settings_outlive_the_stream(opened: Opened, client: Clients) -> None:
    _, endpoint, _ = opened
    one = client(client_id="one")
    with Talk(one) as talk:
        talk.settle(publishing("t"))
    clients = endpoint._service._context.clients
    until(lambda: len(clients) == 0)

    known = clients.find("one")
    assert known is not None
    assert list(known.topics) == ["t"]
    assert known.language == "PYTHON"
    with Talk(one) as again:
        until(lambda: len(clients) == 1)
        assert again.settle(publishing("t", "u")).publishing.topics[1].name == "u"
        assert list(known.topics) == ["t", "u"]


def test_a_client_that_ends_is_forgotten(opened: Opened, client: Clients) -> None:
    _, endpoint, clock = opened
    clients = endpoint._service._context.clients
    one, two = client(client_id="one"), client(client_id="two")
    beat = pb.HeartbeatRequest(client_type=pb.ClientType.PRODUCER)
    gone: list[str] = []
    clients.on_gone(gone.append)
    for each in (one, two):
        assert raw.code(each("Heartbeat", beat)) == "OK"
    assert clients.is_live("one")

    assert raw.code(one("NotifyClientTermination", pb.NotifyClientTerminationRequest())) == "OK"

    assert gone == ["one"]
    assert not clients.is_live("one")
    assert clients.is_live("two")
    clock.advance(31_000)
    assert not clients.is_live("two")


@pytest.mark.parametrize(
    "settings",
    [
        pb.Settings(),
        pb.Settings(client_type=pb.ClientType.PRODUCER),
        pb.Settings(client_type=pb.ClientType.PUSH_CONSUMER, publishing=pb.Publishing()),
        pb.Settings(client_type=77, publishing=pb.Publishing()),
    ],
    ids=["nothing", "no publishing", "no subscription", "no type"],
)
def test_incomplete_settings_end_the_stream(client: Clients, settings: Any) -> None:
    with Talk(client()) as talk:
        talk.say(settings)
        assert talk.over.wait(60)

    (answer,) = talk.heard
    assert answer.status.code == pb.Code.UNRECOGNIZED_CLIENT_TYPE
    assert talk.error is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_goes_while_it_is_written_to_is_no_failure_of_ours(
    client: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: object) -> None:  # as grpc puts it when the connection is reset just then
        raise grpc.aio.InternalError('Failed "execute_batch"')

    monkeypatch.setattr(clients.Stream, "send", gone)
    with Talk(client()) as talk:
        talk.say(publishing("t"))
        assert talk.over.wait(60)

    assert not talk.heard
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_bad_group_ends_the_stream(client: Clients) -> None:
    with Talk(client()) as talk:
        talk.say(subscribing("no good", "t"))
        assert talk.over.wait(60)

    assert talk.heard[0].status.code == pb.Code.ILLEGAL_CONSUMER_GROUP


def test_answers_to_commands_that_were_not_sent_are_accepted(client: Clients) -> None:
    with Talk(client()) as talk:
        trace = pb.TelemetryCommand()
        trace.thread_stack_trace.thread_stack_trace = "main"
        talk._said.put(trace)
        assert talk.settle(publishing("t")).publishing.max_body_size


def test_more_clients_than_may_be_are_refused(open_endpoint: Open) -> None:
    _, endpoint, _ = open_endpoint(grpc_clients=1)
    with Raw(endpoint.address) as first, Raw(endpoint.address) as second, producer(first, "t"):
        with Talk(second) as refused:
            assert refused.over.wait(60)
        assert refused.heard[0].status.code == pb.Code.TOO_MANY_REQUESTS
    clients = endpoint._service._context.clients
    until(lambda: len(clients) == 0)
    with Raw(endpoint.address) as third, producer(third, "t") as talk:
        assert talk.heard


def test_a_closing_endpoint_ends_streams_at_once(opened: Opened, client: Clients) -> None:
    _, endpoint, _ = opened
    with producer(client(), "t") as talk:
        endpoint.shutdown()
        assert talk.over.wait(60)
    # No client is told to reconnect: Node drops its stream then, and dies of its end.
    command = "reconnect_endpoints_command"
    assert not [each for each in talk.heard if each.WhichOneof("command") == command]


def test_a_consumer_is_of_a_group(client: Clients) -> None:
    with Talk(client()) as talk:
        talk.say(subscribing("", "t"))

        assert talk.over.wait(60)
        assert talk.heard[-1].status.code == pb.Code.ILLEGAL_CONSUMER_GROUP


def test_clients_that_never_end_are_bounded(
    client: Clients, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_REMEMBERED", 3)

    def beat(one: Raw) -> str:
        return raw.code(one("Heartbeat", pb.HeartbeatRequest()))

    first = [client() for _ in range(3)]
    assert {beat(one) for one in first} == {"OK"}
    assert beat(client()) == "TOO_MANY_REQUESTS"
    assert beat(first[0]) == "OK"

    clock.advance(clients.LIVE_MS)
    assert beat(client()) == "OK"


def test_only_messages_make_a_request_large(broker: Broker, client: Clients) -> None:
    broker.create_topic("t")
    route = pb.QueryRouteRequest(topic=raw.resource("n" * (limits.GRPC_OTHER_BYTES + 1)))
    receive = raw.receives("t", "g", attempt_id="n" * (limits.GRPC_RECEIVE_BYTES + 1))

    assert raw.code(client()("QueryRoute", route)) == "BAD_REQUEST"
    assert raw.code(client()("ReceiveMessage", receive)) == "BAD_REQUEST"


def test_no_command_is_large(client: Clients) -> None:
    with Talk(client()) as talk:
        talk.say(publishing("n" * (limits.GRPC_OTHER_BYTES + 1)))

        assert talk.over.wait(60)
        assert talk.heard[-1].status.code == pb.Code.BAD_REQUEST
