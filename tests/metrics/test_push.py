"""A collector that speaks OTLP gets the same figures as a scrape."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import checked
from rmq_pipeline.metrics.declared import METRICS, Samples
from rmq_pipeline.metrics.push import Push, url_of
from rmq_pipeline.settings import Settings
from tests.metrics.samples import bodies, counted, work
from tests.tracing.collector import Collector
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture
def pushing(collector: Collector) -> Iterator[Callable[..., Push]]:
    """Returns a push of samples, only when it is asked to push."""
    with contextlib.ExitStack() as ending:

        def push(samples: Callable[[], pa.Table]) -> Push:
            found = Push(collector.url, interval_s=3600, home="h", samples=samples)
            ending.callback(found.shutdown)
            return found

        yield push


def test_a_push_has_each_sample_of_the_table(home: Path, collector: Collector) -> None:
    clock = ManualClock()
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        work(broker, clock)
        table = counted(broker, "rmq_scheduled_delivered_total", 2)
        push = Push(collector.url, interval_s=3600, home=str(home), samples=lambda: table)
        assert push.push_now()
        push.shutdown()

    assert collector.paths[0] == "/v1/metrics"
    found = collector.values()
    kinds = {metric.name: metric.type for metric in METRICS}
    for row in table.to_pylist():
        name = f"{row['name']}_{row['part']}" if row["part"] else row["name"]
        kind, value = found[name, frozenset(row["labels"])]
        assert value == row["value"]
        assert kind == ("gauge" if kinds[row["name"]] == "gauge" else "sum")
    assert len(found) == table.num_rows
    resource = {
        each.key: each.value.string_value
        for each in collector.requests[-1].resource_metrics[0].resource.attributes
    }
    assert resource["service.name"] == "rmq_pipeline"
    assert resource["service.instance.id"] == str(home)
    units = {
        metric.name: metric.unit
        for metric in collector.requests[-1].resource_metrics[0].scope_metrics[0].metrics
    }
    assert units["rocketmq_consumer_lag_latency_milliseconds"] == "milliseconds"


def test_each_label_set_is_pushed_however_many_there_are(
    collector: Collector, pushing: Callable[..., Push]
) -> None:
    many = 2_500  # the SDK's instruments merge those beyond 2,000
    found = Samples()
    for number in range(many):
        found.add("rmq_messages", number, f"topic-{number}", "false")

    assert pushing(found.to_table).push_now()

    assert sorted(value for _, value in collector.values().values()) == list(range(many))


def test_each_push_looks_once_and_series_of_deleted_topics_go(
    collector: Collector, pushing: Callable[..., Push]
) -> None:
    looks: list[str] = []

    def samples() -> pa.Table:
        looks.append(f"topic-{len(looks)}")
        found = Samples()
        found.add("rmq_messages", 1, looks[-1], "false")
        found.add("rocketmq_messages_in_total", 1, looks[-1], "normal", "false")
        return found.to_table()

    push = pushing(samples)
    assert push.push_now()
    assert push.push_now()

    assert len(looks) == 2
    labels = [dict(labels) for _, labels in collector.values()]
    assert [each["topic"] for each in labels] == ["topic-1", "topic-1"]


def test_a_push_that_the_collector_refuses_is_no_success(
    collector: Collector, pushing: Callable[..., Push]
) -> None:
    push = pushing(Samples().to_table)
    collector.status = 400
    assert not push.push_now()

    collector.status = 200

    assert push.push_now()


def test_pushes_go_on_after_one_that_failed(collector: Collector) -> None:
    looks: list[int] = []

    def samples() -> pa.Table:
        looks.append(len(looks))
        if len(looks) == 1:
            raise ZeroDivisionError
        return Samples().to_table()

    push = Push(collector.url, interval_s=0.01, home="h", samples=samples)
    try:
        until(lambda: len(collector.requests) > 1)
    finally:
        push.shutdown()


def test_a_served_broker_pushes_by_its_setting(home: Path, collector: Collector) -> None:
    settings = {"otlp_endpoint": collector.url, "otlp_interval_s": 1}
    process.start(home, settings=settings)
    try:
        with Client(home=home) as client:
            client.create_topic("t")
            client.send("t", bodies(b"abc"))
            key = frozenset({("topic", "t"), ("message_type", "normal"), ("is_system", "false")})
            name = "rocketmq_messages_in_total"
            until(
                lambda: (
                    bool(collector.requests) and collector.values().get((name, key)) == ("sum", 1.0)
                )
            )
    finally:
        process.stop(home)


def test_a_broker_stops_though_its_collector_is_gone(home: Path) -> None:
    process.start(home, settings={"otlp_endpoint": "http://127.0.0.1:9", "otlp_interval_s": 1})

    assert process.stop(home, timeout_s=30) is not None


def test_a_collector_is_named_by_its_url() -> None:
    assert url_of("http://collector:4318") == "http://collector:4318/v1/metrics"
    assert url_of("http://collector:4318/") == "http://collector:4318/v1/metrics"
    assert url_of("https://host/otlp/v1/metrics") == "https://host/otlp/v1/metrics"
    with pytest.raises(RequestError, match="otlp_endpoint"):
        checked({"otlp_endpoint": "collector:4318"})
