"""Replication to a store that hangs, fails or has another leader."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rmq_pipeline.errors import LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log.engines.postgres_store import PostgresStore
from rmq_pipeline.store.log.replication import Mode, Replication
from tests.broken_wire import BrokenWire
from tests.postgres_server import PostgresServer
from tests.waiting import until

LEASE_S = 0.4
Start = Callable[..., Replication]


@pytest.fixture
def start(postgres: PostgresServer) -> Iterator[Start]:
    started: list[Replication] = []

    def start_it(wire: BrokenWire, *, mode: Mode = "sync") -> Replication:
        address = postgres.new_database().replace(postgres.address, wire.address)
        store = PostgresStore(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)
        store.look()
        store.claim(seconds=5.0)
        started.append(
            Replication(store, mode=mode, lease_s=LEASE_S, timeout_s=1.0, behind_bytes=MIB)
        )
        started[-1].start()
        started[-1].begin_meeting()
        started[-1].go_on(0)
        return started[-1]

    yield start_it
    for replication in started:
        replication.close()


def test_many_readers_wait_for_one_renewal_of_a_lost_lease(
    start: Start, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BrokenWire(postgres.address) as wire:
        replication = start(wire)

        def hang() -> bool:
            threading.Event().wait(0.2)  # the server hangs
            raise LogStoreError("The store hangs.")

        monkeypatch.setattr(replication.store, "renew", hang)
        until(lambda: not replication.lease_runs)
        waited: list[float] = []

        def read() -> None:
            began = time.monotonic()
            with pytest.raises(LogStoreError, match="is over"):
                replication.check()
            waited.append(time.monotonic() - began)

        readers = [threading.Thread(target=read) for _ in range(20)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    assert len(waited) == len(readers)
    assert max(waited) < 4 * 0.2


def test_a_lease_that_was_lost_and_renewed_lets_readers_go_on(
    start: Start, postgres: PostgresServer
) -> None:
    with BrokenWire(postgres.address) as wire:
        replication = start(wire)
        wire.cut()
        until(lambda: not replication.lease_runs)
        with pytest.raises(LogStoreError):
            replication.check()

        wire.mend()

        until(lambda: not refuses(replication))


def test_async_goes_on_after_an_error_of_another_kind(
    start: Start, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BrokenWire(postgres.address) as wire:
        replication = start(wire, mode="async")

        def fail(*_: object) -> None:
            raise ValueError("a fault")

        monkeypatch.setattr(replication.store, "append", fail)
        monkeypatch.setattr(replication.store, "settle", fail)
        replication.write(0, b"a" * 64, local=lambda: None)
        until(lambda: "a fault" in (replication.report(64)["failing"] or ""))

        monkeypatch.undo()

        until(lambda: replication.report(64)["behind_bytes"] == 0)
        assert replication.report(64)["failing"] is None


def refuses(replication: Replication) -> bool:
    try:
        replication.check()
    except LogStoreError:
        return True
    return False
