"""A store that has failed is rebuilt from disk when its files can be written again."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import StorageError
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.fold import Fold
from rmq_pipeline.store.log.log_file import LogFile
from tests.conftest import Eventually

SETTINGS = Settings(log_file_bytes=1 << 20, reserve_bytes=0)


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none", settings=SETTINGS) as broker:
        broker.create_topic("plain", queues=1)
        broker.create_group("readers")
        yield broker


def send(broker: Broker, body: bytes) -> None:
    broker.send("plain", pa.table({"body": [body]}))


def stored(broker: Broker) -> list[bytes]:
    bodies: list[bytes] = broker.read("plain", 0, offset=0, limit=100)["body"].to_pylist()
    return bodies


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except StorageError:
        return False
    return True


def test_a_log_that_cannot_be_opened_again_is_opened_once_it_can(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    send(broker, b"answered")

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as while_it_lasts:
        while_it_lasts.setattr(LogFile, "write", fail)
        while_it_lasts.setattr(LogFile, "open", fail)
        with pytest.raises(StorageError):
            send(broker, b"not answered")
        with pytest.raises(StorageError, match=r"rebuilt from disk: .*Too many open files"):
            send(broker, b"nor this")
        eventually(lambda: "Too many open files" in str(broker.status()["store"]["failing"]))

    eventually(lambda: answers(lambda: send(broker, b"later")))
    assert stored(broker) == [b"answered", b"later"]
    report = broker.status()["store"]
    assert (report["failing"], report["repairs"]) == (None, 1)


def test_a_dispatch_that_failed_begins_again_with_a_database_opened_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    send(broker, b"answered")
    before = broker.engine.database

    def fail(*_: object) -> None:
        raise duckdb.FatalException("Input/output error")

    with monkeypatch.context() as while_it_lasts:
        while_it_lasts.setattr(Fold, "apply", fail)
        send(broker, b"answered, too")
        eventually(lambda: not answers(lambda: broker.sql("SELECT 1 AS one")))

    eventually(lambda: answers(lambda: broker.sql("SELECT 1 AS one")))
    eventually(lambda: answers(lambda: send(broker, b"later")))
    assert stored(broker) == [b"answered", b"answered, too", b"later"]
    assert broker.engine.database is not before
    assert broker.status()["store"]["failing"] is None


def test_what_was_acked_before_a_failure_stays_acked(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    send(broker, b"acked")
    send(broker, b"open")
    broker.ack(broker.receive("readers", "plain", limit=1))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as while_it_lasts:
        while_it_lasts.setattr(LogFile, "write", fail)
        while_it_lasts.setattr(LogFile, "rewrite", fail)
        with pytest.raises(StorageError):
            send(broker, b"not answered")

    received: list[bytes] = []

    def is_given() -> bool:
        return answers(
            lambda: received.extend(broker.receive("readers", "plain")["body"].to_pylist())
        )

    eventually(is_given)
    assert received == [b"open"]


def test_a_broker_closes_while_its_store_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker.open(home, upkeep="none", settings=SETTINGS) as broker:
        broker.create_topic("plain", queues=1)
        send(broker, b"answered")

        def fail(*_: object, **__: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(LogFile, "write", fail)
        monkeypatch.setattr(LogFile, "open", fail)
        with pytest.raises(StorageError):
            send(broker, b"not answered")

    monkeypatch.undo()
    with Broker.open(home, upkeep="none", settings=SETTINGS) as again:
        assert stored(again) == [b"answered"]


def test_the_store_is_rebuilt_whatever_has_failed_before(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    failures: list[str] = []

    def fail(*_: object) -> None:
        failures.append("once")
        raise TypeError("unhashable type: 'list'")

    with monkeypatch.context() as while_it_lasts:
        while_it_lasts.setattr(broker.engine.members, "let_go", fail)
        eventually(lambda: bool(failures))
        broker.engine.repair.failed(StorageError("The disk has failed."))

    eventually(lambda: answers(lambda: send(broker, b"later")))
    assert stored(broker) == [b"later"]


def test_a_sync_that_failed_is_repaired_while_nobody_writes(
    home: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    with Broker.open(home, upkeep="none", flush="async", settings=SETTINGS) as broker:
        broker.create_topic("plain", queues=1)
        sync, failures = LogFile.sync, [OSError(errno.EIO, os.strerror(errno.EIO))]

        def fail_once(file: LogFile) -> None:
            if failures:
                raise failures.pop()
            sync(file)

        monkeypatch.setattr(LogFile, "sync", fail_once)
        send(broker, b"answered")

        eventually(lambda: broker.status()["store"]["repairs"] == 1)
        assert stored(broker) == [b"answered"]
