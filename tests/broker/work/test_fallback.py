"""With upkeep dagster the broker does each kind of background work itself when no run comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.upkeep import Upkeep
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.limits import MIB
from rmq_pipeline.settings import Settings
from tests.broker.archive_home import HOUR_MS, fill, opened
from tests.waiting import until

OVERDUE_MS = 60_000
SEAL_AFTER_MS = 10_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with opened(home, clock, seal_after_ms=SEAL_AFTER_MS) as broker:
        yield broker


@pytest.fixture
def upkeep(broker: Broker) -> Upkeep:
    """Whose turns are taken by hand."""
    archive = {"expire": broker.expire, "seal": broker.seal, "compact": broker.compact}
    return Upkeep(broker.engine, "none", archive=archive, due=broker.due)


def fallbacks(broker: Broker) -> list[str]:
    found = broker.sql("SELECT detail FROM events WHERE kind = 'upkeep_fallback'")
    return [json.loads(detail)["job"] for detail in found["detail"].to_pylist()]


def send(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"x" * 1000] * 10}))


def prepare(broker: Broker, clock: ManualClock, job: str) -> None:
    """Make work of a kind due, now."""
    if job == "seal":
        broker.create_topic("t", queues=1)
        send(broker)
        broker.engine.dispatched()  # only what DuckDB has can be sealed
        clock.advance(SEAL_AFTER_MS)
        return
    fill(broker, turns=4, queues=1)
    if job == "expire":
        broker.compact()
        broker.expire()
        broker.alter_topic("t", retention_ms=HOUR_MS)
    # How long what was found of the archive holds.
    clock.advance(60_000)


@pytest.mark.parametrize("job", ["seal", "compact", "expire"])
def test_what_no_window_comes_for_is_done_and_told(
    broker: Broker, upkeep: Upkeep, clock: ManualClock, job: str
) -> None:
    prepare(broker, clock, job)
    assert broker.due()["jobs"][job]["due"]

    upkeep._fall_back_archive()
    clock.advance(OVERDUE_MS)
    upkeep._fall_back_archive()
    early = fallbacks(broker)
    clock.advance(1)
    upkeep._fall_back_archive()

    assert early == []
    assert fallbacks(broker) == [job]
    clock.advance(1_000)  # how long what was found of the archive holds
    assert not broker.due()["jobs"][job]["due"]
    assert upkeep.last_fallback is not None
    assert upkeep.last_fallback["overdue_ms"] == OVERDUE_MS + 1


def test_a_window_that_works_on_it_is_waited_for(
    broker: Broker, upkeep: Upkeep, clock: ManualClock
) -> None:
    prepare(broker, clock, "seal")
    upkeep._fall_back_archive()

    broker.open_window("upkeep/seal", owner="run", duration_ms=2 * OVERDUE_MS)
    clock.advance(OVERDUE_MS + 1)
    upkeep._fall_back_archive()
    during = fallbacks(broker)
    clock.advance(OVERDUE_MS)
    upkeep._fall_back_archive()
    clock.advance(OVERDUE_MS + 1)
    upkeep._fall_back_archive()

    assert during == []
    assert fallbacks(broker) == ["seal"]


def test_a_broker_whose_dagster_is_away_seals_by_itself(home: Path, clock: ManualClock) -> None:
    settings = Settings(reserve_bytes=MIB, log_file_bytes=MIB, seal_after_ms=SEAL_AFTER_MS)
    with Broker.open(home, clock=clock, upkeep="dagster", settings=settings) as away:
        away.create_topic("t", queues=1)
        send(away)
        clock.advance(SEAL_AFTER_MS)

        def later() -> list[str]:
            # The time may pass before upkeep waits for it: it then waits for the next.
            clock.advance(5_000)
            return fallbacks(away)

        until(later)

        assert fallbacks(away) == ["seal"]
        assert away.archive()["files"] == 1
