"""One component each: what it declares, what it refuses, and a consumer from send to sink."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import dagster as public
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.components.parts import ConsumerComponent, GroupComponent
from rmq_pipeline.orchestration.components.project import Part
from rmq_pipeline.orchestration.consumer import Declaration
from rmq_pipeline.orchestration.declarations import consumer_group, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.orchestration.components.conftest import (
    BILLING,
    BILLS,
    BROKER,
    ORDERS,
    Project,
    Refused,
)
from tests.orchestration.conftest import Send

COMPONENTS = [
    each
    for name in public.__all__
    if isinstance(each := getattr(public, name), type) and issubclass(each, dg.Component)
]


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


def consumer(attributes: str = "", *, without: str = "") -> str:
    """The consumer of orders with other attributes."""
    lines = BILLING.replace(without, "").rstrip() if without else BILLING.rstrip()
    return f"{lines}\n  {attributes}\n"


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_attribute_is_described(component: type[dg.Component]) -> None:
    model = component.get_model_cls()
    assert model is not None
    schema = model.model_json_schema()

    assert schema["properties"]
    lacking = [n for n, said in schema["properties"].items() if not said.get("description")]
    assert not lacking
    assert component.get_description()


def test_components_have_the_settings_of_python() -> None:
    """None that a decorator or a declaring call takes is missing."""

    def taken(call: Any) -> set[str]:
        return set(inspect.signature(call).parameters)

    parts = [each for each in COMPONENTS if issubclass(each, Part)]
    components = {each.__name__: set(each.model_fields) for each in parts}

    assert taken(topic) <= components["TopicComponent"]
    assert taken(consumer_group) <= components["GroupComponent"]
    assert taken(Declaration) <= components["ConsumerComponent"]


def test_settings_reach_the_broker(
    project: Project, client: Client, resource: BrokerResource, instance: dg.DagsterInstance
) -> None:
    project.write("broker", BROKER)
    attributes = "{name: audit, topic: orders, max_attempts: 3, backoff: exponential}"
    project.write(
        "orders",
        ORDERS.replace("queues: 2", "queues: 3, retention_ms: 86400000"),
        f"type: rmq_pipeline.dagster.GroupComponent\nattributes: {attributes}",
    )

    sensor = project.load().resolve_sensor_def(f"{project.package}_topics")
    with dg.build_sensor_context(instance=instance, resources={"broker": resource}) as context:
        sensor(context)

    orders, audit = client.describe_topic("orders"), client.describe_group("audit")
    assert (orders["type"], orders["queues"], orders["retention_ms"]) == ("fifo", 3, 86_400_000)
    assert (audit["max_attempts"], audit["backoff"] != "customized") == (3, True)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (ORDERS.replace("orders", "a b"), "topic 'a b': "),
        (ORDERS.replace("queues: 2", "queues: 0"), "not 0"),
        (ORDERS.replace("fifo", "fof"), "'fof'"),
        (consumer(without="  handler: .handler.handle\n"), "handler"),
        (consumer().replace(".handler.handle", "handle"), "'handle' names no object of a module"),
        (consumer().replace(".handler.handle", ".handler.hand"), "names hand, which the module"),
        (consumer().replace(".handler.handle", ".other.handle"), "orders.other, which does not"),
        (consumer().replace(".handler.handle", ".handler.check"), "billing is called with 2"),
        (consumer().replace("text: string", "text: words"), "Column text has the type 'words'"),
        (consumer("max_attempts: 0"), "max_attempts"),
        (consumer("max_attempts: many"), "max_attempts"),
        (consumer("engine: flink"), "'flink'"),
        (consumer("order: message_group"), "order"),
        (consumer("publishes: [bils]"), "names topic 'bils'"),
        (consumer("state: {n: int64}"), "needs order_by"),
        (consumer("thresholds: {dead_letters: -1}"), "thresholds.dead_letters is -1"),
        (consumer("idempotency_key: .handler.key"), "names key"),
        (
            """
            type: rmq_pipeline.dagster.TransactionCheckerComponent
            attributes: {topic: orders, checker: .handler.check}
            """,
            "Topic orders is fifo: no transactions.",
        ),
    ],
)
def test_a_wrong_part_is_refused_with_its_name(
    project: Project, refused: Refused, document: str, says: str
) -> None:
    project.write("broker", BROKER)
    is_topic = "TopicComponent" in document
    project.write("orders", *([document] if is_topic else [ORDERS, document]))

    assert says in refused()


def test_a_schema_may_be_named_and_a_key_a_function(project: Project) -> None:
    named = consumer("idempotency_key: .handler.check\n  order_by: message_group")
    project.write("broker", BROKER)
    project.write(
        "orders",
        ORDERS,
        BILLS,
        named.replace("{text: string, born_at_ms: int64}", ".handler.ROW")
        + "  state: .handler.ROW\n  publishes: [bills]\n  engine: spark\n  parallelism: 3\n",
    )

    graph = project.load().resolve_asset_graph()

    billing = graph.get(dg.AssetKey("billing"))
    assert "pyspark" in billing.kinds
    columns = billing.metadata["dagster/column_schema"].columns
    assert [column.name for column in columns] == ["text", "born_at_ms"]
    assert dg.AssetKey("billing") in graph.get(dg.AssetKey("bills")).parent_keys


def test_a_consumer_runs_from_send_to_sink(
    project: Project,
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    client: Client,
    send: Send,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resource.address
    monkeypatch.setenv("RMQ_FLIGHT", resource.address)
    monkeypatch.setenv("RMQ_SINKS", str(tmp_path / "sinks"))
    project.write("broker", BROKER)
    project.write("orders", ORDERS, BILLING)
    defs = project.load()
    sensor = defs.resolve_sensor_def(f"{project.package}_consumers")

    def tick() -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=instance, definitions=defs, resources={"broker": resource}
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    tick()  # makes the topic and the group
    send("orders", 3, message_group=["a"] * 3)
    (request,) = tick().run_requests or []
    assert request.job_name == "billing_window"
    config = {"ops": {"billing": {"config": {"idle_seconds": 0.0}}}}
    done = defs.resolve_job_def("billing_window").execute_in_process(
        run_config=config, instance=instance, tags=request.tags
    )

    assert done.success
    assert read_sink(tmp_path / "sinks" / "billing")["text"].to_pylist() == ["x"] * 3
    assert client.due()["groups"]["billing"]["topics"]["orders"]["unread"] == 0


def test_a_component_may_be_made_in_python() -> None:
    def handle(messages: pa.Table, state: pa.Table) -> Any:
        raise NotImplementedError

    made: list[Part] = [
        ConsumerComponent(group="billing", topic="orders", handler=handle),
        GroupComponent(name="audit", topic="orders"),
    ]

    assert [each.said_name for each in made] == ["billing", "audit"]
