"""The job ``redrive``: config from the Launchpad, a run that goes on, what it shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.declarations import dead_letter_key
from rmq_pipeline.orchestration.operator_jobs import RedriveConfig, redrive_asset, redrive_job
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.orchestration.conftest import Send

TOPIC, GROUP = "orders", "billing"
KEY = dg.AssetKey(["upkeep", "redrive"])

Execute = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def dead(client: Client, send: Send) -> Callable[[int], None]:
    client.create_topic(TOPIC, queues=1)
    client.create_group(GROUP, backoff_ms=[0])

    def make(n: int) -> None:
        send(TOPIC, n, message_id=[f"m-{i}" for i in range(n)])
        left = n
        while left:
            got = client.receive(GROUP, TOPIC, limit=n)
            client.forward_to_dead_letter_queue(got, reason="no price")
            left -= got.num_rows

    return make


@pytest.fixture
def execute(resource: BrokerResource, instance: dg.DagsterInstance) -> Execute:
    """``execute(consumer_group=…, …, run_id=None)``: the job, with that config."""

    def run(run_id: str | None = None, **config: Any) -> dg.ExecuteInProcessResult:
        defs = dg.Definitions(
            [redrive_asset()], jobs=[redrive_job()], resources={"broker": resource}
        )
        job = defs.resolve_job_def("redrive")
        return job.execute_in_process(
            run_config={"ops": {"upkeep__redrive": {"config": config}}},
            instance=instance,
            raise_on_error=False,
            run_id=run_id,
        )

    return run


@contextmanager
def consuming(resource: BrokerResource, outcome: str = "ack") -> Iterator[None]:
    """A consumer of the group, until the end of the block."""
    over = threading.Event()

    def consume() -> None:
        with resource.client() as client:
            while not over.is_set():
                got = client.receive(GROUP, TOPIC, limit=100, wait_ms=100)
                if got.num_rows:
                    rows = {
                        "receipt_handle": got["receipt_handle"],
                        "outcome": [outcome] * got.num_rows,
                    }
                    client.settle(GROUP, pa.table(rows))

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    [materialization] = result.asset_materializations_for_node("upkeep__redrive")
    return {name: value.value for name, value in materialization.metadata.items()}


def test_a_run_redrives_and_shows_what_became_of_it(
    execute: Execute, dead: Callable[[int], None], resource: BrokerResource
) -> None:
    dead(30)

    with consuming(resource):
        result = execute(consumer_group=GROUP, where="message_id <> 'm-7'", minimum=5)

    assert result.success
    shown = metadata(result)
    assert (shown["status"], shown["chosen"], shown["redriven"]) == ("done", 29, 29)
    assert (shown["decided"], shown["failed"], shown["failed_share"]) == (29, 0, 0.0)
    assert [record.data for record in shown["outcomes"].records] == [
        {"outcome": "acked", "messages": 29}
    ]
    listed = [record.data for record in shown["first_messages"].records]
    assert len(listed) == 29
    assert listed[0] == {
        "topic": TOPIC,
        "message_id": "m-0",
        "first_outcome": "acked",
        "outcome": "acked",
    }
    assert shown["chart"].startswith("![acked at once; failed again](data:image/svg+xml;base64,")
    assert shown["redrive_id"] == f"run-{result.run_id}"


def test_the_dead_letters_asset_has_an_observation_of_it(
    execute: Execute,
    dead: Callable[[int], None],
    resource: BrokerResource,
    instance: dg.DagsterInstance,
) -> None:
    dead(3)

    with consuming(resource):
        execute(consumer_group=GROUP)

    found = instance.fetch_observations(dead_letter_key(GROUP), limit=1).records
    observation = found[0].asset_observation
    assert observation is not None
    assert observation.metadata["redriven"].value == 3


def test_the_manifest_it_names_is_a_query(
    execute: Execute, dead: Callable[[int], None], resource: BrokerResource, client: Client
) -> None:
    dead(3)
    with consuming(resource):
        result = execute(consumer_group=GROUP)

    rows = client.sql(metadata(result)["manifest"]).to_pylist()

    assert sorted(row["message_id"] for row in rows) == ["m-0", "m-1", "m-2"]


def test_a_run_that_fails_too_often_fails_and_says_so(
    execute: Execute,
    dead: Callable[[int], None],
    resource: BrokerResource,
    instance: dg.DagsterInstance,
) -> None:
    dead(100)

    with consuming(resource, "dead_letter"):
        result = execute(consumer_group=GROUP, minimum=10)

    assert not result.success
    [failure] = [e for e in result.all_events if e.is_step_failure]
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert data.metadata["status"].value == "stopped"
    redriven = data.metadata["redriven"].value
    assert isinstance(redriven, int)
    assert redriven < 100
    assert not result.asset_materializations_for_node("upkeep__redrive")
    assert not [e for e in result.all_events if e.is_step_up_for_retry]
    assert instance.fetch_observations(dead_letter_key(GROUP), limit=1).records


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"where": "attempts >"}, "does not parse"),
        ({"where": "1 = 1; DELETE FROM dead_letters"}, "does not parse"),
        ({"consumer_group": "nobody"}, "nobody"),
    ],
)
def test_a_wrong_config_fails_at_once(
    execute: Execute, dead: Callable[[int], None], config: dict[str, str], says: str
) -> None:
    dead(1)

    result = execute(**{"consumer_group": GROUP, **config})

    assert not result.success
    [failure] = [e for e in result.all_events if e.is_step_failure]
    assert says in failure.step_failure_data.error_display_string
    assert not [e for e in result.all_events if e.is_step_up_for_retry]


def test_a_redrive_that_ended_early_goes_on_in_the_next_run(
    execute: Execute, dead: Callable[[int], None], resource: BrokerResource
) -> None:
    dead(30)
    cut_short = execute(consumer_group=GROUP, minimum=10, patience_s=0.1, redrive_id="the-fix")

    with consuming(resource):
        result = execute(consumer_group=GROUP, minimum=10, redrive_id="the-fix")

    first = metadata(cut_short)
    assert (first["status"], first["chosen"], first["redriven"]) == ("waiting", 30, 10)
    last = metadata(result)
    assert (last["status"], last["chosen"], last["redriven"]) == ("done", 30, 30)
    assert [record.data for record in last["outcomes"].records] == [
        {"outcome": "acked", "messages": 30}
    ]


def test_a_lost_connection_is_retried_under_the_same_id(
    execute: Execute,
    dead: Callable[[int], None],
    resource: BrokerResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead(30)
    calls: list[str] = []
    real = Client.redrive

    def flaky(self: Client, group: str, dead_letters: pa.Table, *, redrive_id: str) -> pa.Table:
        calls.append(redrive_id)
        answer = real(self, group, dead_letters, redrive_id=redrive_id)
        if len(calls) == 1:
            raise BrokerUnavailableError("gone, though it was carried out")
        return answer

    monkeypatch.setattr(Client, "redrive", flaky)
    monkeypatch.setattr("rmq_pipeline.orchestration.operator_jobs.REDRIVE_RETRY_S", 0)
    with consuming(resource):
        result = execute(consumer_group=GROUP, minimum=5)

    assert result.success
    assert len([e for e in result.all_events if e.is_step_up_for_retry]) == 1
    shown = metadata(result)
    assert (shown["status"], shown["chosen"], shown["redriven"]) == ("done", 30, 30)
    assert len(set(calls)) == 1


def test_every_field_of_the_form_says_what_it_is() -> None:
    fields = RedriveConfig.model_fields

    assert all(field.description for field in fields.values())
    assert [name for name, field in fields.items() if field.is_required()] == ["consumer_group"]


def redrive_from_environment() -> dg.JobDefinition:
    """The job, of the broker that RMQ_FLIGHT names: a re-execution loads it by name."""
    defs = dg.Definitions(
        [redrive_asset()], jobs=[redrive_job()], resources={"broker": BrokerResource()}
    )
    return defs.resolve_job_def("redrive")


def test_a_run_executed_again_goes_on_with_the_same_redrive(
    dead: Callable[[int], None],
    resource: BrokerResource,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    dead(30)
    assert resource.address is not None
    monkeypatch.setenv("RMQ_FLIGHT", resource.address)
    job = dg.reconstructable(redrive_from_environment)
    config = {"consumer_group": GROUP, "minimum": 10, "patience_s": 0.1}
    given = {"ops": {"upkeep__redrive": {"config": config}}}

    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        cut_short = dg.execute_job(job, instance=instance, run_config=given)
        config["patience_s"] = 60
        again = dg.ReexecutionOptions(parent_run_id=cut_short.run_id)
        with consuming(resource):
            result = dg.execute_job(
                job, instance=instance, run_config=given, reexecution_options=again
            )
        [record] = instance.fetch_materializations(KEY, limit=1).records
    materialization = record.asset_materialization

    assert cut_short.success
    assert result.success
    assert result.run_id != cut_short.run_id
    assert materialization is not None
    shown = {name: value.value for name, value in materialization.metadata.items()}
    assert (shown["status"], shown["chosen"], shown["redriven"]) == ("done", 30, 30)
    assert shown["redrive_id"] == f"run-{cut_short.run_id}"
