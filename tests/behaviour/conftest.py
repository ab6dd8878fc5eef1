"""The endpoints the promises are tried through, under a clock that tests turn by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.settings import Settings
from tests.behaviour.halves import Producer
from tests.behaviour.over_grpc import OverGrpc
from tests.behaviour.speakable import MODULES, OTHERWISE
from tests.waiting import until

#: A factory of names or tables; what it takes is in the fixture of its name.
Make = Callable[..., Any]

#: Those that take tables have words for everything.
TABLE_ENDPOINTS = ("in_process", "flight")
ENDPOINTS = (*TABLE_ENDPOINTS, "grpc")
NUMBERS = count()
FAILED = pytest.StashKey[bool]()
#: Small files, so that logs roll and homes open fast.
SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)


class Endpoint:
    """A home, its broker, and the verbs as one endpoint offers them.

    ``broker`` has the verbs; it is another object after ``reopen``.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home
        self.clock = ManualClock()
        self.pool = ThreadPoolExecutor(8)
        self._stack = contextlib.ExitStack()
        self.open()

    def open(self, **settings: Any) -> Broker:
        """Open the home, and the endpoint in front of it; the verbs."""
        chosen = Settings(**{**SMALL.model_dump(), **settings})
        broker = self._stack.enter_context(
            Broker.open(self.home, clock=self.clock, upkeep="none", settings=chosen)
        )
        self.inside = broker
        self.broker = broker
        if self.name == "flight":
            server = self._stack.enter_context(FlightServer(broker))
            client = self._stack.enter_context(Client(server.address))
            self.broker = cast(Broker, client)
        if self.name == "grpc":
            self.grpc = GrpcEndpoint(broker)
            self._stack.callback(self.grpc.shutdown)
            self.broker = cast(
                Broker, self._stack.enter_context(OverGrpc(self.grpc.address, broker))
            )
        return self.broker

    def close(self) -> None:
        """Close the endpoint and the home."""
        self._stack.close()

    def end(self) -> None:
        """Close everything for good."""
        self.close()
        self.pool.shutdown()

    def reopen(self, **settings: Any) -> Broker:
        """Close everything and open it again, with other settings; the new verbs."""
        self.close()
        return self.open(**settings)

    def advance(self, milliseconds: int) -> None:
        """Move the broker's time forward."""
        self.clock.advance(milliseconds)

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call that waits in another thread; return once it waits for a moment in time."""
        before = self._moments(), self._polls()
        future = self.pool.submit(call)
        until(
            lambda: (
                future.done() or len(self._moments()) > len(before[0]) or self._polls() > before[1]
            )
        )
        return future

    def _polls(self) -> int:
        """Calls that wait at the gRPC endpoint, which takes no thread for each."""
        return len(self.grpc._service._context.bridge) if self.name == "grpc" else 0

    def _moments(self) -> list[int]:
        with self.clock._lock:
            return [at for _, at in self.clock._waiting.values() if at is not None]

    def max_offsets(self, topic: str) -> list[int]:
        """The next offset of every queue, by queue_id."""
        rows = self.broker.describe_topic(topic)["offsets"]
        return [row["max_offset"] for row in sorted(rows, key=lambda row: row["queue_id"])]

    def stored(self, topic: str) -> int:
        """How many messages the topic was ever given."""
        return sum(self.max_offsets(topic))

    def bodies(self, topic: str) -> list[bytes]:
        """Every body of the topic, queue by queue."""
        found: list[bytes] = []
        for queue_id, stop in enumerate(self.max_offsets(topic)):
            table = self.broker.read(topic, queue_id, offset=0, limit=max(stop, 1))
            found += table["body"].to_pylist()
        return found

    def drain(self, topic: str, group: str, *, limit: int = 10_000) -> list[bytes]:
        """Receive and acknowledge until nothing comes; the bodies as they came."""
        found: list[bytes] = []
        while (got := self.broker.receive(group, topic, limit=limit)).num_rows:
            self.broker.ack(got)
            found += got["body"].to_pylist()
        return found

    def sql(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query."""
        return cast(list[dict[str, Any]], self.broker.sql(query).to_pylist())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try a promise at the endpoints that have words for it, as tests/README.md says."""
    module = metafunc.module.__name__.rpartition(".")[2]
    speakable = module in MODULES and metafunc.function.__name__ not in OTHERWISE
    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint != "grpc" or speakable]
    mark = metafunc.definition.get_closest_marker
    if "shared_endpoint" in metafunc.fixturenames:
        name, usual = "shared_endpoint", endpoints[:1] if mark("one_endpoint") else endpoints
    elif "endpoint" in metafunc.fixturenames:
        name, usual = "endpoint", endpoints if mark("every_endpoint") else endpoints[:1]
    else:
        return
    cases = [
        pytest.param(each, marks=[pytest.mark.long] * (each not in usual)) for each in endpoints
    ]
    metafunc.parametrize(name, cases, indirect=True)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint over a home of its own."""
    endpoint = Endpoint(request.param, tmp_path / "home")
    yield endpoint
    endpoint.end()


@pytest.fixture(scope="session")
def open_endpoints() -> Iterator[dict[str, Endpoint]]:
    """Endpoints that tests share, by name."""
    endpoints: dict[str, Endpoint] = {}
    yield endpoints
    for endpoint in endpoints.values():
        endpoint.end()


@pytest.fixture
def shared_endpoint(
    request: pytest.FixtureRequest,
    open_endpoints: dict[str, Endpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Endpoint]:
    """Every endpoint in turn, over a home that other tests use too.

    For tests that only ask about topics and groups they have made themselves.
    """
    if request.param not in open_endpoints:
        home = tmp_path_factory.mktemp(request.param) / "home"
        open_endpoints[request.param] = Endpoint(request.param, home)
    yield open_endpoints[request.param]
    if request.node.stash.get(FAILED, False):
        open_endpoints.pop(request.param).end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that a test has failed: what it leaves behind is not for others."""
    report = yield
    if call.excinfo is not None:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Endpoint]:
    """The broker in process only, for what no other endpoint can show."""
    endpoint = Endpoint("in_process", tmp_path / "home")
    yield endpoint
    endpoint.end()


@pytest.fixture
def unused() -> str:
    """A name that nothing has."""
    return f"name-{next(NUMBERS)}"


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Make:
    """``topic(name=…, type=…, queues=…)`` creates one and gives its name."""

    def create(name: str | None = None, **settings: Any) -> str:
        name = name or f"topic-{next(NUMBERS)}"
        _current(request).broker.create_topic(name, **settings)
        return name

    return create


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Make:
    """``group(name=…, order=…, max_attempts=…, backoff_ms=…)`` creates one and gives its name."""

    def create(name: str | None = None, **settings: Any) -> str:
        name = name or f"group-{next(NUMBERS)}"
        _current(request).broker.create_group(name, **settings)
        return name

    return create


@pytest.fixture
def messages() -> Make:
    """``messages(n, groups=[…], **columns)``: bodies b"0", b"1", …; groups are dealt in turn.

    A column is a list of n values, or one value for every row.
    """

    def make(
        n: int, *, start: int = 0, groups: Sequence[str] | None = None, **columns: Any
    ) -> pa.Table:
        table: dict[str, Any] = {"body": [str(i).encode() for i in range(start, start + n)]}
        if groups is not None:
            table["message_group"] = [groups[i % len(groups)] for i in range(n)]
        for name, value in columns.items():
            table[name] = value if isinstance(value, list) else [value] * n
        fields = [schema.SEND.field(name) for name in table]
        return pa.table(table, schema=pa.schema(fields))

    return make


@pytest.fixture
def outcomes() -> Make:
    """``outcomes(received, outcome, retry_after_ms=…, reason=…, …)``: one outcome for every row."""

    def make(
        received: pa.Table,
        outcome: str | Sequence[str],
        retry_after_ms: int | None = None,
        reason: str | None = None,
        error_type: str | None = None,
        run_id: str | None = None,
    ) -> pa.Table:
        n = received.num_rows
        columns = [
            received["receipt_handle"].to_pylist(),
            [outcome] * n if isinstance(outcome, str) else list(outcome),
            [retry_after_ms] * n,
            [reason] * n,
            [error_type] * n,
            [run_id] * n,
        ]
        # By name: OUTCOME may have more columns than a test cares for.
        names = [field.name for field in schema.OUTCOME][: len(columns)]
        return pa.table(columns, schema=pa.schema([schema.OUTCOME.field(n) for n in names]))

    return make


@pytest.fixture
def fail(outcomes: Make, request: pytest.FixtureRequest) -> Make:
    """``fail(group, received, retry_after_ms=…, reason=…)``: every message failed."""

    def settle(group: str, received: pa.Table, **how: Any) -> dict[str, Any]:
        return _current(request).broker.settle(group, outcomes(received, "retry", **how))

    return settle


@pytest.fixture
def dead(request: pytest.FixtureRequest, topic: Make, group: Make, messages: Make) -> Make:
    """``dead(n, groups=[…], **settings)``: topic and group, in which n messages have died."""

    def make(
        n: int, *, groups: list[str] | None = None, more: int = 0, **settings: Any
    ) -> tuple[str, str]:
        endpoint = _current(request)
        name = topic(queues=1, type="normal" if groups is None else "fifo")
        readers = group(order="none" if groups is None else "message_group", **settings)
        ids = [f"m-{i}" for i in range(n + more)]
        endpoint.broker.send(name, messages(n + more, groups=groups, message_id=ids))
        while n:
            got = endpoint.broker.receive(readers, name, limit=n)
            endpoint.broker.forward_to_dead_letter_queue(got, reason="boom")
            n -= got.num_rows
        return name, readers

    return make


@pytest.fixture
def orders(topic: Make) -> str:
    """A topic for transactions."""
    return str(topic(type="transaction", queues=1))


@pytest.fixture
def begin(endpoint: Endpoint, orders: str, messages: Make) -> Producer:
    """``begin(n, …)``: half messages of that topic, as ``Producer`` takes them."""
    return Producer(endpoint, orders, messages)


def _current(request: pytest.FixtureRequest) -> Endpoint:
    name = "inside" if "inside" in request.fixturenames else "endpoint"
    return cast(Endpoint, request.getfixturevalue(name))
