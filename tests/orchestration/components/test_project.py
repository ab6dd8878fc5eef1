"""Components of a defs folder: together what ``definitions`` makes, and each shared thing once."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.dagster import (
    Pipeline,
    consumer_group,
    definitions,
    python_consumer,
    topic,
    transaction_checker,
)
from rmq_pipeline.orchestration.windows import JOBS
from tests.orchestration.components.conftest import (
    BILLING,
    BILLS,
    BROKER,
    HANDLER,
    ORDERS,
    Project,
    Refused,
)

AUDIT = """
type: rmq_pipeline.dagster.GroupComponent
attributes: {name: audit, topic: orders, order: message_group}
"""
CHECKER = """
type: rmq_pipeline.dagster.TransactionCheckerComponent
attributes: {topic: bills, checker: .handler.check}
"""


def content(defs: dg.Definitions) -> dict[str, list[str]]:
    """The names of all that Dagster loads."""
    repository = defs.get_repository_def()
    graph = repository.asset_graph
    groups = {graph.get(key).group_name for key in graph.get_all_asset_keys()}
    return {
        "assets": sorted(key.to_user_string() for key in graph.get_all_asset_keys()),
        "groups": sorted(group or "" for group in groups),
        "checks": sorted(str(key) for key in graph.asset_check_keys),
        "jobs": sorted(name for name in repository.job_names if not name.startswith("__")),
        "sensors": sorted(sensor.name for sensor in repository.sensor_defs),
        "resources": sorted(repository.get_top_level_resources()),
    }


def written() -> Pipeline:
    """The same in Python."""
    space: dict[str, Any] = {}
    exec(HANDLER, space)
    handle, check = space["handle"], space["check"]
    orders, bills = topic("orders", type="fifo", queues=2), topic("bills", type="transaction")
    billing = python_consumer(
        topic=orders,
        group="billing",
        sink="billing",
        sink_schema=space["ROW"],
    )(handle)
    return Pipeline(
        "shop",
        topics=[orders, bills],
        consumers=[billing],
        checkers=[transaction_checker(topic=bills)(check)],
        groups=[consumer_group("audit", topic=orders, order="message_group")],
    )


def test_components_make_what_python_makes(project: Project) -> None:
    project.write("broker", f"{BROKER}\nattributes: {{pipeline: shop}}")
    project.write("topics", ORDERS, BILLS)
    project.write("sales/billing", BILLING)
    project.write("sales/audit", AUDIT)
    project.write("sales/checking", CHECKER)

    defs = project.load()

    dg.Definitions.validate_loadable(defs)
    assert content(defs) == content(definitions([written()]))


def test_the_background_work_is_there_once_however_many_components(project: Project) -> None:
    project.write("broker", BROKER)
    project.write("a", ORDERS)
    project.write("b", BILLS, BILLING)

    found = content(project.load())

    upkeep = [name for name in found["assets"] if name.startswith("upkeep/")]
    assert {f"upkeep/{name}" for name in JOBS} <= set(upkeep)
    assert len(upkeep) == len(set(upkeep))
    assert found["sensors"].count("due_work") == 1


def test_a_location_without_upkeep_has_only_its_own(project: Project) -> None:
    project.write("broker", f"{BROKER}\nattributes: {{upkeep: false}}")
    project.write("orders", ORDERS, BILLING)

    found = content(project.load())

    assert "due_work" not in found["sensors"]
    assert f"{project.package}_consumers" in found["sensors"]
    assert not [name for name in found["assets"] if name.startswith("upkeep/")]
    assert {"broker", "sinks", "spark"} <= set(found["resources"])


def test_an_assets_page_shows_its_yaml(project: Project) -> None:
    project.write("broker", BROKER)
    project.write("orders", ORDERS, BILLING)

    graph = project.load().resolve_asset_graph()

    for name in ("orders", "billing"):
        found = graph.get(dg.AssetKey(name)).metadata["dagster/code_references"]
        assert "orders/defs.yaml" in str(found)


def test_pipelines_in_python_are_joined(project: Project) -> None:
    project.module(
        "pipeline",
        """
        from rmq_pipeline.dagster import Pipeline, topic

        ORDERS = topic("orders", type="fifo", queues=2)
        PIPELINE = Pipeline("python", topics=[ORDERS], consumers=[])
        """,
    )
    named = f"[{project.package}.pipeline.PIPELINE]"
    project.write("broker", f"{BROKER}\nattributes: {{pipelines: {named}}}")
    project.write("billing", BILLING)

    found = content(project.load())

    assert {"orders", "billing", "topic_log/orders"} <= set(found["assets"])
    assert {"python_topics", f"{project.package}_consumers"} <= set(found["sensors"])


def test_an_own_resource_replaces_that_of_the_deployment(project: Project) -> None:
    project.module(
        "wiring",
        """
        from rmq_pipeline.dagster import SinkResource

        RESOURCES = {"sinks": SinkResource(root="/elsewhere")}
        """,
    )
    named = f"{project.package}.wiring.RESOURCES"
    project.write("broker", f"{BROKER}\nattributes: {{resources: {named}}}")

    defs = project.load()

    assert (defs.resources or {})["sinks"].root == "/elsewhere"
    assert "broker" in (defs.resources or {})


def test_a_topic_of_another_location_is_read_and_has_no_asset_here(project: Project) -> None:
    project.write("broker", BROKER)
    external = ORDERS.replace("queues: 2", "queues: 2, external: true")
    project.write("billing", external, BILLING)

    graph = project.load().resolve_asset_graph()

    # Dagster shows the parents of others' assets as stubs.
    assert graph.get(dg.AssetKey("billing")).description
    assert not graph.get(dg.AssetKey("orders")).description
    assert not graph.get(dg.AssetKey(["topic_log", "orders"])).partitions_def


def test_without_a_broker_component_the_remedy_is_said(project: Project, refused: Refused) -> None:
    project.write("orders", ORDERS)

    assert "`dg scaffold defs rmq_pipeline.dagster.BrokerComponent broker`" in refused()


def test_two_broker_components_are_refused(project: Project, refused: Refused) -> None:
    project.write("a", BROKER)
    project.write("b", BROKER)

    assert "has 2 BrokerComponents. Keep one" in refused()


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([BILLING], "Consumer billing names topic 'orders', which this project does not declare"),
        ([BILLING], "TopicComponent orders`"),
        ([AUDIT], "Consumer group audit names topic 'orders'"),
        ([CHECKER], "A TransactionCheckerComponent names topic 'bills'"),
        ([ORDERS, ORDERS], "Topic orders is declared twice in this project. Keep one."),
        ([ORDERS, BILLING, BILLING], "billing and billing of pipeline"),
        (
            [ORDERS, AUDIT, AUDIT.replace("topic:", "pipeline: other, topic:")],
            "Two pipelines have the consumer group audit",
        ),
    ],
)
def test_what_does_not_agree_is_refused_with_its_name(
    project: Project, refused: Refused, documents: list[str], says: str
) -> None:
    project.write("broker", BROKER)
    project.write("shop", *documents)

    assert says in refused()


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ("pipelines: [shop.pipeline]", "module shop, which does not exist"),
        ("pipelines: [json.dumps]", "Name what Pipeline(...) returns"),
        ("resources: json.dumps", "Name a dict of resources by name"),
        ("deployment: test", "'test'"),
    ],
)
def test_a_wrong_broker_component_is_refused(
    project: Project, refused: Refused, attributes: str, says: str
) -> None:
    project.write("broker", f"{BROKER}\nattributes: {{{attributes}}}")

    assert says in refused()


def test_a_component_in_python_says_its_type(project: Project, refused: Refused) -> None:
    project.write("broker", BROKER)
    text = """
        import dagster as dg

        from rmq_pipeline.dagster import TopicComponent


        @dg.component_instance
        def load(context){returns}:
            return TopicComponent(name="news")
        """
    project.module("defs/news", text.format(returns=""))
    said = refused()
    project.module("defs/more", text.format(returns=" -> TopicComponent").replace("news", "more"))
    (project.defs / "news.py").unlink()

    assert "def load(context) -> TopicComponent" in said
    assert "more" in content(project.load())["assets"]
