"""Brokers whose commit log is in a store: one leads, its successor has all that was answered."""

import errno
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import (
    LogFencedError,
    LogHeldError,
    LogStoreError,
    OperatorError,
    RequestError,
    StorageError,
)
from rmq_pipeline.limits import MIB
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.log.log_file import LogFile
from tests.broken_wire import BrokenWire
from tests.log_stores import LogStores
from tests.waiting import until

Open = Callable[..., Broker]
LEASE_MS = 400


@pytest.fixture
def address(log_stores: LogStores) -> str:
    return log_stores.new()


@pytest.fixture
def open_broker(tmp_path: Path, address: str) -> Iterator[Open]:
    opened: list[Broker] = []

    def open_it(home: str = "first", store: str | None = address, **changed: Any) -> Broker:
        settings = Settings(
            log_file_bytes=MIB,
            reserve_bytes=MIB,
            log_store=store,
            **{"log_lease_ms": LEASE_MS, "log_timeout_ms": 1000, **changed},
        )
        opened.append(Broker.open(tmp_path / home, upkeep="none", settings=settings))
        return opened[-1]

    yield open_it
    for broker in opened:
        wake(broker)
        broker.close()


def stop(broker: Broker) -> None:
    """Keep a broker from renewing its lease or asking for it, as SIGSTOP does."""
    replication = broker.engine.replication
    assert replication is not None
    replication._renew = lambda **_: None  # type: ignore[method-assign]


def wake(broker: Broker) -> None:
    """Let it go on, as SIGCONT does."""
    replication = broker.engine.replication
    if replication is not None and replication.__dict__.pop("_renew", None):
        replication._fresh_until = 0.0


def prepare(broker: Broker) -> None:
    broker.ensure_topic("orders", type="fifo", queues=1)
    broker.ensure_group("billing", order="message_group")
    broker.subscribe("billing", "orders")


def send(broker: Broker, *bodies: str) -> None:
    broker.send(
        "orders",
        pa.table(
            {"body": [body.encode() for body in bodies], "message_group": ["a"] * len(bodies)}
        ),
    )


def bodies(broker: Broker) -> list[str]:
    found = broker.read("orders", queue_id=0, offset=0, limit=1000)
    return [body.decode() for body in found["body"].to_pylist()]


def test_an_empty_home_catches_up_and_goes_on_under_a_higher_epoch(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    first = open_broker()
    prepare(first)
    for number in range(50):
        send(first, f"{number:03}", "x" * 40_000)  # more than a log file
    received = first.receive("billing", "orders", limit=3)
    first.ack(received["receipt_handle"].to_pylist()[:2])
    expected = bodies(first)
    first.close()

    second = open_broker("second")
    assert bodies(second) == expected
    send(second, "later")

    assert bodies(second) == [*expected, "later"]
    (lag,) = [row for row in second.lag("billing").to_pylist() if row["queue_id"] == 0]
    assert lag["committed_offset"] == 2
    found = log_stores.frames(address)
    assert all(at + length == after for (at, length, _), (after, _, _) in pairwise(found))
    assert found[-1][2] > found[0][2]


def test_a_home_opens_again_with_its_store(open_broker: Open) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    first.close()

    again = open_broker()
    send(again, "b")

    assert bodies(again) == ["a", "b"]


def test_a_first_home_catches_up_with_its_successor(open_broker: Open) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    first.close()
    second = open_broker("second")
    send(second, "b")
    second.close()

    again = open_broker()
    send(again, "c")

    assert bodies(again) == ["a", "b", "c"]


def test_the_status_shows_the_store(open_broker: Open, address: str) -> None:
    broker = open_broker()
    prepare(broker)

    shown = broker.status()["log_store"]

    assert shown["store"] == address
    assert (shown["replication"], shown["epoch"], shown["behind_bytes"]) == ("sync", 1, 0)
    assert shown["lease_runs"]


# ----------------------------------------------------------------------------------------- fencing


def test_a_second_broker_is_refused_while_the_first_one_lives(open_broker: Open) -> None:
    first = open_broker()
    prepare(first)

    with pytest.raises(LogHeldError, match="process"):
        open_broker("second")

    send(first, "a")
    assert bodies(first) == ["a"]


def test_a_leader_that_wakes_up_late_answers_nothing(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    stop(first)
    told = threading.Event()
    first.engine.on_fenced = lambda _: told.set()
    second = open_broker("second")
    wake(first)

    for ask in (
        lambda: send(first, "of the old leader"),
        lambda: bodies(first),
        lambda: first.receive("billing", "orders", limit=1),
        lambda: first.sql("SELECT 1"),
        lambda: first.call("list_topics", {}),
    ):
        with pytest.raises(LogFencedError, match="Another broker"):
            ask()

    assert told.is_set()
    send(second, "b")
    assert bodies(second) == ["a", "b"]
    found = log_stores.frames(address)
    assert len({at for at, _, _ in found}) == len(found)
    with pytest.raises(LogFencedError):
        send(first, "again")


def test_a_read_alone_finds_out_that_another_leads(open_broker: Open) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    stop(first)
    open_broker("second")
    wake(first)

    with pytest.raises(LogFencedError):
        bodies(first)


def test_two_that_write_at_once_make_one_history(open_broker: Open) -> None:
    first = open_broker()
    prepare(first)
    answered: list[str] = []
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            body = f"{len(answered):05}"
            try:
                send(first, body)
            except LogFencedError:
                return
            answered.append(body)

    writing = threading.Thread(target=write)
    writing.start()
    until(lambda: len(answered) > 20)
    stop(first)
    second = open_broker("second")
    send(second, "second")
    writing.join(60)
    over.set()

    found = bodies(second)
    assert found[: len(answered)] == answered
    assert found[-1] == "second"
    assert len(found) <= len(answered) + 2  # one that was stored and not answered


# -------------------------------------------------------------------------------- failures of it


def test_a_lost_answer_doubles_nothing(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        broker = open_broker(store=address.replace(log_stores.server, wire.address))
        prepare(broker)
        for number in range(10):
            wire.lose_next_answer()  # of an append, or of a renewal
            send(broker, f"{number}")

        assert bodies(broker) == [f"{number}" for number in range(10)]
        assert wire.lost >= 5


@pytest.mark.parametrize("log_stores", ["postgres"], indirect=True)  # a bucket knows the outcome
def test_a_lost_answer_and_another_leader_leave_a_send_in_doubt(
    open_broker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_broker()
    prepare(first)
    stop(first)
    replication = first.engine.replication
    assert replication is not None
    finish = replication.store.finish

    def finish_and_lose_the_answer() -> None:
        finish()
        replication.store.abandon()
        open_broker("second")
        raise LogStoreError("The answer was lost.")

    monkeypatch.setattr(replication.store, "finish", finish_and_lose_the_answer)
    with pytest.raises(StorageError, match="may have"):
        send(first, "a")

    with pytest.raises(LogFencedError):
        first.read("orders", queue_id=0, offset=0, limit=1)


def test_a_full_disk_after_the_append_leaves_a_send_in_doubt(
    open_broker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(LogFile, "write_whole", fail)
    with pytest.raises(StorageError, match="may have"):
        send(first, "b")


def test_a_store_that_is_away_means_refusals_and_then_goes_on(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        broker = open_broker(
            store=address.replace(log_stores.server, wire.address), log_timeout_ms=300
        )
        prepare(broker)
        send(broker, "before")
        wire.cut()

        for _ in range(3):
            with pytest.raises(StorageError):
                send(broker, "refused")
        with pytest.raises(StorageError):
            bodies(broker)
        assert broker.status()["store"]["failing"]
        wire.mend()

        until(lambda: sends(broker, "after"))
        assert bodies(broker) == ["before", "after"]
        send(broker, "later")
        broker.close()

    assert bodies(open_broker("second")) == ["before", "after", "later"]


def test_a_server_that_crashes_and_comes_back_keeps_all_answers(
    open_broker: Open, log_stores: LogStores
) -> None:
    broker = open_broker(log_timeout_ms=300)
    prepare(broker)
    answered: list[str] = []
    tried, over = [0], threading.Event()

    def write() -> None:
        while not over.is_set():
            tried[0] += 1
            if sends(broker, body := f"{tried[0]:05}"):
                answered.append(body)

    writing = threading.Thread(target=write)
    writing.start()
    until(lambda: len(answered) > 10)
    log_stores.crash()
    before, refused = len(answered), tried[0] - len(answered)
    until(lambda: tried[0] - len(answered) > refused + 1)
    log_stores.start()
    until(lambda: len(answered) > before + 10)
    over.set()
    writing.join(60)

    found = bodies(broker)
    assert found == sorted(set(found))
    assert set(answered) <= set(found)
    broker.close()
    assert bodies(open_broker("second")) == found


def sends(broker: Broker, body: str) -> bool:
    try:
        send(broker, body)
    except StorageError:
        return False
    return True


def test_a_killed_home_goes_on_with_what_only_it_has(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    first.close()
    # As after a kill between the local write and the append.
    log_stores.lose_last_frame(address)

    again = open_broker()
    send(again, "b")

    assert bodies(again) == ["a", "b"]
    again.close()
    assert bodies(open_broker("second")) == ["a", "b"]


def test_a_frame_that_only_a_dead_leader_has_is_cut_if_another_one_led(
    open_broker: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_broker()
    prepare(first)
    send(first, "a")
    replication = first.engine.replication
    assert replication is not None

    def lose(*_: object) -> None:
        raise LogStoreError("The store is away.")

    monkeypatch.setattr(replication.store, "begin", lose)
    monkeypatch.setattr(replication.store, "settle", lose)
    monkeypatch.setattr(replication.store, "reclaim", lose)
    with pytest.raises(StorageError):
        send(first, "never answered")
    first.close()
    second = open_broker("second")
    send(second, "b")
    second.close()

    again = open_broker()

    assert bodies(again) == ["a", "b"]


# ------------------------------------------------------------------------------------------- async


def test_async_answers_first_and_shows_how_far_the_store_is_behind(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        broker = open_broker(
            store=address.replace(log_stores.server, wire.address),
            replication="async",
            log_lease_ms=60_000,
            log_timeout_ms=300,
        )
        prepare(broker)
        wire.cut()
        for number in range(5):
            send(broker, f"{number}")

        assert bodies(broker) == [f"{number}" for number in range(5)]
        assert broker.status()["log_store"]["behind_bytes"] > 0
        wire.mend()

        until(lambda: broker.status()["log_store"]["behind_bytes"] == 0)
        broker.close()

    assert bodies(open_broker("second")) == [f"{number}" for number in range(5)]


def test_async_refuses_more_than_may_be_lost(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        broker = open_broker(
            store=address.replace(log_stores.server, wire.address),
            replication="async",
            replication_behind_bytes=MIB,
            log_lease_ms=60_000,
            log_timeout_ms=200,
        )
        prepare(broker)
        wire.cut()
        sent = 0
        while sends(broker, "x" * 300_000):
            sent += 1

        assert 3 <= sent <= 5
        wire.mend()
        until(lambda: sends(broker, "after"))
        assert len(bodies(broker)) == sent + 1


def test_a_home_that_diverged_as_async_leader_is_refused(
    open_broker: Open, log_stores: LogStores, address: str
) -> None:
    with BrokenWire(log_stores.server) as wire:
        first = open_broker(
            store=address.replace(log_stores.server, wire.address),
            replication="async",
            log_timeout_ms=200,
            log_lease_ms=2000,
        )
        prepare(first)
        until(lambda: first.status()["log_store"]["behind_bytes"] == 0)
        wire.cut()
        send(first, "only here")
        first.close()
    second = open_broker("second")
    send(second, "b")
    second.close()

    with pytest.raises(DivergedLogError, match="empty home"):
        open_broker(replication="async")
    assert bodies(open_broker("third")) == ["b"]


# --------------------------------------------------------------------------------------- bad input


def test_a_home_of_another_store_is_refused(open_broker: Open, log_stores: LogStores) -> None:
    open_broker().close()

    with pytest.raises(OperatorError, match="does not belong"):
        open_broker(store=log_stores.new())


def test_a_home_with_a_log_of_its_own_is_refused(open_broker: Open) -> None:
    open_broker(store=None).close()

    with pytest.raises(OperatorError, match="a log of its own"):
        open_broker()


def test_a_home_of_a_store_does_not_open_without_it(open_broker: Open) -> None:
    open_broker().close()

    with pytest.raises(OperatorError, match="log_store is not set"):
        open_broker(store=None)


@pytest.mark.parametrize(
    ("store", "instead"),
    [
        ("postgresql://rmq:hunter2@127.0.0.1/log", "PGPASSWORD"),
        ("s3://key:hunter2@bucket/log", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/log?secret_key=hunter2", "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_a_password_in_the_address_is_refused(store: str, instead: str) -> None:
    with pytest.raises(RequestError, match=instead) as refused:
        Settings(log_store=store)

    assert "hunter2" not in str(refused.value)


# -------------------------------------------------------------------------------- what is handed on


def test_the_successor_has_the_users(open_broker: Open) -> None:
    first = open_broker()
    first.create_user("alice", password="correct-horse", type="super")
    first.close()

    second = open_broker("second")

    assert second.access.enabled
    assert second.list_users()["name"].to_pylist() == ["alice"]


def test_without_an_archive_nothing_is_sealed_and_no_log_is_dropped(open_broker: Open) -> None:
    broker = open_broker(seal_after_ms=0)
    prepare(broker)
    for _ in range(60):
        send(broker, "x" * 100_000)

    report = broker.seal(limit_bytes=1 << 30)

    assert set(report.values()) == {0}
    assert broker.status()["log_first"] == 0
    seal = broker.due()["jobs"]["seal"]
    assert seal["due"] == 0
    assert "archive_root" in seal["waits"]
