"""What is due of leases that have ended is what the revive job has to do."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.upkeep import Upkeep
from rmq_pipeline.clock import ManualClock
from tests.broker.sealed_home import messages, open_broker

INVISIBLE_MS = 30_000
#: For so many leases the first message is worked on.
PROLONGED = 20


@pytest.fixture
def line(home: Path, clock: ManualClock) -> Iterator[Broker]:
    """Two messages of one message group, with one receiver."""
    with open_broker(home, clock) as broker:
        broker.create_topic("t", queues=1, type="fifo")
        broker.create_group("g", order="message_group")
        broker.send("t", messages(2, message_group=["a", "a"]))
        yield broker


def both(broker: Broker) -> list[str]:
    got = broker.receive("g", "t", limit=2, invisible_duration_ms=INVISIBLE_MS)
    handles: list[str] = got["receipt_handle"].to_pylist()
    assert len(handles) == 2
    return handles


def due(broker: Broker) -> tuple[int, int | None]:
    job = broker.due()["jobs"]["revive"]
    return job["due"], job["oldest_ended_ms"]


def fallbacks(broker: Broker) -> int:
    events: pa.Table = broker.sql("SELECT * FROM events WHERE kind = 'upkeep_fallback'")
    return int(events.num_rows)


def test_what_waits_behind_a_lease_that_runs_is_not_due(line: Broker, clock: ManualClock) -> None:
    first = both(line)[:1]
    upkeep = Upkeep(line.engine, "none", archive={})
    for _ in range(PROLONGED):
        renewed = line.change_invisible_duration(first, INVISIBLE_MS)
        first = renewed["receipt_handle"].to_pylist()
        clock.advance(INVISIBLE_MS - 1)
        assert line.revive()["revived"] == 0
        assert due(line) == (0, None)
        upkeep._fall_back()

    assert fallbacks(line) == 0
    assert upkeep.last_fallback is None


def test_what_waited_behind_a_lease_is_due_with_it(line: Broker, clock: ManualClock) -> None:
    first = both(line)[:1]
    start = clock.now_ms()
    clock.advance(INVISIBLE_MS - 1)
    line.change_invisible_duration(first, INVISIBLE_MS)
    clock.advance(INVISIBLE_MS)
    assert due(line) == (2, start + INVISIBLE_MS)

    assert line.revive()["revived"] == 2

    assert due(line) == (0, None)


def test_what_waited_behind_a_settled_message_is_due(line: Broker, clock: ManualClock) -> None:
    first = both(line)[:1]
    end = clock.now_ms() + INVISIBLE_MS
    clock.advance(INVISIBLE_MS - 1)
    renewed = line.change_invisible_duration(first, INVISIBLE_MS)
    clock.advance(1)
    assert due(line) == (0, None)

    line.ack(renewed["receipt_handle"].to_pylist())

    assert due(line) == (1, end)
    assert line.revive()["revived"] == 1
    assert due(line) == (0, None)


def test_a_message_without_an_attempt_left_is_due_in_order(home: Path, clock: ManualClock) -> None:
    with open_broker(home, clock) as broker:
        broker.create_topic("t", queues=1, type="fifo")
        broker.create_group("g", order="message_group", max_attempts=1)
        broker.send("t", messages(2, message_group=["a", "a"]))
        both(broker)
        clock.advance(INVISIBLE_MS)
        assert due(broker)[0] == 2

        assert broker.revive()["dead_lettered"] == 1

        assert due(broker) == (0, None)
