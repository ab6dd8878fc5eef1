"""The contract of a log store, on a real PostgreSQL server."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from rmq_pipeline.errors import (
    HomeFormatError,
    LogFencedError,
    LogHeldError,
    LogStoreError,
    RequestError,
)
from rmq_pipeline.store.log.frame import crc32
from rmq_pipeline.store.log.log_store import Stored
from rmq_pipeline.store.log.postgres_store import PostgresStore
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


def test_frames_come_back_in_order(open_store: Open) -> None:
    store = open_store()
    frames = {0: b"a" * 64, 64: b"b" * 128, 192: b"c" * 64}

    for position, frame in frames.items():
        store.append(position, frame)

    assert {found.position: frame for found, frame in store.frames(0)} == frames
    assert [found.position for found in store.headers(64)] == [64, 192]
    assert [found.position for found, _ in store.frames(100)] == [192]
    last = store.last()
    assert last is not None
    assert last.end == 256


def test_an_empty_store_has_no_frames(open_store: Open) -> None:
    store = open_store()

    assert store.last() is None
    assert list(store.frames(0)) == []
    assert store.epoch == 1


def test_frames_larger_than_a_read_come_back(open_store: Open) -> None:
    store, large = open_store(), bytes(33 << 20)
    store.append(0, large)
    store.append(len(large), large)

    assert [len(frame) for _, frame in store.frames(0)] == [len(large)] * 2


def test_an_older_leader_appends_nothing(open_store: Open) -> None:
    first = open_store()
    first.append(0, b"a" * 64)
    second = open_store()  # the lease of the first one ends meanwhile

    with pytest.raises(LogFencedError):
        first.append(64, b"b" * 64)
    second.append(64, b"c" * 64)

    assert [frame for _, frame in second.frames(64)] == [b"c" * 64]
    assert not first.renew()
    with pytest.raises(LogFencedError):
        first.reclaim()
    with pytest.raises(LogFencedError):
        first.put_file("access.json", b"{}")


def test_a_taken_position_is_refused_even_in_the_same_epoch(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    postgres.execute("UPDATE rmq_log.frames SET writer = 'another'", url=database)

    with pytest.raises(LogFencedError):
        store.append(0, b"a" * 64)


def test_an_append_is_repeated_without_doubling(open_store: Open) -> None:
    store = open_store()
    store.append(0, b"a" * 64)

    store.append(0, b"a" * 64)
    store.settle(0, b"a" * 64)
    store.settle(64, b"b" * 64)

    assert list(store.headers(0)) == [
        Stored(0, 64, crc32(b"a" * 64)),
        Stored(64, 64, crc32(b"b" * 64)),
    ]


def test_a_lost_answer_is_settled_by_position(open_store: Open, postgres: PostgresServer) -> None:
    database = postgres.new_database()
    with BrokenWire(postgres.address) as wire:
        store = open_store(database.replace(postgres.address, wire.address))
        store.append(0, b"a" * 64)

        wire.lose_next_answer()
        with pytest.raises(LogStoreError):
            store.append(64, b"b" * 64)
        store.settle(64, b"b" * 64)

        assert [found.position for found in store.headers(0)] == [0, 64]
        assert wire.lost == 1


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


def test_the_lease_keeps_others_out_while_it_is_renewed(open_store: Open) -> None:
    leader, over = open_store(), threading.Event()

    def live() -> None:
        while not over.wait(LEASE_S / 4):
            leader.renew()

    renewing = threading.Thread(target=live)
    renewing.start()
    try:
        with pytest.raises(LogHeldError, match="is led by"):
            open_store()
    finally:
        over.set()
        renewing.join()
    leader.append(0, b"a" * 64)  # the other one has changed nothing


def test_a_closed_leader_leaves_at_once(open_store: Open) -> None:
    first = open_store()
    first.append(0, b"a" * 64)
    first.close()

    second = open_store()

    assert (second.id, second.seed, second.epoch) == (first.id, first.seed, first.epoch + 1)


def test_files_are_handed_on(open_store: Open) -> None:
    first = open_store()
    assert first.file("access.json") is None
    first.put_file("access.json", b"{1}")
    first.put_file("access.json", b"{2}")
    first.close()

    assert open_store().file("access.json") == b"{2}"


def test_a_file_is_handed_on_while_a_new_epoch_is_taken(open_store: Open) -> None:
    store, over = open_store(), threading.Event()

    def put() -> None:
        number = 0
        while not over.is_set():
            number += 1
            store.put_file("access.json", b"%d" % number)

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put)
        for _ in range(20):
            store.reclaim()
        over.set()
        putting.result()

    assert store.file("access.json")


def test_trim_deletes_whole_frames(open_store: Open) -> None:
    store = open_store()
    for position in (0, 64, 128):
        store.append(position, b"a" * 64)

    store.trim(130)

    assert [found.position for found in store.headers(0)] == [128]


def test_a_damaged_frame_is_not_delivered(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    store = open_store()
    store.append(0, b"a" * 64)
    postgres.execute("UPDATE rmq_log.frames SET frame = 'b'", url=database)

    with pytest.raises(LogStoreError, match="damaged"):
        list(store.frames(0))


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


def test_two_that_make_the_tables_at_once_make_one_log(open_store: Open) -> None:
    found: list[PostgresStore] = []
    makers = [
        threading.Thread(target=lambda: found.append(open_store(claim=False))) for _ in range(4)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()

    assert len({store.id for store in found}) == 1
    assert len(found) == len(makers)


def test_a_user_without_rights_is_not_told_of_another_version(
    open_store: Open, postgres: PostgresServer, database: str
) -> None:
    open_store().close()
    name = f"other_{database.rpartition('/')[2]}"
    postgres.execute(f"CREATE USER {name}; GRANT USAGE ON SCHEMA rmq_log TO {name}", url=database)

    with pytest.raises(LogStoreError, match="permission denied"):
        open_store(database.replace("rmq@", f"{name}@"))
