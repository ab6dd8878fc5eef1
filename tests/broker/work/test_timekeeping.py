"""Time under a machine's clock that jumps: intervals stay as long as they are, nothing is early."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.timekeeping import BrokerClock
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

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


# --------------------------------------------------------------------------- the clock by itself


@pytest.mark.parametrize("by_ms", [2 * HOUR, -2 * HOUR])
def test_a_jump_does_not_change_how_long_a_second_is(machine: Machine, by_ms: int) -> None:
    clock = machine.clock()

    machine.set_wall(by_ms)
    before = clock.now_ms()
    pass_slowly(machine, clock, SECOND)

    assert before == START_MS
    # A clock that is behind is waited for by going a tenth slower.
    assert clock.now_ms() - before in ((SECOND,) if by_ms > 0 else range(900, 1_000))


def test_time_never_goes_back(machine: Machine) -> None:
    clock, seen = machine.clock(), []

    for by_ms in (2 * HOUR, -3 * HOUR, 500, -500, 61 * MINUTE, -SECOND):
        machine.set_wall(by_ms)
        for _ in range(20):
            machine.pass_ms(70)
            seen.append(clock.now_ms())

    assert seen == sorted(seen)


def test_a_wall_clock_that_stays_where_it_jumped_to_is_followed(machine: Machine) -> None:
    clock = machine.clock()
    machine.set_wall(2 * HOUR)
    pass_slowly(machine, clock, 5 * MINUTE)
    assert clock.now_ms() == START_MS + 5 * MINUTE
    assert clock.ahead_ms() == -2 * HOUR

    pass_slowly(machine, clock, SECOND)

    assert clock.now_ms() == machine.wall_ms
    assert clock.ahead_ms() == 0


def test_a_wall_clock_that_jumps_from_place_to_place_is_not_followed(machine: Machine) -> None:
    clock = machine.clock()

    for _ in range(4):
        machine.set_wall(HOUR)
        pass_slowly(machine, clock, 3 * MINUTE)

    assert clock.now_ms() == START_MS + 12 * MINUTE


def test_time_meets_a_wall_clock_that_went_back(machine: Machine) -> None:
    clock = machine.clock()
    machine.set_wall(-MINUTE)
    pass_slowly(machine, clock, 5 * MINUTE)
    assert 25 * SECOND < clock.ahead_ms() < 35 * SECOND

    pass_slowly(machine, clock, 6 * MINUTE)

    assert clock.ahead_ms() == 0
    assert clock.now_ms() == machine.wall_ms


def test_a_small_difference_is_made_up_slowly(machine: Machine) -> None:
    clock = machine.clock()
    machine.set_wall(500)
    pass_slowly(machine, clock, 10 * SECOND)
    assert clock.now_ms() - START_MS in range(10_005, 10_011)

    pass_slowly(machine, clock, 10 * MINUTE)

    assert machine.wall_ms - clock.now_ms() in (0, 1)


def test_time_that_nobody_looked_at_is_not_led_beyond_the_wall_clock(machine: Machine) -> None:
    clock = machine.clock()
    machine.set_wall(-10)
    pass_slowly(machine, clock, SECOND // 2)

    machine.pass_ms(8 * HOUR)

    assert machine.wall_ms - clock.now_ms() in (0, 1)


def test_time_goes_on_while_the_machine_is_suspended(machine: Machine) -> None:
    clock = machine.clock()

    machine.pass_ms(8 * HOUR)  # both clocks count it, and nobody looks

    assert clock.now_ms() == START_MS + 8 * HOUR


def test_a_difference_is_told_once_each_way(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    clock = machine.clock()
    with caplog.at_level(logging.WARNING):
        machine.set_wall(2 * HOUR)
        pass_slowly(machine, clock, MINUTE)
        assert [f"{2 * HOUR} ms ahead" in text for text in caplog.messages] == [True]

        machine.set_wall(-2 * HOUR)
        pass_slowly(machine, clock, MINUTE)

    assert len(caplog.messages) == 2
    assert "agree again" in caplog.messages[1]


def test_a_wait_ends_when_the_wall_clock_has_been_set() -> None:
    # Real clocks: a wait of 100 ms takes about so long with time a tenth slower, and is not early.
    jump = [0]
    clock = BrokerClock(wall_ns=lambda: time.time_ns() + jump[0])
    jump[0] = -2 * HOUR * 1_000_000
    condition = threading.Condition()
    at_ms = clock.now_ms() + 100

    with condition:
        clock.wait_until(condition, at_ms)

    assert clock.now_ms() >= at_ms


# ---------------------------------------------------------------------------------- in a broker


def bodies(table: pa.Table) -> list[bytes]:
    found: list[bytes] = table["body"].to_pylist()
    return found


@pytest.mark.parametrize("by_ms", [2 * HOUR, -2 * HOUR])
def test_a_lease_and_a_retry_are_on_time_when_the_clock_jumps(
    broker: Broker, machine: Machine, by_ms: int
) -> None:
    broker.send("work", pa.table({"body": [b"one"]}))
    assert bodies(broker.receive("workers", "work", invisible_duration_ms=10 * SECOND)) == [b"one"]

    machine.set_wall(by_ms)
    machine.pass_ms(SECOND)
    broker.send(
        "work", pa.table({"body": [b"two"]})
    )  # what is stored meanwhile has the time of now
    machine.set_wall(-by_ms)
    assert bodies(broker.receive("workers", "work")) == [b"two"]
    machine.pass_ms(8_500)
    assert broker.receive("workers", "work").num_rows == 0
    machine.pass_ms(2_500)  # 12 s: the lease of 10, the pause of 1 before the retry

    assert bodies(broker.receive("workers", "work")) == [b"one"]


@pytest.mark.parametrize("by_ms", [2 * HOUR, -2 * HOUR])
def test_a_level_is_on_time_when_the_clock_jumps(
    broker: Broker, machine: Machine, by_ms: int
) -> None:
    machine.set_wall(by_ms)
    broker.send("late", pa.table({"body": [b"a"], "delay_level": pa.array([1], pa.int32())}))
    machine.set_wall(-by_ms)

    machine.pass_ms(999)
    assert broker.deliver_scheduled()["delivered"] == 0
    machine.pass_ms(150)

    assert broker.deliver_scheduled()["delivered"] == 1


@pytest.fixture
def ran_ahead(home: Path, broker: Broker, machine: Machine) -> Iterator[Broker]:
    """A broker whose log was written two hours ahead of the machine's clock."""
    broker.close()
    machine.set_wall(2 * HOUR)
    rewrite(home, boot_id="another")
    with opened(home, machine) as before:
        before.send("work", pa.table({"body": [b"from ahead"]}))
    machine.set_wall(-2 * HOUR)
    with opened(home, machine) as after:
        yield after


def test_intervals_end_after_a_start_with_a_log_from_ahead(
    ran_ahead: Broker, machine: Machine
) -> None:
    assert ran_ahead.receive("workers", "work", invisible_duration_ms=10 * SECOND).num_rows == 1
    ran_ahead.send("late", pa.table({"body": [b"a"], "delay_level": pa.array([1], pa.int32())}))

    machine.pass_ms(999)
    assert ran_ahead.deliver_scheduled()["delivered"] == 0
    machine.pass_ms(200)
    assert ran_ahead.deliver_scheduled()["delivered"] == 1
    machine.pass_ms(8_800)
    assert ran_ahead.receive("workers", "work").num_rows == 0
    machine.pass_ms(3_000)

    assert ran_ahead.receive("workers", "work").num_rows == 1


def test_a_moment_is_not_early_by_the_wall_clock_after_a_log_from_ahead(
    ran_ahead: Broker, machine: Machine
) -> None:
    for minutes in (30, 60, 20, 40):
        table = {
            "body": [str(minutes).encode()],
            "deliver_at_ms": [machine.wall_ms + minutes * MINUTE],
        }
        ran_ahead.send("late", pa.table(table))
    assert ran_ahead.due()["jobs"]["deliver_scheduled"]["due"] == 0

    machine.pass_ms(20 * MINUTE - 1)
    assert ran_ahead.deliver_scheduled()["delivered"] == 0
    machine.pass_ms(1)
    assert ran_ahead.due()["jobs"]["deliver_scheduled"]["due"] == 1
    assert ran_ahead.deliver_scheduled()["delivered"] == 1
    machine.pass_ms(90 * MINUTE)

    assert ran_ahead.deliver_scheduled(limit=2)["delivered"] == 2
    assert ran_ahead.deliver_scheduled()["delivered"] == 1
    stored = bodies(ran_ahead.read("late", 0, offset=0, limit=10))
    assert stored == [b"20", b"30", b"40", b"60"]


def test_what_was_held_back_comes_when_the_wall_clock_is_set(
    ran_ahead: Broker, machine: Machine
) -> None:
    due_ms = machine.wall_ms + HOUR
    ran_ahead.send("late", pa.table({"body": [b"a"], "deliver_at_ms": [due_ms]}))
    assert ran_ahead.deliver_scheduled()["delivered"] == 0

    machine.set_wall(2 * HOUR)
    machine.pass_ms(SECOND)

    assert ran_ahead.deliver_scheduled()["delivered"] == 1


def test_status_and_log_tell_that_time_is_ahead(
    home: Path, broker: Broker, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    assert broker.status()["clock_ahead_ms"] == 0
    broker.close()
    machine.set_wall(-2 * HOUR)

    with caplog.at_level(logging.WARNING), opened(home, machine) as again:
        assert again.status()["clock_ahead_ms"] == 2 * HOUR

    told = [text for text in caplog.messages if "machine's clock" in text]
    assert len(told) == 1
    assert f"{2 * HOUR} ms behind" in told[0]


def test_moments_in_the_log_never_go_back(home: Path, broker: Broker, machine: Machine) -> None:
    for by_ms in (2 * HOUR, -3 * HOUR, HOUR):
        machine.set_wall(by_ms)
        machine.pass_ms(SECOND)
        broker.send("work", pa.table({"body": [b"x"]}))
    broker.close()

    machine.set_wall(-2 * HOUR)
    with opened(home, machine) as again:
        machine.pass_ms(SECOND)
        again.send("work", pa.table({"body": [b"x"]}))
        stored = again.read("work", 0, offset=0, limit=10)["stored_at_ms"].to_pylist()

    assert len(stored) == 4
    assert stored == sorted(stored)
