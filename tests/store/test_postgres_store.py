"""The contract of a log store, on a real PostgreSQL server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from rmq_pipeline.errors import (
    HomeFormatError,
    LogFencedError,
    LogStoreError,
    RequestError,
)
from rmq_pipeline.store.log import catching_up
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.log.engines.postgres_store import PostgresStore
from rmq_pipeline.store.log.log_store import Layout
from tests.broken_wire import BrokenWire
from tests.postgres_server import PostgresServer
from tests.waiting import until

LEASE_S = 0.3
Open = Callable[..., PostgresStore]


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def open_store(database: str) -> Iterator[Open]:
    opened: list[PostgresStore] = []

    def open_it(address: str = database, *, claim: bool = True) -> PostgresStore:
        opened.append(PostgresStore(address, timeout_s=2.0, lease_s=LEASE_S, home_format=1))
        opened[-1].look()
        if claim:
            opened[-1].claim(seconds=5.0)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def test_a_taken_position_is_refused_even_in_the_same_epoch(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    postgres.execute("UPDATE rmq_log.frames SET writer = 'another'", url=database)

    with pytest.raises(LogFencedError):
        store.append(0, b"a" * 64)


def test_a_late_append_of_a_dropped_connection_stores_nothing(
    open_store: Open, database: str
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    epoch = store.epoch
    store.reclaim()

    with psycopg.connect(database, autocommit=True) as late:
        late.execute("SET search_path TO rmq_log")
        done = late.execute(
            "INSERT INTO frames SELECT 64, 64, epoch, writer, 0, 'x' FROM store WHERE epoch = %s",
            [epoch],
        )

    assert done.rowcount == 0
    assert store.epoch == epoch + 1


def test_a_renewal_without_an_answer_says_how_long_it_waited(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    with BrokenWire(postgres.address) as wire:
        store = open_store(database.replace(postgres.address, wire.address))
        assert store.renew()
        wire.hold_requests()

        with pytest.raises(LogStoreError, match=r"cannot be reached: no answer within 0\.15 s"):
            store.renew()


def test_a_commit_that_only_the_primary_has_is_in_doubt(
    open_store: Open, postgres: PostgresServer
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    cancel = (
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
        " WHERE wait_event = 'SyncRep' AND application_name LIKE 'rmq_pipeline%'"
    )

    with postgres.waiting_for_a_standby():
        store.begin(64, b"b" * 64)
        until(lambda: postgres.execute(cancel))
        with pytest.raises(LogStoreError, match="canceling wait for synchronous replication"):
            store.finish()

    store.settle(64, b"b" * 64)
    assert [found.position for found in store.headers(0)] == [0, 64]


@pytest.mark.parametrize("setting", ["local", "remote_write"])
def test_a_commit_that_a_standby_may_lack_is_refused(
    open_store: Open, postgres: PostgresServer, database: str, setting: str
) -> None:
    name = database.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")

    with (
        postgres.waiting_for_a_standby(),
        pytest.raises(LogStoreError, match=f"synchronous_commit = {setting}"),
    ):
        open_store()

    open_store()  # without standbys it is as durable as on


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "address", ["postgresql://[x", "postgresql://h?x", "postgresql://a:secret@127.0.0.1/log"]
)
def test_an_address_that_libpq_refuses_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(RequestError, match="log_store") as refused:
        PostgresStore(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)

    assert address not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_server_that_is_not_there_is_named() -> None:
    address = "postgresql://rmq@127.0.0.1:1/log"
    store = PostgresStore(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)

    with pytest.raises(LogStoreError, match=r"127\.0\.0\.1:1/log cannot be reached"):
        store.look()


@pytest.mark.parametrize("setting", ["synchronous_commit"])
def test_a_database_that_may_lose_commits_is_refused(
    open_store: Open, postgres: PostgresServer, database: str, setting: str
) -> None:
    name = database.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET {setting} = off")

    with pytest.raises(LogStoreError, match=f"{setting} = off.*Set {setting} = on"):
        open_store()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rmq_log.store SET format = 99",
        "ALTER TABLE rmq_log.store RENAME COLUMN seed TO salt",
        "ALTER TABLE rmq_log.frames DROP COLUMN crc",
    ],
)
def test_tables_of_another_version_are_refused(
    open_store: Open, postgres: PostgresServer, database: str, change: str
) -> None:
    open_store().close()
    postgres.execute(change, url=database)

    with pytest.raises(HomeFormatError, match="of another version"):
        open_store()


def test_a_log_that_a_home_of_a_newer_format_led_is_refused(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    open_store().close()
    postgres.execute("UPDATE rmq_log.store SET home_format = 2", url=database)

    with pytest.raises(HomeFormatError, match="a home of format 2"):
        open_store()


def test_a_user_without_rights_is_not_told_of_another_version(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    open_store().close()
    name = f"other_{database.rpartition('/')[2]}"
    postgres.execute(f"CREATE USER {name}; GRANT USAGE ON SCHEMA rmq_log TO {name}", url=database)

    with pytest.raises(LogStoreError, match="permission denied"):
        open_store(database.replace("rmq@", f"{name}@"))


def test_a_trim_goes_in_steps_and_holds_up_no_renewal(open_store: Open, database: str) -> None:
    """The first trim may delete the whole log of a home that got its archive late."""
    store, frame = open_store(), bytes(6 << 20)
    for number in range(5):
        store.append(number * len(frame), frame)

    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT FROM rmq_log.frames WHERE position = %s FOR UPDATE", [3 * len(frame)])
        trimming = threads.submit(store.trim, 4 * len(frame))
        until(lambda: next(store.headers(0)).position == 2 * len(frame))
        assert store.renew()
        assert not trimming.done()
        other.rollback()
        trimming.result()

    assert [found.position for found in store.headers(0)] == [4 * len(frame)]


def test_a_home_that_reads_while_frames_go_needs_a_copy_of_the_state(open_store: Open) -> None:
    store, frame = open_store(), bytes(20 << 20)  # fewer than two of them are read at once
    store.put_layout(Layout(0, 1, b"f" * 8))
    for number in range(5):
        store.append(number * len(frame), frame)
    reading = catching_up.missing(store, 0)
    next(reading)

    store.trim(4 * len(frame))

    with pytest.raises(DivergedLogError, match="away for too long"):
        list(reading)
