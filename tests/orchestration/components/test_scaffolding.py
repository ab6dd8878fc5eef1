"""`dg scaffold defs`: what it writes loads as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.orchestration.components.scaffolding import (
    BrokerScaffolder,
    CheckerScaffolder,
    ConsumerParams,
    ConsumerScaffolder,
    GroupScaffolder,
    ReadingParams,
    TopicParams,
    TopicScaffolder,
)
from tests.orchestration.components.conftest import BROKER, ORDERS, Project

ROOT = Path(__file__).parents[3]


def scaffold(project: Project, scaffolder: dg.Scaffolder[Any], place: str, params: Any) -> None:
    target = project.defs / place
    target.mkdir(parents=True, exist_ok=True)
    request = dg.ScaffoldRequest(
        type_name="rmq_pipeline.dagster.Component",
        target_path=target,
        scaffold_format="yaml",
        project_root=project.root,
        params=params,
    )
    scaffolder.scaffold(request)


@pytest.mark.parametrize(
    ("scaffolder", "params", "assets"),
    [
        (BrokerScaffolder(), None, {"upkeep/seal"}),
        (TopicScaffolder(), TopicParams(type="fifo"), {"mine"}),
        (GroupScaffolder(), ReadingParams(), {"mine", "mine_topic"}),
        (ConsumerScaffolder(), ConsumerParams(), {"mine", "mine_topic", "sink_hours/mine"}),
        (ConsumerScaffolder(), ConsumerParams(engine="spark"), {"mine", "mine_topic"}),
        (CheckerScaffolder(), ReadingParams(), {"mine_topic", "mine_topic_checks"}),
    ],
)
def test_what_is_scaffolded_loads(
    project: Project, scaffolder: dg.Scaffolder[Any], params: Any, assets: set[str]
) -> None:
    scaffold(project, scaffolder, "inner/mine", params)

    graph = project.load().resolve_asset_graph()

    assert assets <= {key.to_user_string() for key in graph.get_all_asset_keys()}


def test_a_given_topic_is_read_and_the_broker_component_kept(project: Project) -> None:
    project.write("wiring", f"{BROKER}\nattributes: {{upkeep: false}}")
    project.write("orders", ORDERS)

    scaffold(project, ConsumerScaffolder(), "billing", ConsumerParams(topic="orders"))

    written = (project.defs / "billing" / "defs.yaml").read_text()
    assert "topic: orders" in written
    assert "TopicComponent" not in written
    assert not (project.defs / "broker").exists()
    dg.Definitions.validate_loadable(project.load())


def test_a_component_may_be_added_to_a_file(project: Project) -> None:
    project.write("audit", ORDERS)
    request = dg.ScaffoldRequest(
        type_name="rmq_pipeline.dagster.GroupComponent",
        target_path=project.defs / "audit" / "defs.yaml",
        scaffold_format="yaml",
        project_root=project.root,
        params=ReadingParams(topic="orders"),
        append=True,
    )

    GroupScaffolder().scaffold(request)

    graph = project.load().resolve_asset_graph()
    names = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert {"orders", "audit", "audit_dead_letters"} <= names


def test_python_is_refused_with_the_way_to_write_it(project: Project) -> None:
    request = dg.ScaffoldRequest(
        type_name="rmq_pipeline.dagster.TopicComponent",
        target_path=project.defs,
        scaffold_format="python",
        project_root=project.root,
        params=TopicParams(),
    )

    with pytest.raises(ValueError, match="use Pipeline"):
        TopicScaffolder().scaffold(request)


def dg_command(project: Project, *arguments: str) -> tuple[int, str]:
    """Run `dg` in the project; its return code, and what it says."""
    paths = os.pathsep.join([str(ROOT), str(project.root)])
    done = subprocess.run(
        [sys.executable, "-m", "dagster_dg_cli.cli", *arguments],
        cwd=project.root,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.dagster
def test_dg_lists_scaffolds_and_checks_the_components(project: Project) -> None:
    consumer = "rmq_pipeline.dagster.ConsumerComponent"
    listed = dg_command(project, "list", "components")
    made = dg_command(project, "scaffold", "defs", consumer, "billing", "--engine", "spark")
    yaml = dg_command(project, "check", "yaml")
    defs = dg_command(project, "check", "defs")
    file = project.defs / "billing" / "defs.yaml"
    file.write_text(file.read_text().replace("engine: spark", "engin: spark"))
    wrong = dg_command(project, "check", "yaml")

    assert listed[0] == 0, listed[1]
    for name in ("Broker", "Topic", "Group", "Consumer", "TransactionChecker"):
        assert f"rmq_pipeline.dagster.{name}Component" in listed[1]
    assert made[0] == 0, made[1]
    assert yaml[0] == 0, yaml[1]
    assert defs[0] == 0, defs[1]
    assert wrong[0] != 0
    assert "engin" in wrong[1]
