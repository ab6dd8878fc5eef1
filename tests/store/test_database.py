"""What the database answers, and what is left of it after closing, a crash, and expiry."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.errors import QueryError, StorageError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.consume_queue import Search
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import (
    START_MS,
    dispatch,
    events,
    hash_of,
    message,
    messages,
    on_queue,
    rows_of,
)


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    return open_database()


def test_reopening_finds_what_was_dispatched(open_database: OpenDatabase) -> None:
    database = open_database()
    dispatch(
        database,
        [events(rows.topic(2, "t"), rows.group(1, "g"))],
        [messages(message(2, 0, 0), message(2, 0, 1)), events(on_queue(Kind.LEASE, 0))],
    )
    before = database.load_state()

    again = open_database()

    assert again.dispatched == database.dispatched > 0
    assert again.load_state() == before
    assert again.index(2, 0, start=0, stop=9).row.tolist() == [0, 1]


def _dispatch_and_die(path: Path) -> None:
    database = Database.open(path, memory_bytes=128 * MIB)
    for i in range(5):
        dispatch(database, [messages(message(2, 0, i)), events(on_queue(Kind.LEASE, i))])
    os._exit(9)


def test_a_crash_loses_nothing_that_was_dispatched(tmp_path: Path) -> None:
    path = tmp_path / "state.duckdb"
    process = multiprocessing.get_context("spawn").Process(target=_dispatch_and_die, args=(path,))

    process.start()
    process.join()

    database = Database.open(path, memory_bytes=128 * MIB)
    assert process.exitcode == 9
    assert rows_of(database.load_state().heads) == [(2, 0, 0, 5)]
    assert database.load_state().leases.num_rows == 5
    assert database.dispatched == 5 * 320
    database.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.duckdb"
    path.write_bytes(b"no database" * 1000)

    with pytest.raises(StorageError, match=r"state\.duckdb"):
        Database.open(path, memory_bytes=128 * MIB)


def test_index_is_a_range_of_one_queue(database: Database) -> None:
    sent = [message(2, i % 2, i // 2, message_group=f"g{i}", tag=f"t{i % 4}") for i in range(20)]
    dispatch(database, [messages(*sent)], [messages(message(3, 1, 0))])

    page = database.index(2, 1, start=3, stop=7)

    assert page.base == 3
    assert page.position.tolist() == [64] * 4
    assert page.row.tolist() == [7, 9, 11, 13]
    assert page.message_group_hash.tolist() == [hash_of(f"g{i}") for i in (7, 9, 11, 13)]
    assert page.tag_hash.tolist() == [hash_of(f"t{i % 4}") for i in (7, 9, 11, 13)]


def test_index_beyond_what_there_is_is_short_or_empty(database: Database) -> None:
    dispatch(database, [messages(message(2, 0, 0), message(2, 0, 1, tag=None))])

    assert database.index(2, 0, start=1, stop=100).row.tolist() == [1]
    assert database.index(2, 0, start=1, stop=100).tag_hash.tolist() == [0]
    assert database.index(2, 0, start=5, stop=100).row.tolist() == []
    assert database.index(9, 0, start=0, stop=100).base == 0


def groups_of(n: int) -> list[rows.Row]:
    """A queue where of every six messages group big owns five and small one."""
    return [message(2, 0, i, message_group="small" if i % 6 == 5 else "big") for i in range(n)]


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_backlog_is_the_first_messages_of_each_group(
    database: Database, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("rmq_pipeline.store.consume_queue._BACKLOG_ROWS", 8)
    sent = groups_of(120)
    dispatch(database, [messages(*sent[:70])], [messages(*sent[70:]), messages(message(2, 1, 0))])
    starts = {"small": 20, "big": 50}
    expected = [
        (hash_of(name), row["queue_offset"])
        for name, start in starts.items()
        for row in [
            row
            for row in sent
            if row["message_group"] == name and start <= row["queue_offset"] < 110
        ][:limit]
    ]

    found, offsets = database.backlog(
        2,
        0,
        hashes=np.array([hash_of(name) for name in starts]),
        starts=np.array(list(starts.values())),
        stop=110,
        limit=limit,
    )

    assert sorted(zip(found.tolist(), offsets.tolist(), strict=True)) == sorted(expected)
    assert offsets.tolist() == sorted(offsets.tolist())


def test_backlog_of_no_groups_is_empty(database: Database) -> None:
    none = np.zeros(0, np.int64)

    found, offsets = database.backlog(2, 0, hashes=none, starts=none, stop=10, limit=5)

    assert len(found) == len(offsets) == 0


def test_a_search_gives_the_first_offsets_of_a_queue(database: Database) -> None:
    keys = [None, ["a"], ["b", "a"], None, ["a"]]
    stored = [message(2, 0, i, stored_at_ms=10 * i, keys=keys[i]) for i in range(5)]
    dispatch(database, [messages(*stored, message(2, 1, 0, stored_at_ms=40, keys=["a"]))])

    def found(**wanted: Any) -> list[int]:
        where = {"topic_id": 2, "queue_id": 0, "start": 0, "stop": 5, "limit": 9}
        return list(database.find(Search(**(where | wanted))))

    assert found(key="a") == [1, 2, 4]
    assert found(key="a", limit=2) == [1, 2]
    assert found(key="a", start=2, stop=4) == [2]
    assert found(message_id="m-2-0-3") == [3]
    assert found(message_id="m-2-0-3", key="a") == []
    assert [found(from_ms=at, limit=1) for at in (0, 1, 40, 41)] == [[0], [1], [4], []]
    assert found(from_ms=10, to_ms=30) == [1, 2]
    assert found(queue_id=7, from_ms=0) == []


def test_events_are_exported_in_their_order_and_then_go(database: Database, tmp_path: Path) -> None:
    for i in range(3):
        dispatch(database, [events(*(on_queue(Kind.LEASE, 2 * i + j) for j in range(2)))])
    to_position = 2 * 192
    file = tmp_path / "events.parquet"

    exported = database.export_events(to_position, file)
    database.delete_events(to_position)

    written = pq.read_table(file)
    assert exported == written.num_rows == 4
    assert written.column("queue_offset").to_pylist() == [0, 1, 2, 3]
    assert written.column("position").to_pylist() == [64, 64, 256, 256]
    left = database.query("SELECT queue_offset FROM events ORDER BY ALL", timeout_s=30)
    assert rows_of(left) == [(4,), (5,)]
    assert database.load_state().leases.num_rows == 6


def test_expired_messages_go_and_the_queue_begins_after_them(database: Database) -> None:
    dispatch(database, [messages(*(message(2, q, i) for q in (0, 1) for i in range(10)))])

    gone = [on_queue(Kind.EXPIRED, 4, group_id=0), on_queue(Kind.EXPIRED, 99, queue_id=1)]
    dispatch(database, [events(*gone)])

    assert rows_of(database.load_state().heads) == [(2, 0, 4, 10), (2, 1, 10, 10)]
    assert database.index(2, 0, start=0, stop=6).base == 4
    assert len(database.index(2, 1, start=0, stop=99).row) == 0


def test_a_deleted_topic_leaves_its_history_alone(database: Database) -> None:
    dispatch(
        database,
        [events(rows.topic(2, "t"), rows.topic(3, "u"), rows.group(1, "g"))],
        [
            messages(message(2, 0, 0), message(3, 0, 0)),
            events(on_queue(Kind.LEASE, 0), on_queue(Kind.LEASE, 0, topic_id=3)),
            rows.keyed([{"message_group": "a", "n": 1}], n=pa.int64()),
        ],
    )

    dispatch(database, [events(rows.event(Kind.TOPIC_DELETED, topic_id=2))])

    stored = database.load_state()
    assert [row[0] for row in rows_of(stored.heads)] == [3]
    assert [row[1] for row in rows_of(stored.leases)] == [3]
    assert [row[1] for row in rows_of(stored.cursors)] == [3]
    assert database.keyed_state(1, 2, hashes=None) is None
    messages_left = database.query("SELECT topic FROM messages", timeout_s=30)
    assert messages_left.column("topic").to_pylist() == ["u"]
    named = database.query("SELECT DISTINCT topic FROM events WHERE kind = 'lease'", timeout_s=30)
    assert sorted(named.column("topic").to_pylist()) == ["t", "u"]
    with pytest.raises(QueryError, match="no view"):
        database.query("SELECT * FROM keyed_state_g", timeout_s=30)


def test_reads_see_whole_transactions_while_dispatch_goes_on(database: Database) -> None:
    done = threading.Event()
    seen: list[tuple[int, int]] = []

    def read() -> None:
        while not done.is_set():
            stored = database.load_state()
            heads = rows_of(stored.heads)
            seen.append((heads[0][3] if heads else 0, stored.leases.num_rows))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(20):
        dispatch(database, [messages(message(2, 0, i)), events(on_queue(Kind.LEASE, i))])
    done.set()
    for reader in readers:
        reader.join()

    assert all(max_offset == leases for max_offset, leases in seen)
    assert database.load_state().leases.num_rows == 20


def test_checkpoint_keeps_everything(open_database: OpenDatabase) -> None:
    database = open_database()
    dispatch(database, [messages(message(2, 0, 0, stored_at_ms=START_MS))])

    database.checkpoint()

    assert len(open_database().index(2, 0, start=0, stop=9).row) == 1


def test_closing_twice_is_no_harm(database: Database) -> None:
    database.close()
    database.close()

    with pytest.raises(Exception, match=r"(?i)clos"):
        database.query("SELECT 1 AS one FROM topics", timeout_s=1)


def test_an_export_that_cannot_be_written_leaves_no_transaction_open(
    database: Database, tmp_path: Path
) -> None:
    dispatch(database, [events(rows.topic(2, "t"))], [messages(message(2, 0, 0))])
    beyond = tmp_path / "no folder" / "file"

    for write in (
        lambda: database.export_snapshot(beyond),
        lambda: database.export_events(database.dispatched, beyond),
    ):
        with pytest.raises(OSError, match="no folder"):
            write()
        database.delete_events(0)
        database.checkpoint()

    assert database.export_snapshot(tmp_path / "file").rows


def test_one_that_was_invalidated_says_so_and_can_be_opened_again(
    open_database: OpenDatabase,
) -> None:
    database = open_database()
    dispatch(database, [events(rows.topic(2, "t"))])

    def fail(_: object) -> None:
        raise duckdb.FatalException("the disk has failed")

    with pytest.raises(StorageError, match="the disk has failed"):
        database._read(fail)

    assert database.broken is not None
    assert "the disk has failed" in database.broken
    reader = database._root.sql("SELECT 1").to_arrow_reader()
    with pytest.raises(StorageError, match="still being read"):
        database.let_go()
    del reader
    database.let_go()
    assert open_database().dispatched == database.dispatched
