"""Unreadable messages fail like any other, and no message waits behind them forever."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from rmq_pipeline.broker.work.unreadable import AWAY_MS
from rmq_pipeline.errors import CorruptLogError
from tests.damaged import MARK, damage
from tests.rocketmq.consuming import EMPTY, OK, Consumer, Stand

STORAGE = 50001
BACKOFF_MS = 30_000
#: A body of which a log file takes two.
LARGE = b"large" * 700_000
LARGE_PER_FILE = 2


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    yield stand
    stand.close()


@pytest.fixture
def one(stand: Stand) -> Consumer:
    return stand.consumer("one")


def test_a_message_that_cannot_be_read_counts_its_attempts(
    stand: Stand, one: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    stand.broker.create_topic("t", queues=1)
    stand.broker.create_group("g", backoff_ms=[BACKOFF_MS], max_attempts=2)
    stand.send("t", MARK)
    stand.send("t", b"sound")
    damage(stand.broker)

    with caplog.at_level(logging.ERROR):
        received = one.receive("t", "g")

    assert (received.code, received.bodies, received.attempts) == (OK, [b"sound"], [1])
    assert "cannot be read" in caplog.text
    assert one.ack("t", "g", received.handles).status.code == OK
    # It is not the next one again, but comes after the backoff, for its last attempt.
    assert one.receive("t", "g").code == EMPTY
    retrying = stand.broker.sql("SELECT delivery_attempts, reason FROM retrying").to_pylist()
    assert [row["delivery_attempts"] for row in retrying] == [1]
    assert "cannot be read" in retrying[0]["reason"]
    stand.clock.advance(BACKOFF_MS)
    assert one.receive("t", "g").code == STORAGE
    assert one.receive("t", "g").code == EMPTY


def test_nothing_of_a_message_group_goes_past_one_that_cannot_be_read(
    stand: Stand, one: Consumer
) -> None:
    stand.broker.create_topic("t", type="fifo", queues=1)
    stand.broker.create_group("g", order="message_group", backoff_ms=[BACKOFF_MS])
    stand.send("t", b"a1", message_group="A")
    stand.send("t", MARK, message_group="A")
    stand.send("t", b"a3", message_group="A")
    stand.send("t", b"b1", message_group="B")
    damage(stand.broker)

    received = one.receive("t", "g", renewed=True)

    assert received.bodies == [b"a1", b"b1"]
    assert one.ack("t", "g", received.handles).status.code == OK
    assert one.receive("t", "g").code == EMPTY
    stand.clock.advance(BACKOFF_MS)
    assert one.receive("t", "g").code == STORAGE


def test_nothing_of_a_queue_in_order_goes_past_one_that_cannot_be_read(
    stand: Stand, one: Consumer
) -> None:
    stand.broker.create_topic("t", type="fifo", queues=1)
    stand.broker.create_group("g", order="queue", backoff_ms=[BACKOFF_MS])
    stand.send("t", b"a1", message_group="A")
    stand.send("t", MARK, message_group="A")
    stand.send("t", b"b1", message_group="B")
    damage(stand.broker)

    received = one.receive("t", "g")

    assert received.bodies == [b"a1"]
    assert one.ack("t", "g", received.handles).status.code == OK
    assert one.receive("t", "g").code == EMPTY


def test_nothing_is_charged_while_the_archive_is_away(stand: Stand, one: Consumer) -> None:
    broker = stand.broker
    broker.create_topic("t", queues=1)
    broker.create_group("g", max_attempts=1)
    for _ in range(LARGE_PER_FILE + 1):
        stand.send("t", LARGE)
    stand.clock.advance(2 * broker.engine.settings.seal_after_ms)
    assert broker.seal()["dropped_files"]
    there = broker.engine.home.path / "topics"
    away = there.rename(there.with_name("away"))

    for _ in range(LARGE_PER_FILE):
        assert one.receive("t", "g", batch=1).code == STORAGE
    # What is in the log still does not wait for them.
    assert one.receive("t", "g", batch=1).bodies == [LARGE]
    away.rename(there)

    stand.clock.advance(2 * AWAY_MS)
    received = one.receive("t", "g")
    assert (received.code, received.bodies, received.attempts) == (OK, [LARGE] * 2, [1, 1])


def test_a_message_that_cannot_be_dead_lettered_blocks_no_other(
    stand: Stand, one: Consumer
) -> None:
    for group, body in (("a", MARK), ("b", b"sound")):
        stand.broker.create_topic(f"t-{group}", queues=1)
        stand.broker.create_group(group, max_attempts=1)
        stand.send(f"t-{group}", body)
    damage(stand.broker)
    assert one.receive("t-a", "a").code == STORAGE
    assert one.receive("t-b", "b", invisible_ms=10_000).bodies == [b"sound"]
    stand.clock.advance(10_000)

    with pytest.raises(CorruptLogError):
        stand.broker.revive(wait_ms=0)

    assert one.receive("%DLQ%b", "burial").bodies == [b"sound"]
    assert one.receive("%DLQ%a", "burial").code == EMPTY


@pytest.mark.parametrize("lost", ["queue_offset < 50", "true"], ids=["some", "all"])
def test_a_receive_of_rows_that_the_database_lacks_is_refused(home: Path, lost: str) -> None:
    with contextlib.closing(Stand(home)) as stand:
        stand.broker.create_topic("t", queues=1)
        stand.broker.create_group("g")
        stand.send("t", *[b"x"] * 100)
    with duckdb.connect(home / "state.duckdb") as database:
        database.execute(f"DELETE FROM store.consume_queue WHERE {lost}")

    with contextlib.closing(Stand(home)) as stand:
        first, *rest = stand.consumer().call("t", "g", wait_ms=10_000)

    assert first.status.code == STORAGE
    assert "lacks offsets 0 to " in first.status.message
    assert rest == []
