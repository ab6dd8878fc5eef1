"""With a route table every broker answers with the queues of all brokers, in one order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.route_table import RouteFile
from rmq_pipeline.settings import Settings
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.rocketmq.talking import Talk, subscribing
from tests.rocketmq.test_routes import assignment, endpoints, route

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.rocketmq.conftest import Open, Opened

TABLE = """\
[brokers]
a = {grpc = "10.0.0.1:8081", grpc_tls = "10.0.0.1:8443"}
b = {grpc = "10.0.0.2:8081,10.0.0.3:8081", grpc_tls = "10.0.0.2:8443"}
c = {grpc = "c.example:8081", grpc_tls = "c.example:8443"}

[topics.t]
type = "fifo"
queues = {c = 1, b = 2, a = 2}

[topics.elsewhere]
type = "fifo"
queues = {c = 1}
"""
DIALLED = endpoints("IPv4", "127.0.0.1")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "routes.toml"
    path.write_text(TABLE, "utf-8")
    return path


@pytest.fixture
def opened(open_endpoint: Open, table: Path) -> Opened:
    return open_endpoint(route_table=str(table), broker_name="a")


def places(queues: Any) -> list[tuple[str, int]]:
    return [(queue.broker.name, queue.id) for queue in queues]


def address(queue: Any) -> list[str]:
    return [f"{each.host}:{each.port}" for each in queue.broker.endpoints.addresses]


@contextlib.contextmanager
def calling(opened: Opened) -> Iterator[Raw]:
    with Raw(opened[1].address) as client:
        yield client


def test_every_broker_answers_alike(opened: Opened, open_endpoint: Open, table: Path) -> None:
    other = open_endpoint("other", route_table=str(table), broker_name="b")
    answers = []

    for each in (opened, other):
        each[0].create_topic("t", type="fifo", queues=2)
        with calling(each) as client:
            answers.append(route(client, "t", DIALLED))

    assert answers[0] == answers[1]
    queues = answers[0].message_queues
    assert places(queues) == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1)]
    assert {queue.broker.id for queue in queues} == {0}
    assert [address(queue) for queue in queues[:3]] == [
        ["10.0.0.1:8081"],
        ["10.0.0.2:8081", "10.0.0.3:8081"],
        ["c.example:8081"],
    ]
    schemes = [queue.broker.endpoints.scheme for queue in queues[:3]]
    assert [pb.AddressScheme.Name(each) for each in schemes] == ["IPv4", "IPv4", "DOMAIN_NAME"]


def test_an_ordered_group_is_assigned_all_queues_of_all_brokers(
    opened: Opened, client: Any
) -> None:
    opened[0].create_topic("t", type="fifo", queues=2)

    answer = assignment(client(), "t", "g")

    queues = [each.message_queue for each in answer.assignments]
    assert places(queues) == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1)]


def test_an_unordered_group_is_assigned_one_queue_of_each_broker(
    opened: Opened, client: Any
) -> None:
    opened[0].create_topic("t", type="fifo", queues=2)
    opened[0].create_group("g", order="none")

    answer = assignment(client(), "t", "g")

    queues = [each.message_queue for each in answer.assignments]
    assert places(queues) == [("a", -1), ("b", -1), ("c", -1)]


def test_a_topic_of_other_brokers_has_a_route_here(client: Any) -> None:
    answer = route(client(), "elsewhere", DIALLED)

    assert places(answer.message_queues) == [("c", 0)]
    assert list(answer.message_queues[0].accept_message_types) == [pb.MessageType.FIFO]


def test_dead_letters_have_a_route_over_brokers_if_the_table_has_them(
    opened: Opened, client: Any, table: Path
) -> None:
    broker, _, clock = opened
    broker.create_group("g")
    one = client()
    assert places(route(one, "%DLQ%g").message_queues) == [("a", 0)]

    dead = '[topics."%DLQ%g"]\ntype = "normal"\nqueues = {a = 1, b = 1}\n'
    table.write_text(TABLE + dead, "utf-8")
    clock.advance(1000)
    assert places(route(one, "%DLQ%g").message_queues) == [("a", 0), ("b", 0)]


def test_a_topic_that_the_table_lacks_is_here_alone(opened: Opened, client: Any) -> None:
    opened[0].create_topic("own", queues=2)

    queues = route(client(), "own", DIALLED).message_queues

    assert places(queues) == [("a", 0), ("a", 1)]
    assert queues[0].broker.endpoints == DIALLED


def test_a_topic_that_was_not_created_here_has_no_route(opened: Opened, client: Any) -> None:
    answer = route(client(), "t")
    assert raw.code(answer) == "TOPIC_NOT_FOUND"
    assert "There is no topic t." in answer.status.message

    opened[0].create_topic("t", type="normal", queues=2)
    answer = route(client(), "t")
    assert raw.code(answer) == "ILLEGAL_TOPIC"
    assert "has type normal at this broker, fifo in its route table" in answer.status.message


def test_the_number_of_queues_is_that_of_the_table(opened: Opened, client: Any) -> None:
    opened[0].create_topic("t", type="fifo", queues=8)

    assert len(route(client(), "t").message_queues) == 5


def test_a_changed_file_is_answered_within_a_second(
    opened: Opened, client: Any, table: Path
) -> None:
    broker, _, clock = opened
    broker.create_topic("t", type="fifo", queues=2)
    one = client()
    assert len(route(one, "t").message_queues) == 5

    fresh = table.with_suffix(".new")
    fresh.write_text(TABLE.replace("b = 2", "b = 4"), "utf-8")
    fresh.rename(table)
    clock.advance(1000)
    assert len(route(one, "t").message_queues) == 7

    table.unlink()
    clock.advance(1000)
    assert len(route(one, "t").message_queues) == 7


def test_a_group_of_a_fifo_topic_elsewhere_is_created_ordered(opened: Opened, client: Any) -> None:
    with Talk(client()) as talk:
        settings = talk.settle(subscribing("g", "elsewhere"))

    assert settings.subscription.fifo
    assert opened[0].describe_group("g")["order"] == "message_group"


def over_tls(home: Path, table: str) -> Any:
    """Return the answer to a query of topic elsewhere over TLS."""
    path = home.with_suffix(".toml")
    path.write_text(table, "utf-8")
    settings = Settings(route_table=str(path), broker_name="a")
    with Broker.open(home, upkeep="none", settings=settings) as broker:
        made = Certificate.self_made(home)
        endpoint = GrpcEndpoint(
            broker,
            tls_address="127.0.0.1:0",
            certificates=(made.key, made.chain),
            routes=RouteFile.of(settings),
        )
        try:
            credentials = grpc.ssl_channel_credentials(made.chain)
            options = [("grpc.ssl_target_name_override", made.name)]
            target = str(endpoint.tls_address)
            with grpc.secure_channel(target, credentials, options) as channel:
                query = channel.unary_unary(f"/{pb.SERVICE}/QueryRoute")
                request = pb.QueryRouteRequest(topic=raw.resource("elsewhere"))
                found = query(request.SerializeToString(), metadata=[("x-mq-client-id", "one")])
                return pb.QueryRouteResponse.FromString(found)
        finally:
            endpoint.shutdown()


def test_a_client_with_tls_gets_addresses_with_tls(tmp_path: Path) -> None:
    (queue,) = over_tls(tmp_path / "one", TABLE).message_queues
    assert address(queue) == ["c.example:8443"]

    plain = "\n".join(
        line.partition(", grpc_tls")[0] + "}" * ("grpc_tls" in line) for line in TABLE.splitlines()
    )
    answer = over_tls(tmp_path / "two", plain)
    assert raw.code(answer) == "BAD_REQUEST"
    assert "Broker c has no grpc_tls in the route table." in answer.status.message
