"""A message that cannot be copied stays exhausted; it keeps no other from its dead letters."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide import publish
from rmq_pipeline.broker.decide.background import Due
from rmq_pipeline.broker.decide.dead_letter import Exhausted, FindExhausted
from rmq_pipeline.broker.work import dead_letter
from rmq_pipeline.broker.work.upkeep import Upkeep
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from tests.broker.sealed_home import messages, open_broker, seal_all

LEASE_MS = 10
MINUTE_MS = 60_000
#: When what the store could not give is tried again at first.
SOON_MS = 5_000
SMALL = Settings(reserve_bytes=0, log_file_bytes=1 << 20)


def damaged(*bodies: bytes) -> pa.Table:
    """Messages with a property that is no text, as homes have it that took them."""
    n = len(bodies)
    ends = np.arange(0, 3 * n + 1, 3, dtype=np.int32)
    values = pa.Array.from_buffers(
        pa.string(), n, [None, pa.py_buffer(ends), pa.py_buffer(b"a\xff\xfe" * n)]
    )
    names, rows = pa.array(["k"] * n), pa.array(range(n + 1), pa.int32())
    properties = pa.MapArray.from_arrays(rows, names, values)
    return pa.table({"body": list(bodies), "properties": properties})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock, tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", clock=clock, upkeep="none", settings=SMALL) as broker:
        for name in ("one", "two"):
            broker.create_topic(name, queues=1)
            broker.create_group(f"readers-of-{name}", max_attempts=1)
        yield broker


def store_unchecked(
    broker: Broker, topic: str, *, messages: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What admission refuses now."""
    with monkeypatch.context() as patched:
        patched.setattr(publish, "admit", lambda *_, **__: None)
        broker.send(topic, messages)


def let_all_fail(broker: Broker, clock: ManualClock) -> None:
    """End the only delivery that each message has."""
    for name in ("one", "two"):
        broker.receive(f"readers-of-{name}", name, limit=100, invisible_duration_ms=LEASE_MS)
    clock.advance(2 * LEASE_MS)


def dead(broker: Broker, group: str) -> list[bytes]:
    found = broker.read(f"%DLQ%{group}", 0, offset=0, limit=100)
    bodies: list[bytes] = found["body"].to_pylist()
    return bodies


def test_one_that_cannot_be_copied_keeps_no_other_group_from_dead_lettering(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    broker.send("two", pa.table({"body": [b"good"]}))
    let_all_fail(broker, clock)

    with pytest.raises(errors.OperatorError, match="cannot be dead-lettered"):
        broker.revive()

    assert dead(broker, "readers-of-two") == [b"good"]
    assert dead(broker, "readers-of-one") == []


def test_one_that_cannot_be_copied_keeps_no_other_of_its_queue_from_dead_lettering(
    broker: Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker.send("one", pa.table({"body": [b"first"]}))
    store_unchecked(broker, "one", messages=damaged(b"bad", b"worse"), monkeypatch=monkeypatch)
    broker.send("one", pa.table({"body": [b"last"]}))
    let_all_fail(broker, clock)

    with caplog.at_level(logging.ERROR), pytest.raises(errors.OperatorError):
        broker.revive()

    assert dead(broker, "readers-of-one") == [b"first", b"last"]
    assert "2 messages of" in caplog.text
    assert "the first at offset 1" in caplog.text
    [left] = broker.engine.submit(FindExhausted(None, 10))
    assert left.queue_offset.tolist() == [1, 2]


def test_more_than_are_found_at_once_hide_no_other_queue(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "AT_ONCE", 2)
    bad = damaged(b"bad", b"worse", b"worst")
    store_unchecked(broker, "one", messages=bad, monkeypatch=monkeypatch)
    broker.send("two", pa.table({"body": [b"good"]}))
    let_all_fail(broker, clock)

    with pytest.raises(errors.OperatorError):
        broker.revive()

    assert dead(broker, "readers-of-two") == [b"good"]


def test_more_than_are_found_at_once_hide_nothing_of_their_queue(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "AT_ONCE", 2)
    bad = damaged(b"bad", b"worse", b"worst")
    store_unchecked(broker, "one", messages=bad, monkeypatch=monkeypatch)
    broker.send("one", pa.table({"body": [b"good"]}))
    let_all_fail(broker, clock)

    with pytest.raises(errors.OperatorError):
        broker.revive()

    assert dead(broker, "readers-of-one") == [b"good"]


def test_who_settles_a_sound_message_hears_nothing_of_another(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    broker.send("one", pa.table({"body": [b"settled", b"forwarded"]}))
    got = broker.receive("readers-of-one", "one", limit=3)["receipt_handle"]
    settled = []

    for handle in got.to_pylist()[:2]:
        outcome = pa.table({"receipt_handle": [handle], "outcome": ["dead_letter"]})
        settled.append(broker.settle("readers-of-one", outcome)["dead_lettered"])
    broker.forward_to_dead_letter_queue(got.to_pylist()[2:], reason="no good")

    assert settled == [1, 1]
    assert dead(broker, "readers-of-one") == [b"settled", b"forwarded"]


def test_who_receives_hears_nothing_of_another_groups_message(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    broker.send("two", pa.table({"body": [b"ended"]}))
    let_all_fail(broker, clock)
    assert broker.receive("readers-of-one", "one").num_rows == 0
    broker.send("two", pa.table({"body": [b"next"]}))

    received = broker.receive("readers-of-two", "two", limit=10)

    assert received["body"].to_pylist() == [b"next"]
    assert dead(broker, "readers-of-two") == [b"ended"]


def test_what_cannot_be_dead_lettered_is_told_once_and_counted_ever_after(
    broker: Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    let_all_fail(broker, clock)
    with pytest.raises(errors.OperatorError, match="cannot be dead-lettered"):
        broker.revive()
    caplog.clear()

    reports = []
    for _ in range(5):
        clock.advance(MINUTE_MS)
        reports.append(broker.revive())

    assert [report["dead_letter_failures"] for report in reports] == [1] * 5
    assert not caplog.records


@pytest.fixture
def away(home: Path, clock: ManualClock) -> Iterator[tuple[Broker, Path]]:
    """A broker with ten exhausted messages, and its archive, which is not where it was."""
    there, away = home / "topics", home / "away"
    with open_broker(home, clock) as broker:
        broker.create_topic("one", queues=1)
        broker.create_group("readers", max_attempts=1)
        for turn in range(4):
            broker.send("one", messages(100, start=100 * turn, body_bytes=4_000))
        seal_all(broker)
        broker.receive("readers", "one", limit=10, invisible_duration_ms=LEASE_MS)
        clock.advance(2 * LEASE_MS)
        broker.engine.segments._files.drop(lambda _: True)  # else they are read as they are open
        broker.engine.segments._groups.drop(lambda _: True)
        there.rename(away)
        with pytest.raises(errors.StorageError):
            broker.revive()
        yield broker, away


def test_what_could_not_be_dead_lettered_is_tried_again(
    away: tuple[Broker, Path], home: Path, clock: ManualClock
) -> None:
    broker, archive = away
    archive.rename(home / "topics")
    clock.advance(SOON_MS)

    report = broker.revive()

    assert (report["dead_lettered"], report["dead_letter_failures"]) == (10, 0)


def test_the_broker_tries_them_again_where_runs_do_its_work(
    away: tuple[Broker, Path], home: Path, clock: ManualClock
) -> None:
    broker, archive = away
    upkeep = Upkeep(broker.engine, "none", archive={})
    archive.rename(home / "topics")
    clock.advance(SOON_MS)

    upkeep._fall_back()

    assert len(dead(broker, "readers")) == 10
    assert upkeep.last_fallback is None


def test_who_forwards_is_not_told_of_what_was_before(away: tuple[Broker, Path], home: Path) -> None:
    broker, archive = away
    broker.reset_offset("readers", "one", to_earliest=True)
    archive.rename(home / "topics")

    broker.forward_to_dead_letter_queue(broker.receive("readers", "one", limit=10))

    assert len(dead(broker, "readers")) == 10


def test_who_forwards_one_that_cannot_be_copied_is_told(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send("one", pa.table({"body": [b"first"]}))
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    received = broker.receive("readers-of-one", "one", limit=2)

    with pytest.raises(errors.OperatorError, match="cannot be dead-lettered"):
        broker.forward_to_dead_letter_queue(received, reason="no good")

    assert dead(broker, "readers-of-one") == [b"first"]
    [left] = broker.engine.submit(FindExhausted(None, 10))
    assert left.queue_offset.tolist() == [1]


@pytest.mark.parametrize("noted_late", [False, True])
def test_what_cannot_be_dead_lettered_is_not_due(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, *, noted_late: bool
) -> None:
    store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
    let_all_fail(broker, clock)
    failures = broker.engine.dead_letter_failures
    assert broker.engine.submit(Due(failures.offsets()))["jobs"]["revive"]["due"] == 1
    with pytest.raises(errors.OperatorError):
        broker.revive()
    job = broker.engine.submit(Due(failures.offsets()))["jobs"]["revive"]
    assert (job["due"], job["oldest_ended_ms"]) == (0, None)
    assert broker.due()["jobs"]["revive"] == job
    upkeep = Upkeep(broker.engine, "none", archive={})

    if noted_late:  # somebody else finds that it cannot be, after this one has asked what is due
        monkeypatch.setattr(failures, "offsets", dict)
    for _ in range(5):
        clock.advance(MINUTE_MS)
        upkeep._fall_back()

    assert upkeep.last_fallback is None


def test_a_home_with_one_that_cannot_be_copied_opens(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("one", queues=1)
        broker.create_group("readers", max_attempts=1)
        store_unchecked(broker, "one", messages=damaged(b"bad"), monkeypatch=monkeypatch)
        broker.receive("readers", "one", invisible_duration_ms=LEASE_MS)
        clock.advance(2 * LEASE_MS)
        with pytest.raises(errors.OperatorError):
            broker.revive()

    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        assert broker.send("one", pa.table({"body": [b"next"]})).num_rows == 1


def test_a_full_disk_is_told_at_once(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send("one", pa.table({"body": [b"a", b"b", b"c"]}))
    let_all_fail(broker, clock)
    tried = []

    def refuse(_engine: object, exhausted: Exhausted) -> int:
        tried.append(len(exhausted))
        raise errors.StoreFullError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(dead_letter, "_dead_letter_part", refuse)
        with pytest.raises(errors.StoreFullError):
            broker.revive()

    assert tried == [3]
    broker.revive()
    assert dead(broker, "readers-of-one") == [b"a", b"b", b"c"]
