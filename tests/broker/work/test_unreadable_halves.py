"""A half message that cannot be read: all others are asked about, and given up in their time."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.background import Due
from rmq_pipeline.broker.work import transaction_checks, unreadable
from rmq_pipeline.broker.work.reading import fetch
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError
from rmq_pipeline.settings import Settings
from rmq_pipeline.topic import GIVEN_UP_TOPIC
from tests.damaged import MARK, damage

SETTINGS = Settings()
AGAIN_MS = 60_000


def begin(broker: Broker, *bodies: bytes, producer_group: str = "p") -> None:
    """A frame for each."""
    broker.ensure_topic("t", type="transaction", queues=1)
    for body in bodies:
        broker.send_half("t", pa.table({"body": [body]}), producer_group=producer_group)


def asked(broker: Broker) -> list[bytes]:
    """Who asks for all groups is asked about all that is offered."""
    found: list[bytes] = broker.fetch_checks(limit=256)["body"].to_pylist()
    return found


def ask_until_the_last(broker: Broker, clock: ManualClock) -> None:
    """Count all checks that there are; the next sweep gives up."""
    clock.advance(SETTINGS.transaction_immunity_ms + 1)
    for _ in range(SETTINGS.transaction_check_max):
        assert broker.check_transactions()["given_up"] == 0
        asked(broker)
        clock.advance(SETTINGS.transaction_check_interval_ms + 1)


def given_up(broker: Broker) -> list[bytes]:
    found: list[bytes] = broker.read(GIVEN_UP_TOPIC, 0, offset=0, limit=100)["body"].to_pylist()
    return found


class Away:
    """The real reading, but for these offsets: the store fails when they are read."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = set(offsets)

    def __call__(self, engine: Any, places: Any, *, offset: Any, **how: Any) -> pa.Table:
        if self.offsets.intersection(offset.tolist()):
            raise StorageError("The archive is away.")
        return fetch(engine, places, offset=offset, **how)


def test_a_damaged_half_message_keeps_no_other_from_being_asked_about(
    broker: Broker, clock: ManualClock
) -> None:
    begin(broker, b"1", MARK, b"2", b"3")
    begin(broker, b"other", producer_group="q")
    damage(broker)

    for _ in range(2):
        clock.advance(SETTINGS.transaction_check_interval_ms + 1)
        broker.check_transactions()

        assert asked(broker) == [b"1", b"2", b"3", b"other"]
        assert asked(broker) == []


def test_a_damaged_half_message_keeps_no_other_from_being_given_up(
    broker: Broker, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    begin(broker, b"1", MARK, b"2")
    damage(broker)
    ask_until_the_last(broker, clock)
    caplog.clear()

    with caplog.at_level(logging.ERROR):
        report = broker.check_transactions()
        job = broker.engine.submit(Due())["jobs"]["check_transactions"]
        for _ in range(3):
            clock.advance(AGAIN_MS)
            assert broker.check_transactions()["given_up"] == 0

    assert report["given_up"] == 2
    assert given_up(broker) == [b"1", b"2"]
    assert len(broker.engine.state.halves) == 1
    assert job["due"] == 0
    assert job["next_due_ms"] == clock.now_ms() - 2 * AGAIN_MS
    assert len(caplog.records) == 1  # not with each try


def test_a_half_message_that_is_away_is_given_up_once_it_is_back(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(broker, b"away", b"there")
    ask_until_the_last(broker, clock)
    with monkeypatch.context() as patched:
        patched.setattr(unreadable, "fetch", Away(0))
        assert broker.check_transactions()["given_up"] == 1
    assert given_up(broker) == [b"there"]

    clock.advance(AGAIN_MS)
    assert broker.check_transactions()["given_up"] == 1

    assert given_up(broker) == [b"there", b"away"]
    assert not len(broker.engine.state.halves)


def test_a_half_message_that_could_not_be_given_up_can_be_rolled_back(
    broker: Broker, clock: ManualClock
) -> None:
    broker.ensure_topic("t", type="transaction", queues=1)
    sent = broker.send_half("t", pa.table({"body": [MARK]}), producer_group="p")
    damage(broker)
    ask_until_the_last(broker, clock)
    assert broker.check_transactions()["given_up"] == 0

    ids = sent["transaction_id"]
    broker.end_transactions(pa.table({"transaction_id": ids, "resolution": ["rollback"]}))

    assert not len(broker.engine.state.halves)
    assert not broker.engine.state.halves._put_off


def test_checks_that_were_taken_and_not_described_are_offered_again(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(broker, b"1", b"2")
    begin(broker, b"other", producer_group="q")
    clock.advance(SETTINGS.transaction_immunity_ms + 1)
    broker.check_transactions()

    def fails(*_: object, **__: object) -> None:
        raise StorageError("The writer has stopped.")

    with monkeypatch.context() as patched:
        patched.setattr(transaction_checks, "FindHalves", fails)
        with pytest.raises(StorageError):
            broker.fetch_checks(limit=256)

    assert sorted(asked(broker)) == [b"1", b"2", b"other"]


def test_a_half_message_that_is_away_is_asked_about_with_the_next_check_after_it_is_back(
    broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(broker, b"away", b"there")
    clock.advance(SETTINGS.transaction_immunity_ms + 1)
    broker.check_transactions()
    with monkeypatch.context() as patched:
        patched.setattr(unreadable, "fetch", Away(0))
        assert asked(broker) == [b"there"]

    clock.advance(SETTINGS.transaction_check_interval_ms + 1)
    broker.check_transactions()

    assert sorted(asked(broker)) == [b"away", b"there"]
