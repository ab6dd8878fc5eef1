"""Brokers that share a log in PostgreSQL, and its archive."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from tests.broker.archived_log import LEASE_MS, Open, wake
from tests.broker.sealed_home import MIB
from tests.object_store import ObjectStore
from tests.postgres_server import PostgresServer


@pytest.fixture(params=["folder", "bucket"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty archive."""
    if request.param == "folder":
        return str(tmp_path / "archive")
    store: ObjectStore = request.getfixturevalue("object_store")
    return store.address(f"archive-{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_broker(tmp_path: Path, database: str, clock: ManualClock) -> Iterator[Open]:
    opened: list[Broker] = []

    def open_it(home: str, archive: str | None, *, standby: bool = False, **changed: Any) -> Broker:
        settings = Settings(
            archive_root=archive,
            **{
                "log_store": database,
                "log_file_bytes": MIB,
                "reserve_bytes": MIB,
                "log_lease_ms": LEASE_MS,
                "log_timeout_ms": 1000,
                "seal_after_ms": 0,
                "snapshot_events": 50,
                "compact_min_inputs": 2,
                "replaced_grace_ms": 0,
                **changed,
            },
        )
        opened.append(
            Broker.open(
                tmp_path / home, clock=clock, upkeep="none", settings=settings, standby=standby
            )
        )
        return opened[-1]

    yield open_it
    for broker in opened:
        wake(broker)
        broker.close()
