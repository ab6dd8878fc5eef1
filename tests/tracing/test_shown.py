"""The trace of a message on its page, and in ``rmq trace``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import checked
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from rmq_pipeline.web.server import PageServer, Where
from tests.web.conftest import Visitor

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = f"00-{TRACE}-00f067aa0ba902b7-01"
HOSTILE = '00-"><script>alert(1)</script>-00f067aa0ba902b7-01'
URL = "https://jaeger.example/trace/{trace_id}?a=1&b=2"


@pytest.fixture(params=[URL, None])
def address(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20, trace_url=request.param)
    with Broker.open(home, upkeep="none", settings=settings) as broker:
        broker.create_topic("t", queues=1)
        own = [[("TRACE_CONTEXT", CONTEXT)], [("TRACE_CONTEXT", HOSTILE)], None]
        fields = [schema.SEND.field(name) for name in ("body", "message_id", "properties")]
        columns = [[b"x"] * 3, ["traced", "hostile", "plain"], own]
        broker.send("t", pa.table(columns, schema=pa.schema(fields)))
        with FlightServer(broker) as server:
            yield server.address


def told(address: str, message_id: str) -> dict[str, Any]:
    """The first step that ``rmq trace`` prints."""
    code = "import sys; from rmq_pipeline.cli import main; main()"
    found = subprocess.check_output(
        [sys.executable, "-c", code, "trace", message_id, "--json", "--flight", address]
    )
    first: dict[str, Any] = json.loads(found)[0]
    return first


def test_a_message_leads_to_its_trace(address: str, request: pytest.FixtureRequest) -> None:
    has_url = request.node.callspec.params["address"] is not None
    with PageServer(Where(address).connect, "127.0.0.1:0") as server:
        visitor = Visitor(server.url)
        pages = {name: visitor.get(f"/messages/{name}") for name in ("traced", "hostile", "plain")}

    assert f"Trace {TRACE}" in pages["traced"].text
    link = f'href="https://jaeger.example/trace/{TRACE}?a=1&amp;b=2" rel="noopener noreferrer"'
    assert (link in pages["traced"].html) == has_url
    assert "<script>alert" not in pages["hostile"].html
    for name in ("hostile", "plain"):
        assert 'class="trace"' not in pages[name].html
    traced, hostile = told(address, "traced"), told(address, "hostile")
    assert traced["trace_id"] == TRACE
    assert traced.get("trace_url") == (URL.replace("{trace_id}", TRACE) if has_url else None)
    assert hostile.get("trace_id") is None


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert('{trace_id}')",
        "https://jaeger.example/trace/",
        "https://jaeger.example/'{trace_id}",
        'https://jaeger.example/{trace_id}"><script>',
        "https://{trace_id}/",
        "//jaeger.example/{trace_id}",
        "https://jaeger.example/ {trace_id}",
        "https://jaeger.example/{trace_id}\n",
        "https://user@jaeger.example/{trace_id}",
    ],
)
def test_a_template_is_a_url_with_a_place(url: str) -> None:
    with pytest.raises(RequestError, match="trace_url"):
        checked({"trace_url": url})


PASSWORD = "correct-horse-battery"


@pytest.mark.parametrize(
    ("policies", "sees"),
    [
        ({"cluster:*": ["get"]}, ""),
        ({"cluster:*": ["get"], "topic:t": ["sub"]}, "id and link"),
        ({"topic:t": ["get", "sub"]}, "refused"),
    ],
)
def test_a_trace_needs_get_on_the_cluster_and_sub_on_the_topic(
    home: Path, policies: dict[str, list[str]], sees: str
) -> None:
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20, trace_url=URL)
    with Broker.open(home, upkeep="none", settings=settings) as broker:
        broker.create_topic("t", queues=1)
        own = pa.array([[("TRACE_CONTEXT", CONTEXT)]], schema.PROPERTIES)
        broker.send("t", pa.table({"body": [b"x"], "message_id": ["m"], "properties": own}))
        broker.create_user("root", password=PASSWORD, type="super")
        broker.create_user("ann", password=PASSWORD)
        for resource, actions in policies.items():
            broker.put_policy("ann", resource=resource, actions=actions)
        with (
            FlightServer(broker, access=broker.access) as server,
            PageServer(Where(server.address).connect, "127.0.0.1:0") as page,
        ):
            visitor = Visitor(page.url)
            visitor.sign_in("ann", PASSWORD)
            answer = visitor.get("/messages/m")

    assert (answer.status == 403) == (sees == "refused")
    assert (f"Trace {TRACE}" in answer.text) == (sees == "id and link")
    assert (f"jaeger.example/trace/{TRACE}" in answer.html) == (sees == "id and link")
