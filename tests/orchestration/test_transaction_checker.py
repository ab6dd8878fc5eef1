"""Checkers of a pipeline, in process, against a real broker in real time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.checks import fallback_check
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.transaction_checker import (
    JOB,
    TransactionChecker,
    transaction_check_job,
    transaction_checker,
    transaction_checks,
)
from rmq_pipeline.orchestration.upkeep_assets import WindowConfig, asset_key, op_name
from rmq_pipeline.orchestration.windows import JOBS
from rmq_pipeline.transaction import Answer

ORDERS = topic("orders", type="transaction", queues=1)
REFUNDS = topic("refunds", type="transaction", queues=1)

Check = Callable[[pa.Table], Answer]


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture(autouse=True)
def _topics(client: Client) -> None:
    ORDERS.ensure(client)
    REFUNDS.ensure(client)


def by_body(checks: pa.Table) -> list[str]:
    """Decides as the body says."""
    return [body.decode() for body in checks["body"].to_pylist()]


def begin(client: Client, topic: str, *bodies: str, immunity_ms: int | None = 1) -> pa.Table:
    """Half messages that are due for a check at once."""
    table = pa.table({"body": [body.encode() for body in bodies]})
    return client.send_half(topic, table, producer_group="gone", immunity_ms=immunity_ms)


def run(
    resource: BrokerResource, checkers: Sequence[TransactionChecker], *, seconds: float = 0.5
) -> tuple[dg.ExecuteInProcessResult, dict[str, dict[str, Any]]]:
    """A window; the metadata of what it materialized, by asset."""
    result = dg.materialize(
        [transaction_checks(checkers), fallback_check(JOB, asset_key(JOB))],
        resources={"broker": resource},
        run_config=dg.RunConfig(
            ops={op_name(JOB): WindowConfig(seconds=seconds, overtime_seconds=0)}
        ),
    )
    events = result.asset_materializations_for_node(op_name(JOB))
    return result, {
        event.asset_key.to_user_string(): {k: v.value for k, v in event.metadata.items()}
        for event in events
    }


def delivered(broker: Broker, topic: str) -> list[bytes]:
    found: list[bytes] = broker.read(topic, 0, offset=0, limit=100)["body"].to_pylist()
    return found


def still_open(broker: Broker) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = broker.sql("FROM half ORDER BY born_at_ms").to_pylist()
    return found


def test_checker_decides_without_a_producer(
    resource: BrokerResource, client: Client, broker: Broker
) -> None:
    begin(client, "orders", "commit", "rollback", "unknown", "commit")

    result, materialized = run(resource, [transaction_checker(topic=ORDERS)(by_body)])

    assert result.success
    assert delivered(broker, "orders") == [b"commit", b"commit"]
    assert [row["checks"] for row in still_open(broker)] == [1]
    assert materialized["upkeep/check_transactions"]["checked"] == 4
    counts = {"commit": 2, "rollback": 1, "unknown": 1, "failed": 0}
    told = materialized["orders_checks"]
    assert told | counts == told
    assert told["asked"] == 4
    assert client.due()["jobs"][JOB]["window"] is None


def test_checker_gets_a_table_of_half_messages(resource: BrokerResource, client: Client) -> None:
    seen: list[pa.Table] = []

    def keep(checks: pa.Table) -> pa.Table:
        seen.append(checks)
        ids = checks["transaction_id"]
        return pa.table({"transaction_id": ids, "resolution": ["commit"] * len(ids)})

    halves = begin(client, "orders", "a", "b")
    run(resource, [transaction_checker(topic=ORDERS)(keep)])

    assert [each.schema for each in seen] == [schema.CHECK]
    assert seen[0]["transaction_id"].equals(halves["transaction_id"])
    assert seen[0]["producer_group"].to_pylist() == ["gone", "gone"]


def test_each_checker_is_asked_about_its_topic(
    resource: BrokerResource, client: Client, broker: Broker
) -> None:
    begin(client, "orders", "a")
    begin(client, "refunds", "b")

    _, materialized = run(
        resource,
        [
            transaction_checker(topic=ORDERS)(lambda checks: ["commit"] * checks.num_rows),
            transaction_checker(topic=REFUNDS)(lambda checks: ["rollback"] * checks.num_rows),
        ],
    )

    assert delivered(broker, "orders") == [b"a"]
    assert delivered(broker, "refunds") == []
    assert still_open(broker) == []
    assert materialized["refunds_checks"]["rollback"] == 1


def raises(_: pa.Table) -> list[str]:
    raise RuntimeError("no database")


@pytest.mark.parametrize("wrong", [raises, lambda _: [], lambda c: ["maybe"] * c.num_rows])
def test_checker_that_fails_leaves_its_half_messages_open_and_the_others_alone(
    resource: BrokerResource, client: Client, broker: Broker, wrong: Check
) -> None:
    begin(client, "orders", "a")
    begin(client, "refunds", "b")

    result, materialized = run(
        resource,
        [
            transaction_checker(topic=ORDERS)(wrong),
            transaction_checker(topic=REFUNDS)(lambda checks: ["commit"] * checks.num_rows),
        ],
    )

    assert result.success
    assert materialized["orders_checks"]["failed"] == 1
    assert [row["topic"] for row in still_open(broker)] == ["orders"]
    assert delivered(broker, "refunds") == [b"b"]


def test_half_messages_without_a_checker_are_counted(
    resource: BrokerResource, client: Client, broker: Broker
) -> None:
    begin(client, "orders", "a")

    _, materialized = run(resource, [])

    assert set(materialized) == {"upkeep/check_transactions"}
    assert [row["checks"] for row in still_open(broker)] == [1]


def test_checker_that_had_nothing_to_do_materializes_nothing(resource: BrokerResource) -> None:
    _, materialized = run(resource, [transaction_checker(topic=ORDERS)(by_body)])

    assert set(materialized) == {"upkeep/check_transactions"}


def test_window_that_is_taken_yields_and_runs_no_check(
    resource: BrokerResource, client: Client
) -> None:
    begin(client, "orders", "commit")
    client.open_window(f"upkeep/{JOB}", owner="the other run", duration_ms=60_000)

    result, materialized = run(resource, [transaction_checker(topic=ORDERS)(raises)])

    assert result.success
    assert materialized == {}
    assert client.due()["jobs"][JOB]["due"] == 1


def test_what_a_window_says_after_it_was_taken_over_is_refused(
    client: Client, broker: Broker, resource: BrokerResource
) -> None:
    begin(client, "orders", "a", "b")

    def taken_over(checks: pa.Table) -> list[str]:
        window = f"upkeep/{JOB}"
        client.open_window(window, owner="the next run", duration_ms=60_000, takeover=True)
        return ["commit"] * checks.num_rows

    checker = transaction_checker(topic=ORDERS)(taken_over)
    result, materialized = run(resource, [checker], seconds=10)

    # It may have been held up for long, and others have said otherwise since.
    assert result.success
    assert materialized["upkeep/check_transactions"]["handed_over"]
    assert delivered(broker, "orders") == []
    assert broker.sql("SELECT count(*) AS n FROM half").to_pylist() == [{"n": 2}]


def test_what_is_due_while_the_window_waits_is_asked(
    resource: BrokerResource, client: Client, broker: Broker
) -> None:
    begin(client, "orders", "commit", immunity_ms=700)

    run(resource, [transaction_checker(topic=ORDERS)(by_body)], seconds=2)

    assert delivered(broker, "orders") == [b"commit"]


def test_checker_of_a_topic_without_transactions_is_refused() -> None:
    with pytest.raises(ValueError, match="no transactions"):
        transaction_checker(topic=topic("plain"))(by_body)


def test_lineage_goes_from_the_checker_to_the_topic() -> None:
    checker = transaction_checker(topic=ORDERS)(by_body)
    pipeline = Pipeline("shop", topics=[ORDERS], consumers=[], checkers=[checker])

    defs = dg.Definitions.merge(
        dg.Definitions(
            assets=[transaction_checks(pipeline.checkers)],
            jobs=[transaction_check_job(pipeline.checkers)],
            resources={"broker": BrokerResource()},
        ),
        pipeline.definitions(),
    )

    graph = defs.resolve_asset_graph()
    assert graph.get(ORDERS.key).parent_keys == {checker.key}
    assert graph.get(checker.key).group_name == "shop"
    assert graph.get(checker.key).description == "Decides as the body says."
    keys = defs.resolve_job_def(JOB).asset_layer.executable_asset_keys
    assert keys == {asset_key(JOB), checker.key}


# -------------------------------------------------------------------------------------- the sensor


@pytest.fixture
def tick(instance: dg.DagsterInstance, resource: BrokerResource) -> Callable[..., Any]:
    sensor = due_work_sensor({JOB: JOBS[JOB]}, [transaction_check_job([])], poll_s=0.0)

    def evaluate(cursor: str | None = None) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=instance, cursor=cursor, resources={"broker": resource}
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    return evaluate


def requests(result: dg.SensorResult) -> list[tuple[str | None, str | None]]:
    return [(request.job_name, request.run_key) for request in result.run_requests or []]


def test_sensor_requests_nothing_when_there_is_no_half_message(tick: Callable[..., Any]) -> None:
    assert not requests(tick())


def test_sensor_leaves_half_messages_to_their_producer_at_first(
    tick: Callable[..., Any], client: Client
) -> None:
    begin(client, "orders", "a", immunity_ms=60_000)

    assert not requests(tick())


def test_sensor_requests_a_window_for_checks_that_are_due(
    tick: Callable[..., Any], client: Client
) -> None:
    begin(client, "orders", "a", "b")

    assert [job for job, _ in requests(tick())] == [JOB]


def test_sensor_requests_no_second_run_before_the_first_is_up(
    tick: Callable[..., Any], client: Client
) -> None:
    begin(client, "orders", "a")

    first = tick()

    assert [job for job, _ in requests(first)] == [JOB]
    assert not requests(tick(first.cursor))
