"""A machine whose clock a test sets, and brokers that start on it."""

from pathlib import Path

from rmq_pipeline import durable_files
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.timekeeping import FILE_NAME, BrokerClock
from rmq_pipeline.settings import Settings
from tests.broker.sealed_home import SMALL

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
START_MS = 1_700_000_000_000


class Machine:
    """A machine whose wall clock can be set."""

    def __init__(self) -> None:
        self.wall_ms = START_MS
        self.boot_ms = 5_000_000

    def clock(self) -> BrokerClock:
        """The clock of a broker that starts now."""
        return BrokerClock(
            wall_ns=lambda: self.wall_ms * 1_000_000, boot_ns=lambda: self.boot_ms * 1_000_000
        )

    def pass_ms(self, milliseconds: int) -> None:
        """Time passes, whatever the wall clock shows."""
        self.wall_ms += milliseconds
        self.boot_ms += milliseconds

    def set_wall(self, by_ms: int) -> None:
        """Set the wall clock."""
        self.wall_ms += by_ms


def pass_slowly(machine: Machine, clock: BrokerClock, milliseconds: int) -> None:
    """Time passes while the clock is looked at ten times a second."""
    for _ in range(milliseconds // 100):
        machine.pass_ms(100)
        clock.now_ms()


def opened(home: Path, machine: Machine) -> Broker:
    """A broker that starts on the machine now."""
    return Broker.open(home, clock=machine.clock(), upkeep="none", settings=Settings(**SMALL))


def rewrite(home: Path, **values: int | str) -> None:
    """Change what the file of a home says of its clock."""
    file = home / FILE_NAME
    said = {**durable_files.load_json(file.read_bytes()), **values}
    file.write_bytes(durable_files.dump_json(said))
