"""What clients measure is kept, and shown in the broker's status."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub

from rmq_pipeline import limits
from tests.rocketmq.consuming import Stand

CUMULATIVE, DELTA = 2, 1


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    yield stand
    stand.close()


@pytest.fixture
def export(stand: Stand) -> Iterator[Callable[..., Any]]:
    with grpc.insecure_channel(stand.endpoint.address) as channel:
        stub: Any = MetricsServiceStub(channel)  # type: ignore[no-untyped-call]

        def send(
            client_id: str, counts: list[int], total: float, temporality: int = CUMULATIVE
        ) -> Any:
            request = ExportMetricsServiceRequest()
            metric = request.resource_metrics.add().scope_metrics.add().metrics.add()
            metric.name = "rocketmq_send_cost_time"
            metric.histogram.aggregation_temporality = temporality
            point = metric.histogram.data_points.add(
                explicit_bounds=[1.0, 5.0, 10.0], bucket_counts=counts, sum=total
            )
            point.attributes.add(key="topic").value.string_value = "t"
            metadata = (("x-mq-client-id", client_id),) if client_id else ()
            return stub.Export(request, metadata=metadata, timeout=20)

        yield send


def test_latencies_of_all_clients_are_shown_together(
    stand: Stand, export: Callable[..., Any]
) -> None:
    assert stand.broker.status()["client_latencies"] == []

    export("one", [0, 9, 0, 0], 27.0)
    export("one", [0, 10, 0, 0], 30.0)
    export("two", [0, 0, 9, 1], 90.0)

    (row,) = stand.broker.status()["client_latencies"]
    assert (row["metric"], row["topic"]) == ("rocketmq_send_cost_time", "t")
    assert (row["clients"], row["count"], row["mean_ms"]) == (2, 20, 6.0)
    assert (row["p50_ms"], row["p99_ms"]) == (5.0, 10.0)


def test_what_came_since_the_last_time_is_added(stand: Stand, export: Callable[..., Any]) -> None:
    export("one", [1, 0, 0, 0], 0.5, DELTA)
    export("one", [1, 2, 0, 0], 6.5, DELTA)

    (row,) = stand.broker.status()["client_latencies"]
    assert (row["count"], row["mean_ms"]) == (4, 1.75)


def test_a_histogram_that_is_none_is_let_be(stand: Stand, export: Callable[..., Any]) -> None:
    export("one", [1], 1.0)
    export("two", [0, 1, 0, 0], float("nan"))

    assert stand.broker.status()["client_latencies"] == []


def test_who_does_not_say_who_it_is_is_refused(export: Callable[..., Any]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        export("", [0, 1, 0, 0], 1.0)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_too_much_at_once_is_refused(export: Callable[..., Any]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        export("one", [1] * (limits.GRPC_OTHER_BYTES // 8 + 1), 1.0)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
