"""Two code locations on one broker: each calls the checkers of its own topics."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import queries
from rmq_pipeline.orchestration.declarations import identifier, topic
from rmq_pipeline.orchestration.definitions import definitions
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.transaction_checker import JOB, transaction_checker
from rmq_pipeline.orchestration.upkeep_assets import WindowConfig, op_name

ORDERS = topic("orders", type="transaction", queues=1)
REFUNDS = topic("refunds", type="transaction", queues=1)


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


def location(
    of: Any, answer: str, *, upkeep: bool, broker: BrokerResource, seen: list[str]
) -> dg.Definitions:
    """The definitions of a code location with one checker."""

    @transaction_checker(topic=of)
    def check(checks: pa.Table) -> list[str]:
        seen.extend(checks["topic"].to_pylist())
        return [answer] * checks.num_rows

    pipeline = Pipeline(f"of_{identifier(of.name)}", topics=[of], consumers=[], checkers=[check])
    return definitions([pipeline], upkeep=upkeep, resources={"broker": broker})


def begin(client: Client, topic: str) -> None:
    {"orders": ORDERS, "refunds": REFUNDS}[topic].ensure(client)
    body = pa.table({"body": [b"x", b"y"]})
    client.send_half(topic, body, producer_group="gone", immunity_ms=1)


def tick(
    defs: dg.Definitions, instance: dg.DagsterInstance, broker: BrokerResource
) -> dg.SensorResult:
    sensor = defs.resolve_sensor_def("transaction_checkers")
    with dg.build_sensor_context(instance=instance, resources={"broker": broker}) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def hold(
    defs: dg.Definitions, job: str, *, instance: dg.DagsterInstance, seconds: float = 1.0
) -> dg.ExecuteInProcessResult:
    """One short window."""
    config = dg.RunConfig(ops={op_name(job): WindowConfig(seconds=seconds, overtime_seconds=0)})
    return defs.resolve_job_def(job).execute_in_process(run_config=config, instance=instance)


def test_each_location_calls_the_checkers_of_its_own_topics(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client, broker: Broker
) -> None:
    of_first: list[str] = []
    of_second: list[str] = []
    first = location(ORDERS, "commit", upkeep=True, broker=resource, seen=of_first)
    second = location(REFUNDS, "rollback", upkeep=False, broker=resource, seen=of_second)
    begin(client, "orders")
    begin(client, "refunds")

    (request,) = tick(second, instance, resource).run_requests or []
    assert hold(first, JOB, instance=instance).success
    open_after_first = broker.sql("FROM half")["topic"].to_pylist()
    assert request.job_name == "check_transactions_refunds"
    done = hold(second, request.job_name, instance=instance, seconds=2.0)

    assert open_after_first == ["refunds", "refunds"]
    assert (set(of_first), set(of_second)) == ({"orders"}, {"refunds"})
    assert broker.sql("FROM half").num_rows == 0
    (told,) = done.asset_materializations_for_node(op_name(request.job_name))
    assert told.asset_key == dg.AssetKey("refunds_checks")
    assert (told.metadata["asked"].value, told.metadata["rollback"].value) == (2, 2)


def test_nothing_starts_without_an_open_half_message_of_its_topics(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    second = location(REFUNDS, "commit", upkeep=False, broker=resource, seen=[])

    nothing = tick(second, instance, resource)
    begin(client, "orders")
    of_another = tick(second, instance, resource)

    assert not nothing.run_requests
    assert not of_another.run_requests


def test_nothing_starts_before_a_check_of_its_topics_is_due(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    second = location(REFUNDS, "unknown", upkeep=False, broker=resource, seen=[])
    REFUNDS.ensure(client)
    body = pa.table({"body": [b"x"]})
    client.send_half("refunds", body, producer_group="gone", immunity_ms=3_600_000)
    open_for_an_hour = tick(second, instance, resource)
    begin(client, "orders")

    of_another = tick(second, instance, resource)

    assert not open_for_an_hour.run_requests
    assert not of_another.run_requests


def test_the_next_run_comes_with_the_next_check(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    seen: list[str] = []
    second = location(REFUNDS, "unknown", upkeep=False, broker=resource, seen=seen)
    begin(client, "refunds")
    (request,) = tick(second, instance, resource).run_requests or []
    assert hold(second, str(request.job_name), instance=instance).success

    after_it = tick(second, instance, resource)

    assert seen == ["refunds", "refunds"]
    assert not after_it.run_requests


@pytest.mark.parametrize(
    ("age_ms", "due_in_ms", "found"),
    [(0, 6_000, {}), (1_000, 5_000, {"refunds": 1}), (1_000, 9_000, {}), (0, 0, {"refunds": 1})],
    ids=["just begun", "settled", "far", "now"],
)
def test_a_check_is_due_ahead_of_its_time_if_its_transaction_goes_on(
    client: Client, age_ms: int, due_in_ms: int, found: dict[str, int]
) -> None:
    REFUNDS.ensure(client)
    body = pa.table({"body": [b"x"]})
    client.send_half("refunds", body, producer_group="gone", immunity_ms=max(1, age_ms + due_in_ms))
    (row,) = client.sql("FROM half").to_pylist()
    now_ms = row["next_check_ms"] - due_in_ms

    counts = queries.due_checks(client, now_ms=now_ms, ahead_ms=8_000, settled_ms=1_000)

    assert counts == found


def test_a_window_that_is_under_way_has_no_successor(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    second = location(REFUNDS, "commit", upkeep=False, broker=resource, seen=[])
    begin(client, "refunds")
    (request,) = tick(second, instance, resource).run_requests or []
    job = second.resolve_job_def(str(request.job_name))
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=dict(job.tags))

    assert not tick(second, instance, resource).run_requests


def test_a_topic_of_another_location_with_the_same_asset_key_blocks_nothing(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    seen: list[str] = []
    with_dash, with_line = (
        topic(name, type="transaction", queues=1) for name in ("pay-in", "pay_in")
    )
    first = location(with_dash, "commit", upkeep=False, broker=resource, seen=[])
    second = location(with_line, "commit", upkeep=False, broker=resource, seen=seen)
    for each in (with_dash, with_line):
        each.ensure(client)
        body = pa.table({"body": [b"x"]})
        client.send_half(each.name, body, producer_group="gone", immunity_ms=1)
    (of_first,) = tick(first, instance, resource).run_requests or []
    job = first.resolve_job_def(str(of_first.job_name))
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=dict(job.tags))
    client.open_window("upkeep/check_transactions/pay-in", owner="it", duration_ms=60_000)

    (request,) = tick(second, instance, resource).run_requests or []
    assert hold(second, str(request.job_name), instance=instance).success

    assert seen == ["pay_in"]


def test_two_windows_of_a_checker_do_not_overlap(
    resource: BrokerResource, instance: dg.DagsterInstance, client: Client
) -> None:
    seen: list[str] = []
    second = location(REFUNDS, "commit", upkeep=False, broker=resource, seen=seen)
    begin(client, "refunds")
    client.open_window("upkeep/check_transactions/refunds", owner="another", duration_ms=60_000)

    name = "check_transactions_refunds"
    done = hold(second, name, instance=instance)

    assert done.success
    assert not seen
    assert not done.asset_materializations_for_node(op_name(name))


def test_a_broker_that_is_away_is_said(away: BrokerResource, instance: dg.DagsterInstance) -> None:
    second = location(REFUNDS, "commit", upkeep=False, broker=away, seen=[])

    result = tick(second, instance, away)

    assert "127.0.0.1:1" in str(result.skip_reason)
