"""A consumer that numbers the messages of each group, and one window of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa

from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import Consumer, ConsumerConfig, Declaration
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource

NUMBERS = topic("numbers", type="fifo")
SQUARES = topic("squares")
STATE = pa.schema([("seen", pa.int64())])
COUNT = pa.schema(
    [("message_group", pa.string()), ("number", pa.int64()), ("born_at_ms", pa.int64())]
)


def handler(messages: pa.Table, state: pa.Table) -> Outcome:
    """Number the messages of a group."""
    seen = state["seen"][0].as_py() if state.num_rows else 0
    n = messages.num_rows
    group = messages["message_group"]
    if messages["body"][0].as_py() == b"bad":
        raise ValueError("a bad message")
    numbers = pa.array(range(seen + 1, seen + n + 1), pa.int64())
    return Outcome(
        rows=pa.table([group, numbers, messages["born_at_ms"]], schema=COUNT),
        state=pa.table([pa.array([seen + n], pa.int64())], schema=STATE),
        publish={"squares": pa.table({"body": messages["body"]})},
    )


def declared(decorator: type[Declaration], **changes: Any) -> Declaration:
    """The decorator of the consumer ``counter``."""
    settings: dict[str, Any] = {
        "topic": NUMBERS,
        "group": "counter",
        "order_by": "message_group",
        "state": STATE,
        "sink": "counter",
        "sink_schema": COUNT,
        "publishes": [SQUARES],
        "max_attempts": 2,
        "backoff_ms": [1],
    }
    return decorator(**{**settings, **changes})


def window(
    consumer: Consumer,
    resource: BrokerResource,
    root: Path,
    *,
    idle_s: float = 3.0,
    **resources: Any,
) -> dict[str, Any]:
    """Run one; the metadata of its last observation or materialization."""
    result = dg.materialize(
        [consumer.asset, *consumer.checks],
        resources={"broker": resource, "sinks": SinkResource(root=str(root)), **resources},
        run_config=dg.RunConfig(ops={"counter": ConsumerConfig(idle_seconds=idle_s)}),
    )
    assert all(
        check.severity == dg.AssetCheckSeverity.WARN or check.passed
        for check in result.get_asset_check_evaluations()
    )
    events = [
        event.asset_observation_data.asset_observation
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    ] + [*result.asset_materializations_for_node("counter")]
    return {name: value.value for name, value in events[-1].metadata.items()}
