"""A start goes on in the time of the last process, if the file of its clock can be believed."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.timekeeping import ClockFile
from tests.broker.clocked_home import (
    HOUR,
    MINUTE,
    SECOND,
    START_MS,
    Machine,
    opened,
    pass_slowly,
    rewrite,
)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def broker(home: Path, machine: Machine) -> Iterator[Broker]:
    with opened(home, machine) as broker:
        broker.create_topic("work", queues=1)
        broker.create_topic("late", type="delay", queues=1)
        broker.create_group("workers", backoff_ms=[1 * SECOND])
        yield broker


def bodies(table: pa.Table) -> list[bytes]:
    found: list[bytes] = table["body"].to_pylist()
    return found


def test_a_start_while_the_clock_is_ahead_ends_nothing_early(
    home: Path, broker: Broker, machine: Machine
) -> None:
    broker.send("work", pa.table({"body": [b"leased"]}))
    broker.send("late", pa.table({"body": [b"in an hour"], "delay_level": [17]}))
    broker.receive("workers", "work", invisible_duration_ms=10 * MINUTE)
    broker.close()

    machine.set_wall(2 * HOUR)
    machine.pass_ms(SECOND)
    with opened(home, machine) as again:
        assert again.receive("workers", "work").num_rows == 0
        assert again.deliver_scheduled()["delivered"] == 0
        assert again.status()["clock_ahead_ms"] == -2 * HOUR

        machine.pass_ms(10 * MINUTE)
        assert bodies(again.receive("workers", "work")) == [b"leased"]


def test_a_broker_that_was_killed_goes_on_in_its_time(home: Path, machine: Machine) -> None:
    clock, file = machine.clock(), ClockFile(home)
    home.mkdir()
    machine.set_wall(HOUR)  # which is not followed
    machine.pass_ms(SECOND)
    file.keep(clock)

    machine.pass_ms(30 * SECOND)
    later = machine.clock()
    ClockFile(home).lead(later, last_at_ms=0)

    assert later.now_ms() == clock.now_ms() == START_MS + 31 * SECOND


def test_a_start_of_the_machine_or_another_one_takes_the_wall_clock(
    home: Path, machine: Machine
) -> None:
    home.mkdir()
    ClockFile(home).keep(machine.clock())
    machine.set_wall(HOUR)

    machine.boot_ms -= MINUTE
    younger = machine.clock()
    ClockFile(home).lead(younger, last_at_ms=0)
    assert younger.now_ms() == START_MS + HOUR
    machine.boot_ms += MINUTE
    rewrite(home, boot_id="another")
    other = machine.clock()
    ClockFile(home).lead(other, last_at_ms=0)

    assert other.now_ms() == START_MS + HOUR


@pytest.mark.parametrize("by_ms", [-2 * HOUR, 2 * HOUR, -SECOND // 2])
@pytest.mark.parametrize("run_ms", [20 * SECOND, 59 * SECOND, 7 * MINUTE])
def test_a_broker_that_was_killed_while_its_time_was_led_goes_on_in_it(
    home: Path, machine: Machine, by_ms: int, run_ms: int
) -> None:
    home.mkdir()
    clock, file = machine.clock(), ClockFile(home)
    file.keep(clock)

    machine.set_wall(by_ms)
    for _ in range(run_ms // 500):  # housekeeping
        pass_slowly(machine, clock, 500)
        file.keep(clock)
    machine.pass_ms(20 * SECOND)
    after = machine.clock()
    ClockFile(home).lead(after, last_at_ms=0)

    assert abs(after.now_ms() - clock.now_ms()) <= 60


@pytest.mark.parametrize("faults", [{"now_ns": 1 << 62}, {"boot_ns": -(1 << 62)}])
def test_a_time_far_ahead_of_wall_clock_and_log_is_not_believed(
    home: Path,
    broker: Broker,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    faults: dict[str, int],
) -> None:
    broker.send("work", pa.table({"body": [b"one"]}))
    broker.receive("workers", "work", invisible_duration_ms=10 * MINUTE)
    broker.close()
    rewrite(home, **faults)

    with caplog.at_level(logging.WARNING), opened(home, machine) as again:
        assert again.engine.clock.now_ms() == START_MS
        assert again.receive("workers", "work").num_rows == 0

    assert [text for text in caplog.messages if "a time over a day ahead is ignored" in text]


@pytest.mark.parametrize(("days", "is_believed"), [(0.9, True), (1.1, False)])
def test_a_kept_time_is_believed_for_a_day_ahead(
    home: Path, machine: Machine, days: float, is_believed: bool
) -> None:
    home.mkdir()
    ClockFile(home).keep(machine.clock())
    machine.set_wall(-int(days * 24 * HOUR))
    wall, by_log = machine.clock(), machine.clock()

    ClockFile(home).lead(wall, last_at_ms=0)
    ClockFile(home).lead(by_log, last_at_ms=START_MS - HOUR)

    assert wall.now_ms() == (START_MS if is_believed else machine.wall_ms)
    assert by_log.now_ms() == START_MS


@pytest.mark.parametrize("now_ns", [5, -(1 << 62)])
def test_a_start_is_never_before_the_last_moment_of_the_log(
    home: Path, broker: Broker, machine: Machine, now_ns: int
) -> None:
    machine.pass_ms(MINUTE)
    broker.send("work", pa.table({"body": [b"one"]}))
    last_ms = broker.read("work", 0, offset=0, limit=1)["stored_at_ms"].to_pylist()[0]
    broker.close()
    rewrite(home, now_ns=now_ns)
    machine.set_wall(-HOUR)

    with opened(home, machine) as again:
        assert again.engine.clock.now_ms() == last_ms
