"""The job ``redrive`` with a SQL92 filter, launched as the Launchpad launches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import UNFINISHED
from rmq_pipeline.orchestration.operator_jobs import redrive_asset, redrive_job
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import op_name
from tests.conftest import Eventually
from tests.free_address import free_port

pytestmark = [pytest.mark.dagster, pytest.mark.slow]

TOPIC, GROUP = "orders", "billing"
CODE = """
import dagster as dg

from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.operator_jobs import redrive_asset, redrive_job

defs = dg.Definitions(
    [redrive_asset()], jobs=[redrive_job()], resources={"broker": BrokerResource()}
)
"""


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def dead(client: Client) -> None:
    """Ten dead letters: prices 0 to 9, in turn of the regions east and west."""
    client.create_topic(TOPIC, queues=1)
    client.create_group(GROUP, backoff_ms=[0])
    properties: list[Any] = [
        [("price", str(i)), ("region", "east" if i % 2 else "west")] for i in range(10)
    ]
    rows = {"body": [b"x"] * 10, "message_id": [f"m-{i}" for i in range(10)]}
    column = pa.array(properties, schema.PROPERTIES)
    client.send(TOPIC, pa.table(rows).append_column("properties", column))
    client.forward_to_dead_letter_queue(client.receive(GROUP, TOPIC, limit=10))


def redriven(client: Client) -> list[str]:
    rows = client.sql("SELECT message_id FROM redrives ORDER BY message_id")
    return [str(one) for one in rows["message_id"].to_pylist()]


def form(**config: Any) -> dict[str, Any]:
    """A run's config, as the Launchpad has it."""
    given = {"consumer_group": GROUP, "patience_s": 0.1, **config}
    return {"ops": {op_name("redrive"): {"config": given}}}


def test_the_launchpad_takes_a_filter(
    client: Client,
    resource: BrokerResource,
    dead: None,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    del dead
    assert resource.address is not None
    (tmp_path / "redrive_defs.py").write_text(CODE)
    dagster = DevServer(
        tmp_path / "dagster_home",
        port=free_port(),
        code=CodeLocation("redrive_defs", tmp_path),
        env={"RMQ_FLIGHT": resource.address},
    )

    with dagster:
        launch = dagster.graphql.launch
        good = launch(
            "redrive", location="redrive_defs", config=form(filter="region = 'east' AND price > 4")
        )
        bad = launch("redrive", location="redrive_defs", config=form(filter="price >"))
        eventually(lambda: dagster.graphql.status(good) not in UNFINISHED, within_s=60)
        eventually(lambda: dagster.graphql.status(bad) not in UNFINISHED, within_s=60)
        ended = [dagster.graphql.status(run) for run in (good, bad)]

    assert ended == ["SUCCESS", "FAILURE"]
    assert redriven(client) == ["m-5", "m-7", "m-9"]


def test_filter_and_where_both_must_want_it(
    client: Client, resource: BrokerResource, dead: None, instance: dg.DagsterInstance
) -> None:
    del dead
    defs = dg.Definitions([redrive_asset()], jobs=[redrive_job()], resources={"broker": resource})

    result = defs.resolve_job_def("redrive").execute_in_process(
        run_config=form(filter="region = 'east'", where="message_id < 'm-4'"), instance=instance
    )

    assert result.success
    assert redriven(client) == ["m-1", "m-3"]
