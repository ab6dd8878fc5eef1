"""The dashboard and the alert rules name series that a broker has."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.background import NoteFallback
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.metrics.declared import METRICS
from rmq_pipeline.metrics.exposition import exposition
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.settings import Settings
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.metrics.samples import bodies, counted, value, work

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "rmq.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
_SERIES = re.compile(r"\b(?:rmq|rocketmq)_[a-z0-9_]+")
#: Metrics with a sample only while such a client is connected to the gRPC endpoint.
_OF_CLIENTS = {"rocketmq_producer_connections"}


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression is, and its text."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


@cache
def exposed(home: Path) -> str:
    """The text of a broker that has worked a bit, at both endpoints."""
    clock = ManualClock()
    with (
        Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker,
        FlightServer(broker) as server,
        Client(server.address) as client,
    ):
        grpc = GrpcEndpoint(broker)
        try:
            work(broker, clock)
            client.heartbeat("billing", "c", topics=["orders"], details={})
            broker.engine.submit(NoteFallback("seal", 1, {}))
            with Raw(grpc.address) as connected:
                sent = connected("SendMessage", raw.sends(raw.message("orders", b"one")))
                assert raw.code(sent) == "OK"
            counted(broker, "rmq_calls_total", 1, protocol="grpc", verb="SendMessage")
            counted(broker, "rmq_upkeep_fallbacks_total", 1, upkeep_job="seal")
            return exposition(client.metrics()).decode()
        finally:
            grpc.shutdown()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return exposed(tmp_path_factory.mktemp("deploy") / "home")


def test_the_text_parses_with_the_parser_of_prometheus(text: str) -> None:
    families = {each.name: each for each in text_string_to_metric_families(text)}

    for metric in METRICS:
        name = metric.name.removesuffix("_total") if metric.type == "counter" else metric.name
        if metric.name not in _OF_CLIENTS:
            assert families[name].type == metric.type
            assert families[name].documentation == metric.help
            labels = set(families[name].samples[0].labels) - {"le"}
            assert labels == set(metric.labels)


def test_each_series_of_dashboard_and_alerts_is_there(text: str) -> None:
    there = {
        sample.name for each in text_string_to_metric_families(text) for sample in each.samples
    }
    asked = [(where, name) for where, text in expressions() for name in _SERIES.findall(text)]

    assert len(asked) > 50
    missing = [each for each in asked if each[1] not in there | _OF_CLIENTS]
    assert not missing


def test_the_dashboard_shows_each_metric_that_changes() -> None:
    shown = {name for _, expression in expressions() for name in _SERIES.findall(expression)}
    parts = ("", "_bucket", "_sum", "_count")

    left = [
        metric.name for metric in METRICS if not any(metric.name + part in shown for part in parts)
    ]

    assert left == [
        "rocketmq_storage_size_bytes",
        "rmq_start_time_seconds",
        "rmq_clock_ahead_milliseconds",
    ]


def test_panels_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells


def test_alerts_have_what_an_operator_needs() -> None:
    rules: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]

    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"].endswith(".")


def test_calls_count_by_outcome(home: Path) -> None:
    with (
        Broker.open(home, upkeep="none", settings=SMALL) as broker,
        FlightServer(broker) as server,
        Client(server.address) as client,
    ):
        client.create_topic("t")
        client.send("t", bodies(b"x"))
        with pytest.raises(Exception, match="no topic"):
            client.send("other", bodies(b"x"))

        verb = {"protocol": "flight", "verb": "send"}
        counted(broker, "rmq_calls_total", 1, **verb, outcome="ok")
        found = counted(broker, "rmq_calls_total", 1, **verb, outcome="TopicNotFoundError")

    assert value(found, "rmq_call_seconds", part="count", **verb) == 2
