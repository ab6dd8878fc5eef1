"""The disk of the leader and the primary of its PostgreSQL are lost; nothing answered is."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import serving
from tests.chaos.test_kills import assert_kept, lag, prepare
from tests.chaos.traffic import Ledger, Traffic
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually
from tests.free_address import free_address
from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

#: Sends that are answered between two losses.
ANSWERS = 300


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary whose commits wait for its standby, and the standby."""
    folders = (tmp_path / "primary", tmp_path / "standby")
    for folder in folders:
        folder.mkdir()
    primary = PostgresServer(folders[0])
    try:
        standby = PostgresServer(folders[1], follows=primary)
        try:
            primary.commit_at_standby()
            yield primary, standby
        finally:
            standby.stop(signal.SIGQUIT)
    finally:
        primary.stop(signal.SIGQUIT)


def test_the_standby_of_the_database_and_an_empty_home_have_all_that_was_answered(
    servers: tuple[PostgresServer, PostgresServer],
    zygote: Zygote,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    primary, standby = servers
    name = primary.new_database().rpartition("/")[2]
    hosts = f"{primary.address},{standby.address}"
    settings = {
        "log_store": f"postgresql://rmq@{hosts}/{name}?target_session_attrs=read-write",
        "log_lease_ms": 500,
    }
    address, ledger = free_address(), Ledger()

    def lead(home: Path) -> int:
        pid = zygote.ask(serve=str(home), flight=address, settings=settings)
        eventually(lambda: serving(home))
        return pid

    def answer_more() -> None:
        stop = len(ledger.sent) + ANSWERS
        eventually(lambda: len(ledger.sent) > stop or traffic.failures)

    pid = lead(tmp_path / "home")
    with Client(address) as client:
        prepare(client)
        traffic = Traffic(client, ledger)
        traffic.start()
        try:
            answer_more()
            primary.stop(signal.SIGKILL)
            standby.promote()
            answer_more()
            assert client.status()["pid"] == pid
            os.kill(pid, signal.SIGKILL)
            assert zygote.ask(reap=pid) == -signal.SIGKILL
            shutil.rmtree(tmp_path / "home")
            pid = lead(tmp_path / "empty")
            answer_more()
            traffic.stop_sending()
            eventually(lambda: lag(client) == 0 or traffic.failures)
        finally:
            traffic.stop()

        assert_kept(client, ledger)
        print(f"{len(ledger.sent)} messages answered, {ledger.lost_calls} calls refused or lost")
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0
