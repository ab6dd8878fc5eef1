"""The dispatch thread follows the log, at once for whoever waits, and says when it cannot."""

import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import duckdb
import pytest

from rmq_pipeline import schema
from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.dispatch import Dispatcher, DispatchLimits, StuckError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.stretch import Rows, Stretch
from tests.conftest import Eventually
from tests.store.conftest import OpenDatabase
from tests.store.log_batches import OpenLog
from tests.store.rows import Part, events, message, messages, on_queue

SCHEMAS = {1: schema.MESSAGE, 2: schema.EVENT}
WITHIN_S = 60.0
#: A section that the database does not take.
REFUSED = events(on_queue(Kind.SEGMENT, 0, detail="no JSON"))


class Store:
    """A log, its database, and the dispatcher between them."""

    def __init__(
        self, log: CommitLog, database: Database, limits: DispatchLimits | None = None
    ) -> None:
        self.log = log
        self.database = database
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.room = False
        self.full: list[StoreFullError] = []
        self.dispatcher = Dispatcher(
            log,
            database,
            on_failure=self.failures.put,
            on_full=self.make_room,
            limits=limits or DispatchLimits(),
        )

    def make_room(self, error: StoreFullError) -> bool:
        self.full.append(error)
        return self.room

    def commit(self, *parts: Part) -> int:
        for kind, batch in parts:
            self.log.stage(kind, batch)
        return self.log.commit()

    def count(self) -> int:
        return len(self.database.index(2, 0, start=0, stop=100_000).row)


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> DispatchLimits:
    """What ``with_limits`` says."""
    return getattr(request, "param", DispatchLimits())


def with_limits(*some: dict[str, Any]) -> pytest.MarkDecorator:
    """Run a test with each of these limits of dispatch."""
    chosen = [pytest.param(DispatchLimits(**each), id="-".join(each)) for each in some]
    return pytest.mark.parametrize("limits", chosen, indirect=True)


@pytest.fixture
def store(
    open_log: OpenLog, open_database: OpenDatabase, limits: DispatchLimits
) -> Iterator[Store]:
    made = Store(open_log(schemas=SCHEMAS, file_bytes=1 << 20), open_database(), limits)
    yield made
    made.dispatcher.stop()


def test_what_the_log_had_before_is_dispatched_from_the_start(store: Store) -> None:
    end = store.commit(messages(message(2, 0, 0)), events(on_queue(Kind.LEASE, 0)))

    assert store.dispatcher.behind_bytes == end
    store.dispatcher.start()

    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert store.count() == 1
    assert store.dispatcher.behind_bytes == 0


def test_notified_frames_arrive_though_nobody_waits(store: Store, eventually: Eventually) -> None:
    store.dispatcher.start()
    for i in range(50):
        store.dispatcher.notify(store.commit(messages(message(2, 0, i))))

    eventually(lambda: store.database.dispatched == store.log.end)

    assert store.count() == 50


@with_limits({"delay_s": 3600.0})
def test_frames_join_in_a_transaction_until_somebody_waits(store: Store) -> None:
    store.dispatcher.start()
    for i in range(20):
        store.dispatcher.notify(store.commit(messages(message(2, 0, i))))
    before = store.database.dispatched

    arrived = store.dispatcher.wait_for(store.log.end, WITHIN_S)

    assert before == 0
    assert arrived
    assert store.count() == 20


@with_limits({"delay_s": 3600.0, "pressing_bytes": 100_000})
def test_much_to_do_does_not_wait_for_more(store: Store, eventually: Eventually) -> None:
    store.dispatcher.start()

    for i in range(3):
        store.dispatcher.notify(store.commit(messages(message(2, 0, i, body=b"x" * 60_000))))

    eventually(lambda: store.database.dispatched > 0)


@with_limits({"transaction_bytes": 1}, {"transaction_rows": 1})
def test_a_backlog_is_cut_into_transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"x" * 20_000  # small frames would be taken together
    end = [store.commit(messages(message(2, 0, i, body=body))) for i in range(5)][-1]
    transactions = []
    original = store.database.dispatch

    def dispatch(some: Sequence[Stretch]) -> None:
        transactions.append(len(some))
        original(some)

    monkeypatch.setattr(store.database, "dispatch", dispatch)

    store.dispatcher.start()

    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert transactions == [1] * 5


def test_what_is_too_much_for_the_memory_goes_in_parts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"x" * 20_000  # small frames would be taken together
    end = [store.commit(messages(message(2, 0, i, body=body))) for i in range(5)][-1]
    parts: list[int] = []
    original = store.database._fold.apply

    def apply(rows: Iterable[Rows], end: int) -> None:
        some = list(rows)
        if len(some) > 2:
            raise duckdb.OutOfMemoryException("could not allocate block of size 256.0 KiB")
        parts.append(len(some))
        original(some, end)

    monkeypatch.setattr(store.database._fold, "apply", apply)

    store.dispatcher.start()

    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert parts == [2, 1, 2]


def test_a_part_that_was_dispatched_is_not_again_when_the_disk_is_full_for_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"x" * 20_000  # small frames would be taken together
    end = [store.commit(messages(message(2, 0, i, body=body))) for i in range(5)][-1]
    store.room = True
    parts: list[int] = []
    original = store.database._fold.apply

    def apply(rows: Iterable[Rows], end: int) -> None:
        some = list(rows)
        if not parts and len(some) > 2:
            raise duckdb.OutOfMemoryException("could not allocate block of size 256.0 KiB")
        if parts and not store.full:
            raise duckdb.IOException("No space left on device")
        parts.append(len(some))
        original(some, end)

    monkeypatch.setattr(store.database._fold, "apply", apply)

    store.dispatcher.start()

    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert len(store.full) == 1
    assert parts == [2, 3]
    assert store.count() == 5


def test_waiting_has_an_end(store: Store) -> None:
    store.dispatcher.start()
    assert not store.dispatcher.wait_for(store.log.end + 1, 0.05)


def test_with_flush_async_only_synced_frames_are_dispatched(
    open_log: OpenLog, open_database: OpenDatabase
) -> None:
    log = open_log(schemas=SCHEMAS, flush="async", file_bytes=1 << 20)
    store = Store(log, open_database(), DispatchLimits(delay_s=0.01))
    store.dispatcher.start()

    store.dispatcher.notify(store.commit(messages(message(2, 0, 0))))
    early = store.dispatcher.wait_for(log.end, 0.05)
    log.sync()

    assert not early
    assert store.dispatcher.wait_for(log.end, WITHIN_S)
    store.dispatcher.stop()


def test_a_failure_is_told_once_and_ends_the_waiting(store: Store) -> None:
    end = store.commit(messages(message(2, 0, 0)))
    store.database.close()
    store.dispatcher.start()

    with pytest.raises(StorageError, match="Dispatch has ended"):
        store.dispatcher.wait_for(end, WITHIN_S)

    assert isinstance(store.failures.get(timeout=WITHIN_S), StorageError)
    assert store.failures.empty()
    assert store.dispatcher.behind_bytes == end


def test_a_log_that_was_closed_ends_dispatch_without_a_failure(store: Store) -> None:
    end = store.commit(messages(message(2, 0, 0)))
    store.log.close()
    store.dispatcher.start()

    with pytest.raises(StorageError, match="Dispatch has ended"):
        store.dispatcher.wait_for(end, WITHIN_S)

    assert store.failures.empty()


def test_stopped_dispatch_leaves_the_rest_to_the_next(
    store: Store, open_database: OpenDatabase
) -> None:
    store.dispatcher.start()
    store.dispatcher.stop()
    end = store.commit(messages(message(2, 0, 0)))
    with pytest.raises(StorageError):
        store.dispatcher.wait_for(end, WITHIN_S)

    following = Store(store.log, open_database())
    following.dispatcher.start()

    assert following.dispatcher.wait_for(end, WITHIN_S)
    following.dispatcher.stop()


@pytest.mark.parametrize("room", [True, False])
def test_on_a_full_disk_the_broker_is_asked_for_room(
    store: Store, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    end = store.commit(messages(message(2, 0, 0)))
    store.room = room
    original = store.database.dispatch

    def refuse_at_first(some: object) -> None:
        if not store.full:
            raise StoreFullError("No room.")
        original(some)  # type: ignore[arg-type]

    monkeypatch.setattr(store.database, "dispatch", refuse_at_first)
    store.dispatcher.start()

    if room:
        assert store.dispatcher.wait_for(end, WITHIN_S)
    else:
        with pytest.raises(StorageError, match="Dispatch has ended") as ended:
            store.dispatcher.wait_for(end, WITHIN_S)
        assert isinstance(ended.value.__cause__, StoreFullError)
        assert isinstance(store.failures.get(timeout=WITHIN_S), StoreFullError)
    assert len(store.full) == 1


@pytest.fixture
def transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The log position that each transaction would reach."""
    ends, original = list[int](), store.database.dispatch

    def dispatch(some: Sequence[Stretch]) -> None:
        ends.append(some[-1].end)
        original(some)

    monkeypatch.setattr(store.database, "dispatch", dispatch)
    return ends


@pytest.mark.parametrize("body", [b"small frames are one stretch", b"x" * 20_000])
def test_a_refused_frame_among_many_is_found_by_halves(
    store: Store, transactions: list[int], body: bytes
) -> None:
    before = [store.commit(messages(message(2, 0, i, body=body))) for i in range(40)][-1]
    store.commit(REFUSED)
    end = [store.commit(messages(message(2, 0, i, body=body))) for i in range(40, 64)][-1]
    store.dispatcher.start()

    with pytest.raises(StuckError, match=f"does not take the frame at log position {before} "):
        store.dispatcher.wait_for(end, WITHIN_S)

    assert store.database.dispatched == before
    assert store.count() == 40
    assert len(transactions) <= 16  # twice the times that 65 can be halved, and two for the frame
    assert store.dispatcher.wait_for(before)


@with_limits({"retry_s": 0.01})
def test_only_the_refused_frame_is_tried_again(
    store: Store, transactions: list[int], eventually: Eventually
) -> None:
    refused_end = store.commit(REFUSED)
    store.commit(messages(message(2, 0, 0)))
    store.dispatcher.start()
    eventually(lambda: store.dispatcher.stuck is not None)
    first = len(transactions)

    eventually(lambda: len(transactions) > first + 6)

    assert set(transactions[first:]) == {refused_end}


def test_the_disk_may_become_full_while_a_bad_frame_is_looked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.room = True
    store.commit(messages(message(2, 0, 0)))
    end = store.commit(messages(message(2, 0, 1)))
    bad = duckdb.ConversionException("It is no number.")
    errors = [bad, duckdb.IOException("No space left on device")] * 2
    original = store.database._fold.apply

    def apply(rows: Iterable[Rows], end: int) -> None:
        if errors:
            raise errors.pop(0)
        original(rows, end)

    monkeypatch.setattr(store.database._fold, "apply", apply)

    store.dispatcher.start()

    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert len(store.full) == 2
    assert store.failures.empty()


@pytest.mark.parametrize("error", [duckdb.ConnectionException, duckdb.ResourceInUseException])
def test_a_database_that_answers_nothing_any_more_is_no_bad_frame(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: type[duckdb.Error]
) -> None:
    end = store.commit(messages(message(2, 0, 0)))
    errors: list[type[duckdb.Error]] = [duckdb.ConversionException, error]

    def apply(_rows: Iterable[Rows], _end: int) -> None:
        raise (errors.pop(0) if errors else error)("It was closed.")

    monkeypatch.setattr(store.database._fold, "apply", apply)
    store.dispatcher.start()

    with pytest.raises(StorageError, match="Dispatch has ended"):
        store.dispatcher.wait_for(end, WITHIN_S)

    assert isinstance(store.failures.get(timeout=WITHIN_S), StorageError)
    assert store.dispatcher.stuck is None


def test_a_log_that_is_closed_while_a_bad_frame_is_looked_for_is_no_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(messages(message(2, 0, 0)))
    end = store.commit(messages(message(2, 0, 1)))

    def apply(_rows: Iterable[Rows], _end: int) -> None:
        store.log.close()
        raise duckdb.ConversionException("It is no number.")

    monkeypatch.setattr(store.database._fold, "apply", apply)
    store.dispatcher.start()

    with pytest.raises(StorageError, match="Dispatch has ended"):
        store.dispatcher.wait_for(end, WITHIN_S)

    assert store.failures.empty()


@with_limits({"retry_s": 0.01})
def test_a_frame_that_cannot_be_read_is_tried_until_it_can(
    store: Store, eventually: Eventually
) -> None:
    before = store.commit(messages(message(2, 0, 0)))
    end = store.commit(messages(message(2, 0, 1)))
    file = store.log.file_of(before)
    place = file.offset_of(before) + 200
    with file.path.open("r+b", buffering=0) as disk:
        there = os.pread(disk.fileno(), 1, place)
        os.pwrite(disk.fileno(), bytes([there[0] ^ 1]), place)
        store.dispatcher.start()

        with pytest.raises(StuckError, match=f"cannot read the frame at log position {before} "):
            store.dispatcher.wait_for(end, WITHIN_S)
        assert store.database.dispatched == before
        os.pwrite(disk.fileno(), there, place)

    eventually(lambda: store.dispatcher.stuck is None)
    assert store.dispatcher.wait_for(end, WITHIN_S)
    assert store.failures.empty()
    assert store.count() == 2
