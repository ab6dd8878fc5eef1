"""What a pipeline declares is refused where it is written, or becomes so at the broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import limits
from rmq_pipeline.errors import AlreadyExistsError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.checks import Thresholds
from rmq_pipeline.orchestration.consumer import Consumer, python_consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import consumer_group, topic
from rmq_pipeline.orchestration.definitions import definitions
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.sensors import consumers_sensor
from rmq_pipeline.orchestration.transaction_checker import transaction_checker
from tests.orchestration.conftest import Send

ORDERS = topic("orders")
BILLS = topic("bills", type="transaction")
SINK = pa.schema([("born_at_ms", pa.int64())])


def handler(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    return Outcome()


def checker(checks: pa.Table) -> list[str]:
    return ["unknown"] * checks.num_rows


def consumer(group: str = "billing", **settings: Any) -> Consumer:
    return python_consumer(**{"topic": ORDERS, "group": group, **settings})(handler)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "a b"}, r"topic 'a b': .*characters"),
        ({"name": "x" * 200}, "too long"),
        ({"type": "fof"}, r"topic 'orders': .*'fof' is not one of normal, fifo"),
        ({"queues": 0}, r"topic 'orders': .*not 0"),
        ({"queues": -1}, "not -1"),
        ({"queues": True}, "not True"),
        ({"partition_time": " "}, "partition_time"),
        ({"deduplicate": "id"}, "deduplicate"),
        ({"deduplicate_window_ms": 0}, "deduplicate_window_ms"),
        ({"retention_ms": -1}, "retention_ms"),
        ({"retention_bytes": -1}, "retention_bytes"),
        ({"log_from": "2026-01-01"}, r"log_from of topic 'orders' is '2026-01-01'"),
        ({"log_until": "2025-01-01-00:00"}, "must lie after"),
    ],
)
def test_a_wrong_topic_is_refused_where_it_is_declared(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        topic(**{"name": "orders", **settings})


@pytest.mark.parametrize("decorator", [python_consumer, spark_consumer])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"group": "a b"}, "consumer group 'a b'"),
        ({"group": "orders"}, "has the name of its topic"),
        ({"topic": "orders"}, r"topic is 'orders'. Give what topic"),
        ({"order_by": "key"}, "consumer group 'billing': .*'key'"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"backoff_ms": ()}, "backoff_ms"),
        ({"backoff_ms": (-1,)}, "backoff_ms"),
        ({"backoff": "fast"}, "backoff"),
        ({"on_failure": "drop"}, "on_failure 'drop'"),
        ({"idempotency_window_ms": 0}, "idempotency_window_ms"),
        ({"filter": "a = = 1", "filter_type": "sql92"}, "billing"),
        ({"publishes": ["bills"]}, "publishes to 'bills'"),
        ({"parallelism": 0}, "parallelism is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"thresholds": Thresholds(dead_letters=-1)}, "thresholds.dead_letters is -1"),
        ({"thresholds": Thresholds(oldest_unread_minutes=-1)}, "oldest_unread_minutes is -1"),
        ({"sink": "s"}, "needs a sink and its schema"),
        ({"sink_schema": SINK}, "needs a sink and its schema"),
        ({"sink": "s", "sink_schema": pa.schema([("x", pa.int64())])}, "partition_time"),
        ({"sink": "s", "sink_schema": ["x"]}, "Give a pyarrow.Schema"),
        ({"state": SINK}, "needs order_by"),
    ],
)
def test_a_wrong_consumer_is_refused_where_it_is_declared(
    decorator: Callable[..., Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        decorator(**{"topic": ORDERS, "group": "billing", **settings})(handler)


def one(messages: pa.Table) -> Outcome:
    raise NotImplementedError


def three(messages: pa.Table, state: pa.Table, more: int) -> Outcome:
    raise NotImplementedError


def named(messages: pa.Table, *, state: pa.Table) -> Outcome:
    raise NotImplementedError


@pytest.mark.parametrize("wrong", [one, three, named, "handler", None])
def test_a_handler_that_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"consumer billing is called with 2: messages, state"):
        python_consumer(topic=ORDERS, group="billing")(wrong)


def test_a_handler_may_have_defaults() -> None:
    def more(messages: pa.Table, state: pa.Table, limit: int = 3) -> Outcome:
        raise NotImplementedError

    assert python_consumer(topic=ORDERS, group="billing")(more).group.name == "billing"


def test_a_checker_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="checker of topic bills is called with 1: checks"):
        transaction_checker(topic=BILLS)(handler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "a-b"}, "'a-b'"),
        ({"topics": [ORDERS, ORDERS]}, "orders and orders of pipeline p would be one asset"),
        ({"topics": [topic("a-b"), topic("a_b")]}, "a-b and a_b of pipeline p"),
        ({"consumers": [consumer(), consumer()]}, "billing and billing"),
        ({"consumers": [consumer("orders", topic=BILLS)]}, "orders and orders"),
        ({"topics": [topic("orders", queues=3)], "consumers": [consumer()]}, "declared twice"),
        (
            {"consumers": [consumer(n, sink="s", sink_schema=SINK) for n in ("a", "b")]},
            "have the sink s",
        ),
        ({"checkers": [transaction_checker(topic=BILLS)(checker)] * 2}, "two checkers"),
    ],
)
def test_a_wrong_pipeline_is_refused_where_it_is_declared(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Pipeline(**{"name": "p", "topics": [ORDERS], "consumers": [], **settings})


def test_what_is_declared_of_a_topic_counts(client: Client) -> None:
    client.create_topic("orders", partition_time="stored", retention_ms=86_400_000, queues=12)

    topic("orders", partition_time="born", deduplicate="message_id").ensure(client)
    fewer = client.describe_topic("orders")
    topic("orders", queues=16, retention_bytes=1 << 30).ensure(client)
    more = client.describe_topic("orders")

    assert (fewer["queues"], fewer["partition_time"], fewer["deduplicate"]) == (
        12,
        "born",
        "message_id",
    )
    assert (more["queues"], more["retention_ms"], more["retention_bytes"]) == (
        16,
        86_400_000,
        1 << 30,
    )


def test_what_is_not_declared_of_a_topic_stays(client: Client) -> None:
    kept: dict[str, Any] = {
        "partition_time": "stored",
        "deduplicate": "message_id",
        "deduplicate_window_ms": 5_000,
        "retention_ms": 86_400_000,
    }
    client.create_topic("orders", **kept)

    ORDERS.ensure(client)
    same = client.describe_topic("orders")
    topic("orders", deduplicate="key").ensure(client)
    changed = client.describe_topic("orders")

    assert {name: same[name] for name in kept} == kept
    assert {name: changed[name] for name in kept} == kept | {"deduplicate": "key"}


def test_a_new_topic_has_the_defaults(client: Client) -> None:
    ORDERS.ensure(client)

    made = client.describe_topic("orders")

    assert (made["partition_time"], made["deduplicate"]) == ("born", "none")
    assert made["deduplicate_window_ms"] == limits.DEDUPLICATE_WINDOW_MS


def test_what_is_declared_of_a_group_counts(client: Client) -> None:
    consumer(max_attempts=3, backoff_ms=(1_000,)).group.ensure(client)
    client.alter_group("billing", max_rate_per_s=5)

    consumer(max_attempts=7, backoff="exponential", on_failure="park").group.ensure(client)
    changed = client.describe_group("billing")

    assert (changed["max_attempts"], changed["on_failure"]) == (7, "park")
    assert changed["backoff"] != "customized"
    assert changed["max_rate_per_s"] == 5


@pytest.mark.parametrize(
    "backoff", [{"backoff_ms": limits.FORMER_BACKOFF_MS}, {"backoff": "exponential"}]
)
def test_a_backoff_that_is_not_declared_stays(client: Client, backoff: dict[str, Any]) -> None:
    client.create_group("billing", max_rate_per_s=50, **backoff)
    before = client.describe_group("billing")

    consumer(max_attempts=3).group.ensure(client)
    after = client.describe_group("billing")

    assert after == before | {"max_attempts": 3}


def test_what_an_operator_altered_of_a_group_stays(client: Client) -> None:
    consumer().group.ensure(client)
    altered: dict[str, Any] = {
        "max_attempts": 3,
        "on_failure": "park",
        "idempotency_window_ms": 60_000,
    }
    client.alter_group("billing", **altered)

    again = consumer().group.ensure(client)
    named = consumer(on_failure="dead_letter").group.ensure(client)

    assert {name: again[name] for name in altered} == altered
    assert {name: named[name] for name in altered} == altered | {"on_failure": "dead_letter"}


def test_what_cannot_be_altered_is_refused_with_the_command(client: Client) -> None:
    client.create_topic("orders", type="fifo")
    with pytest.raises(AlreadyExistsError, match="`rmq topic delete orders`"):
        ORDERS.ensure(client)
    client.delete_topic("orders")
    consumer().group.ensure(client)

    with pytest.raises(AlreadyExistsError, match="`rmq group delete billing`"):
        consumer(order_by="message_group").group.ensure(client)


def test_no_run_is_requested_while_a_declaration_is_refused(
    client: Client, resource: BrokerResource, instance: dg.DagsterInstance, send: Send
) -> None:
    consumer().group.ensure(client)
    send("orders", 3)

    def tick(reader: Consumer) -> dg.SensorResult:
        sensor = consumers_sensor([reader], name="messages", poll_s=0.0)
        with dg.build_sensor_context(instance=instance, resources={"broker": resource}) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    refused = tick(consumer(order_by="message_group"))
    changed = tick(consumer(max_attempts=3))

    assert not refused.run_requests
    assert "rmq group delete billing" in str(refused.skip_reason)
    assert len(changed.run_requests or []) == 1
    assert client.describe_group("billing")["max_attempts"] == 3


def test_a_pipeline_that_only_declares_topics_makes_them_as_declared(
    client: Client, resource: BrokerResource, instance: dg.DagsterInstance
) -> None:
    declared = [
        topic("parts", type="fifo", queues=3, retention_ms=86_400_000),
        topic("bills", type="transaction", queues=2),
    ]
    loaded = Pipeline("stock", topics=declared, consumers=[]).definitions()
    dg.Definitions.validate_loadable(loaded)

    sensor = loaded.resolve_sensor_def("stock_topics")
    with dg.build_sensor_context(instance=instance, resources={"broker": resource}) as context:
        sensor(context)

    parts, bills = client.describe_topic("parts"), client.describe_topic("bills")
    assert (parts["type"], parts["queues"], parts["retention_ms"]) == ("fifo", 3, 86_400_000)
    assert (bills["type"], bills["queues"]) == ("transaction", 2)


def test_a_group_outside_dagster_is_made_and_watched(
    client: Client, resource: BrokerResource, instance: dg.DagsterInstance
) -> None:
    group = consumer_group("billing", topic=ORDERS, order="message_group", max_attempts=3)
    pipeline = Pipeline("shop", topics=[ORDERS], consumers=[], groups=[group])
    loaded = definitions([pipeline], upkeep=False)

    sensor = loaded.resolve_sensor_def("shop_topics")
    with dg.build_sensor_context(instance=instance, resources={"broker": resource}) as context:
        sensor(context)

    assert client.describe_group("billing")["max_attempts"] == 3
    assert "orders" in client.due()["groups"]["billing"]["topics"]
    checks = {key.name for key in loaded.resolve_asset_graph().asset_check_keys}
    assert checks == {"no_loss", "oldest_unread", "dead_letters", "one_filter", "order"}


def test_a_group_outside_dagster_has_one_declaration() -> None:
    twice = consumer_group("billing", topic=ORDERS)

    with pytest.raises(ValueError, match="billing and billing of pipeline p"):
        Pipeline("p", topics=[ORDERS], consumers=[consumer()], groups=[twice])
