"""The job ``unpark``: config from the Launchpad, what it does, what it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.operator_jobs import unpark_asset, unpark_job
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.orchestration.conftest import Send

TOPIC, GROUP = "orders", "billing"

Execute = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture(autouse=True)
def parked(client: Client, send: Send) -> None:
    """Messages of a and of b, two each; the first ones are parked."""
    client.create_topic(TOPIC, type="fifo", queues=1)
    client.create_group(GROUP, order="message_group", max_attempts=1, on_failure="park")
    send(TOPIC, 4, message_group=["a", "b", "a", "b"])
    got = client.receive(GROUP, TOPIC, limit=2)
    outcomes = {
        "receipt_handle": got["receipt_handle"],
        "outcome": ["retry"] * 2,
        "reason": ["no price"] * 2,
    }
    client.settle(GROUP, pa.table(outcomes))


@pytest.fixture
def execute(resource: BrokerResource, instance: dg.DagsterInstance) -> Execute:
    def run(**config: Any) -> dg.ExecuteInProcessResult:
        defs = dg.Definitions([unpark_asset()], jobs=[unpark_job()], resources={"broker": resource})
        return defs.resolve_job_def("unpark").execute_in_process(
            run_config={"ops": {"upkeep__unpark": {"config": config}}},
            instance=instance,
            raise_on_error=False,
        )

    return run


def offsets(client: Client) -> list[int]:
    found: list[int] = client.receive(GROUP, TOPIC)["queue_offset"].to_pylist()
    return found


def test_a_run_unparks_and_shows_what_was_parked(client: Client, execute: Execute) -> None:
    result = execute(consumer_group=GROUP)

    (made,) = result.get_asset_materialization_events()
    metadata = made.materialization.metadata
    assert (metadata["unparked"].value, metadata["skipped"].value) == (2, 0)
    table = metadata["parked"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data["message_group"] for record in table.records] == ["a", "b"]
    assert {record.data["reason"] for record in table.records} == {"no price"}
    assert offsets(client) == [0, 1]


def test_a_run_may_skip_one_message_group_of_one_topic(client: Client, execute: Execute) -> None:
    result = execute(consumer_group=GROUP, topic=TOPIC, message_groups=["b"], skip=True)

    (made,) = result.get_asset_materialization_events()
    assert made.materialization.metadata["skipped"].value == 1
    assert offsets(client) == [3]
    assert client.describe_topic(f"%DLQ%{GROUP}")["offsets"][0]["max_offset"] == 1


def test_a_group_that_does_not_exist_fails_the_run_at_once(execute: Execute) -> None:
    result = execute(consumer_group="nobody")

    assert not result.success
    assert result.get_asset_materialization_events() == []
