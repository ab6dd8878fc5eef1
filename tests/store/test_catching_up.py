"""Homes of several versions that share one log in PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.errors import HomeFormatError, StorageError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log import recovery
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.engines.postgres_store import PostgresStore
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES
from rmq_pipeline.store.log.replication import Replication
from rmq_pipeline.store.log.shared_log import LeadingLog
from tests.postgres_server import PostgresServer

OLD = pa.schema([("a", pa.int64())])
NEW = pa.schema([("a", pa.int64()), ("b", pa.string())])
Open = Callable[..., CommitLog]


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def open_log(tmp_path: Path, database: str) -> Iterator[Open]:
    open_ones: list[tuple[CommitLog | None, Replication]] = []

    def close_all() -> None:
        while open_ones:
            commit_log, replication = open_ones.pop()
            if commit_log is not None:
                commit_log.close()
            replication.close()

    def open_it(home: str, schema: pa.Schema) -> CommitLog:
        """End the last leader, and lead with a home of the version that has these columns."""
        close_all()
        store = PostgresStore(database, timeout_s=2.0, lease_s=0.5, home_format=1)
        store.look()
        store.claim(seconds=5.0)
        replication = Replication(store, mode="sync", lease_s=0.5, timeout_s=2.0, behind_bytes=MIB)
        replication.start()
        open_ones.append((None, replication))
        found = LeadingLog.open(
            tmp_path / home,
            schemas={1: schema},
            file_bytes=MIB,
            reserve_bytes=0,
            replication=replication,
            answered_alone=False,
        )
        open_ones[-1] = (found, replication)
        return found

    yield open_it
    close_all()


def write(commit_log: CommitLog, **columns: list[Any]) -> None:
    schema = commit_log.schemas[1]
    commit_log.stage(1, pa.record_batch([columns[name] for name in schema.names], schema=schema))
    commit_log.commit()


def rows(commit_log: CommitLog) -> list[dict[str, Any]]:
    frames = commit_log.frames(0, commit_log.end)
    return [row for _, found in frames for each in found for row in each.batch.to_pylist()]


def test_an_empty_home_reads_the_frames_of_an_older_version(open_log: Open) -> None:
    write(open_log("first", OLD), a=[1])
    write(open_log("first", NEW), a=[2], b=["x"])

    second = open_log("second", NEW)
    write(second, a=[3], b=["y"])

    expected = [{"a": 1, "b": None}, {"a": 2, "b": "x"}, {"a": 3, "b": "y"}]
    assert rows(second) == expected
    assert rows(open_log("second", NEW)) == expected
    assert rows(open_log("third", NEW)) == expected


def test_an_empty_home_of_a_newer_version_goes_on_after_older_frames(open_log: Open) -> None:
    write(open_log("first", OLD), a=[1])

    second = open_log("second", NEW)
    write(second, a=[2], b=["x"])

    expected = [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    assert rows(second) == expected
    assert rows(open_log("third", NEW)) == expected


@pytest.mark.parametrize("home", ["old", "empty"])
def test_an_older_version_does_not_drop_newer_columns(open_log: Open, home: str) -> None:
    write(open_log("old", OLD), a=[1])
    write(open_log("first", NEW), a=[2], b=["x"])

    with pytest.raises(HomeFormatError, match="other columns"):
        open_log(home, OLD)


def test_a_newer_leader_that_wrote_nothing_leaves_the_log_to_an_older_one(open_log: Open) -> None:
    write(open_log("first", OLD), a=[1])
    open_log("first", NEW)

    write(open_log("second", OLD), a=[2])

    assert rows(open_log("third", NEW)) == [{"a": 1, "b": None}, {"a": 2, "b": None}]


def test_frames_that_only_an_older_home_has_are_stored_with_its_columns(
    open_log: Open, postgres: PostgresServer, database: str
) -> None:
    first = open_log("first", OLD)
    write(first, a=[1])
    write(first, a=[2])
    open_log("second", OLD)  # ends the first one
    # As after a kill between the local write and the append.
    postgres.execute("DELETE FROM rmq_log.frames WHERE position > 0", url=database)

    write(open_log("first", NEW), a=[3], b=["x"])

    expected = [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": "x"}]
    assert rows(open_log("third", NEW)) == expected


@pytest.mark.parametrize("schema", [OLD, NEW], ids=["same", "newer"])
@pytest.mark.parametrize("large", [False, True])
def test_a_power_cut_while_a_home_catches_up_is_mended_by_the_next_start(
    open_log: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: pa.Schema, large: bool
) -> None:
    first = open_log("first", OLD)
    write(first, a=[0])
    open_log("second", OLD)  # has the first frame
    first, ends = open_log("first", OLD), []
    for number in range(1, 5):
        write(first, a=[number] * (100_000 if large else 1))
        ends.append(first.end)
    expected = len(rows(first))
    open_log("third", OLD)  # ends the first one

    def cut(_: CommitLog) -> None:
        raise OSError("a power cut")

    with monkeypatch.context() as during:
        during.setattr(CommitLog, "sync", cut)
        during.setattr(CommitLog, "close", CommitLog._let_go)
        with pytest.raises(StorageError, match="a power cut"):
            open_log("second", schema)
    damage(tmp_path / "second", ends)  # the next frames reached the disk

    again = open_log("second", schema)

    assert len(rows(again)) == expected
    assert not (tmp_path / "second" / recovery.PULLING_FILE).exists()


def damage(home: Path, ends: list[int]) -> None:
    """Overwrite the second frame that was taken over, if a file has it."""
    for path in home.glob("*.log"):
        at = FILE_HEADER_BYTES + ends[0] - int(path.stem)
        if FILE_HEADER_BYTES <= at < path.stat().st_size:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(ends[1] - ends[0]))


def test_a_frame_that_was_never_answered_is_not_kept_where_the_store_was_trimmed(
    open_log: Open, postgres: PostgresServer, database: str
) -> None:
    first = open_log("first", OLD)
    write(first, a=[1])
    unanswered = first.end
    write(first, a=[2])
    end = first.end
    open_log("second", OLD)  # ends the first one
    # As if the first leader had died between the local write and the append.
    postgres.execute(f"DELETE FROM rmq_log.frames WHERE position >= {unanswered}", url=database)
    second = open_log("third", OLD)
    write(second, a=[3])
    assert second.end == end
    write(second, a=[4])
    postgres.execute(f"DELETE FROM rmq_log.frames WHERE position < {end}", url=database)

    with pytest.raises(DivergedLogError, match="away for too long"):
        open_log("first", OLD)
