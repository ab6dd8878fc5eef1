"""File with the last state of the broker's time and the monotonic clock, read at the next start.

The monotonic clock runs until the machine restarts. So a restarted broker need not trust a wall
clock that was set meanwhile or is wrong for a moment.
"""

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rmq_pipeline import durable_files
from rmq_pipeline.clock import Clock, Line

FILE_NAME: Final = "clock.json"
#: Interval of writes, and the deviation from the last line that causes an earlier write.
_EVERY_NS: Final = 60_000_000_000
_PARTED_NS: Final = 10_000_000
#: Changes with each start of the machine.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class ClockFile:
    """Clock file of a home. It is never synced, because it is void after a power cut anyway."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME
        self._written: Line | None = None

    def lead(self, clock: Clock, *, last_at_ms: int) -> None:
        """Continue the time of the last process, if the machine has not restarted.

        Args:
            last_at_ms: last time in the log.
        """
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            said = durable_files.load_json(self._path.read_bytes())
            if said["boot_id"] == _boot_id():
                # Older versions did not store the rate of the time.
                pace = int(said.get("faster_ppm", 0)), int(said.get("gap_ns", 0))
                mark = Line(int(said["now_ns"]), int(said["boot_ns"]), *pace)
                clock.go_on_with(mark, last_at_ms=last_at_ms)

    def keep(self, clock: Clock, *, now: bool = False) -> None:
        """Store the line of a clock at intervals, or once the clock deviates from the last one."""
        if (mark := clock.mark()) is None:
            return
        if not (now or self._is_due(mark)):
            return
        with suppress(OSError):
            said = {"boot_id": _boot_id(), **asdict(mark)}
            part = self._path.with_name(f".{FILE_NAME}.{os.getpid()}")
            part.write_bytes(durable_files.dump_json(said))
            part.replace(self._path)
            self._written = mark

    def _is_due(self, mark: Line) -> bool:
        """Return True if a start from the file would deviate from the clock, or the file is old."""
        if (last := self._written) is None or mark.boot_ns - last.boot_ns >= _EVERY_NS:
            return True
        return abs(last.at(mark.boot_ns) - mark.now_ns) > _PARTED_NS


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
