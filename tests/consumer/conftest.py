"""A broker under the real clock, in process and through Flight: consumers have threads."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.pull_consumer import PullConsumer
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
#: RocketMQ's, so much faster that tests need not wait for it.
FAST = Pace(
    balanced_s=0.5,
    unbalanced_s=0.05,
    gap_s=0.02,
    ask_s=0.01,
    let_go_s=10.0,
    renew_s=0.1,
    first_renew_s=0.05,
    look_s=0.05,
    fetch_ms=100,
)
NUMBERS = count()

Make = Callable[..., Any]
Open = Callable[..., PullConsumer]


@pytest.fixture(scope="session", params=["in_process", "flight"])
def shared_verbs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """A broker for all tests, which make topics and groups of their own."""
    home = tmp_path_factory.mktemp("consumers") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        if request.param == "in_process":
            yield broker
            return
        with FlightServer(broker) as server, Client(server.address) as client:
            yield cast(Broker, client)


@pytest.fixture
def verbs(shared_verbs: Broker) -> Broker:
    """The verbs as each endpoint offers them."""
    return shared_verbs


@pytest.fixture
def topic(verbs: Broker) -> Make:
    """``topic(queues=…)`` creates one and gives its name."""

    def create(**settings: Any) -> str:
        name = f"topic-{next(NUMBERS)}"
        verbs.create_topic(name, **settings)
        return name

    return create


@pytest.fixture
def group(verbs: Broker) -> Make:
    """``group(order=…)`` creates one and gives its name."""

    def create(**settings: Any) -> str:
        name = f"group-{next(NUMBERS)}"
        verbs.create_group(name, **settings)
        return name

    return create


def bodies(start: int, stop: int, **columns: Any) -> pa.Table:
    """Messages b"start" to b"stop"."""
    table: dict[str, Any] = {"body": [str(i).encode() for i in range(start, stop)]}
    for name, value in columns.items():
        table[name] = value if isinstance(value, list) else [value] * (stop - start)
    return pa.table(table, schema=pa.schema([schema.SEND.field(name) for name in table]))


@pytest.fixture
def reader(verbs: Broker, tmp_path: Path) -> Iterator[Open]:
    """``reader(group, …)``: a consumer at a test's pace, closed in the end."""
    consumers: list[PullConsumer] = []

    def make(group: str, **settings: Any) -> PullConsumer:
        chosen = {
            "pace": FAST,
            "start_from": "first",
            "auto_commit_ms": 20,
            "offsets_folder": tmp_path / "offsets",
            **settings,
        }
        consumers.append(PullConsumer(chosen.pop("verbs", verbs), group, **chosen))
        return consumers[-1]

    yield make
    for consumer in consumers:
        consumer.close()


def read(consumer: PullConsumer, count: int, **how: Any) -> list[int]:
    """The numbers of so many messages, as they come."""
    found: list[int] = []
    give_up_at = time.monotonic() + 60
    while len(found) < count and time.monotonic() < give_up_at:
        found += numbers(consumer.poll(0.2, **how))
    return found


def numbers(table: pa.Table) -> list[int]:
    return [int(body) for body in table["body"].to_pylist()]


def committed(verbs: Broker, group: str, topic: str) -> int:
    """The offset of queue 0 of a group that has begun."""
    return verbs.start_offsets(group, topic, where="last")[0]
