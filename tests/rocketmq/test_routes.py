"""Where a topic is: at the address the client came by, with queue 0, of one type."""

from collections.abc import Callable
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.conftest import Opened

Clients = Callable[..., Raw]


def endpoints(scheme: str, *hosts: str) -> Any:
    made = pb.Endpoints(scheme=getattr(pb.AddressScheme, scheme))
    for host in hosts:
        made.addresses.add(host=host, port=18081)
    return made


def route(client: Raw, topic: str, dialled: Any = None, namespace: str = "") -> Any:
    request = pb.QueryRouteRequest(topic=raw.resource(topic, namespace), endpoints=dialled)
    return client("QueryRoute", request)


def assignment(client: Raw, topic: str, group: str) -> Any:
    request = pb.QueryAssignmentRequest(
        topic=raw.resource(topic),
        group=raw.resource(group),
        endpoints=endpoints("IPv4", "127.0.0.1"),
    )
    return client("QueryAssignment", request)


def test_all_queues_are_on_broker_zero(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=3)

    answer = route(client(), "t", endpoints("IPv4", "10.0.0.7", "10.0.0.8"))

    assert raw.code(answer) == "OK"
    assert [queue.id for queue in answer.message_queues] == [0, 1, 2]
    for queue in answer.message_queues:
        assert queue.topic.name == "t"
        assert queue.permission == pb.Permission.READ_WRITE
        assert queue.broker.id == 0
        assert queue.broker.name
        # Through NAT or a proxy there is no other address that the client could reach.
        assert queue.broker.endpoints == endpoints("IPv4", "10.0.0.7", "10.0.0.8")


def test_of_a_domain_there_is_one_address(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=1)

    answer = route(client(), "t", endpoints("DOMAIN_NAME", "mq.example", "other.example"))

    assert answer.message_queues[0].broker.endpoints == endpoints("DOMAIN_NAME", "mq.example")


def test_a_client_that_does_not_say_is_told_where_the_endpoint_is(
    opened: Opened, client: Clients
) -> None:
    broker, endpoint, _ = opened
    broker.create_topic("t", queues=1)

    (address,) = route(client(), "t").message_queues[0].broker.endpoints.addresses

    assert f"{address.host}:{address.port}" == endpoint.address


@pytest.mark.parametrize(
    ("type", "names"),
    [
        ("normal", ["NORMAL"]),
        ("fifo", ["FIFO"]),
        ("delay", ["DELAY"]),
        ("transaction", ["TRANSACTION"]),
        ("priority", ["PRIORITY"]),
        ("lite", ["LITE"]),
        # Older clients refuse a route with types that they do not know.
        ("mixed", ["NORMAL", "FIFO", "DELAY", "TRANSACTION"]),
    ],
)
def test_a_topic_takes_its_type(
    broker: Broker, client: Clients, type: str, names: list[str]
) -> None:
    broker.create_topic("t", type=type, queues=1)

    (queue,) = route(client(), "t").message_queues

    assert [pb.MessageType.Name(each) for each in queue.accept_message_types] == names


def test_unknown_and_hidden_topics_have_no_route(client: Clients) -> None:
    one = client()

    unknown = route(one, "nowhere")
    assert raw.code(unknown) == "TOPIC_NOT_FOUND"
    assert unknown.status.message.startswith("There is no topic nowhere. ")
    said = "CODE: 17  DESC: No topic route info in name server for the topic: nowhere"
    assert said in unknown.status.message  # the Node client's own test searches for it
    assert raw.code(route(one, "")) == "ILLEGAL_TOPIC"
    assert raw.code(route(one, "SCHEDULE_TOPIC_XXXX")) == "ILLEGAL_TOPIC"


def test_dead_letters_have_a_route(broker: Broker, client: Clients) -> None:
    broker.create_group("g")
    broker.create_group("ns%g")

    assert raw.code(route(client(), "%DLQ%g")) == "OK"
    assert raw.code(route(client(namespace="ns"), "%DLQ%g")) == "OK"


def test_a_namespace_is_in_the_field_or_else_in_the_header(broker: Broker, client: Clients) -> None:
    broker.create_topic("one%t", queues=1)
    broker.create_topic("two%t", queues=2)

    assert raw.code(route(client(), "t")) == "TOPIC_NOT_FOUND"
    assert len(route(client(), "t", namespace="one").message_queues) == 1
    assert len(route(client(namespace="two"), "t").message_queues) == 2
    assert len(route(client(namespace="two"), "t", namespace="one").message_queues) == 1


def test_an_unordered_group_is_assigned_one_queue_for_all(broker: Broker, client: Clients) -> None:
    broker.create_topic("t", queues=4)

    answer = assignment(client(), "t", "g")

    (assigned,) = answer.assignments
    assert assigned.message_queue.id == -1
    assert assigned.message_queue.broker.endpoints == endpoints("IPv4", "127.0.0.1")


def test_an_ordered_group_is_assigned_each_queue(broker: Broker, client: Clients) -> None:
    broker.create_topic("f", type="fifo", queues=4)

    answer = assignment(client(), "f", "g")

    assert [each.message_queue.id for each in answer.assignments] == [0, 1, 2, 3]
    assert broker.describe_group("g")["order"] == "message_group"
