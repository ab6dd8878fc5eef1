"""What the store's tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from rmq_pipeline.limits import MIB
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.log.commit_log import CommitLog
from tests.store.log_batches import SCHEMAS, OpenLog


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[OpenLog]:
    """Opens the log of this test, again and again; small files, no reserve unless asked for."""
    opened: list[CommitLog] = []

    def open_it(folder: Path = tmp_path / "log", **settings: Any) -> CommitLog:
        given = {"schemas": SCHEMAS, "file_bytes": 64 << 10, "reserve_bytes": 0, **settings}
        opened.append(CommitLog.open(folder, **given))
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()


class OpenDatabase(Protocol):
    """Opens the database of this test, again and again."""

    def __call__(self, **how: Any) -> Database: ...


@pytest.fixture
def open_database(tmp_path: Path) -> Iterator[OpenDatabase]:
    opened: list[Database] = []

    def open_it(**how: Any) -> Database:
        if opened:
            opened[-1].close()
        opened.append(Database.open(tmp_path / "state.duckdb", memory_bytes=128 * MIB, **how))
        return opened[-1]

    yield open_it
    if opened:
        opened[-1].close()
