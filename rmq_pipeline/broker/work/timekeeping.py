"""The broker's time, its timers, and the file that keeps it over a restart.

Time follows the monotonic clock, and approaches the wall clock. The monotonic clock runs until the
machine restarts. So a restarted broker need not trust a wall clock that was set meanwhile or is
wrong for a moment.
"""

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Final

from typing_extensions import override

from rmq_pipeline import durable_files
from rmq_pipeline.clock import Clock, Line, SystemClock

log = logging.getLogger(__name__)

#: Includes time in which the machine is suspended; not all systems have it.
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_MS: Final = 1_000_000
_SECOND: Final = 1_000 * _MS
#: Interval of looks at the wall clock.
LOOK_NS: Final = 250 * _MS
#: A difference up to this is normal with NTP, and not logged.
SMALL_NS: Final = _SECOND
#: A wall clock that jumped forward is followed after it has stayed there for this time.
STANDS_NS: Final = 300 * _SECOND
#: Most by which time may run faster, in ppm. The kernel itself corrects by up to 500.
FASTER_PPM: Final = 1_000
#: Most by which a stored time may be ahead of both the wall clock and the log's last time: more
#: than time zones differ.
AHEAD_MOST_NS: Final = 24 * 3_600 * _SECOND
#: Most by which time may run slower, in ppm: an interval lasts 1/9 longer at most.
SLOWER_PPM: Final = 100_000

_AHEAD: Final = (
    "The machine's clock jumped: it is %d ms ahead of the broker's time, which follows if it"
    " stays ahead for 5 minutes. Set the machine's clock if it is wrong."
)
_BEHIND: Final = (
    "The machine's clock is %d ms behind the broker's time, which goes a tenth slower until they"
    " meet. Set the machine's clock if it is wrong."
)
_FOREIGN: Final = (
    "clock.json has a time %d ms ahead of both the machine's clock and the last moment in the log;"
    " a time over a day ahead is ignored. The broker starts from the later of these two."
)
_FOLLOWED: Final = "The broker's time went %d ms forward, to where the machine's clock has stayed."
FILE_NAME: Final = "clock.json"
#: Interval of writes, and the deviation from the last line that causes an earlier write.
_EVERY_NS: Final = 60_000_000_000
_PARTED_NS: Final = 10_000_000
#: Changes with each start of the machine.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
#: Pause after an unexpected error, so that a persistent one does not spin.
_PAUSE_S: Final = 0.1


class Timekeeper:
    """Time computed from given values of a wall clock and a monotonic clock.

    Time follows the monotonic clock. It never goes back.

    | wall clock | time |
    | --- | --- |
    | is up to 1 s ahead | runs 1/1000 faster until it has caught up |
    | is further ahead | follows after the wall clock has stayed there for 5 minutes |
    | is behind | runs 1/10 slower until the wall clock has caught up |
    """

    def __init__(self, wall_ns: int, boot_ns: int) -> None:
        self.line = Line(wall_ns, boot_ns, 0, 0)
        #: Jump of the wall clock: since when, and how far; None: no jump.
        self._jump: tuple[int, int] | None = None
        self._told = False

    def go_on_from(self, now_ns: int, boot_ns: int) -> None:
        """Continue from a time, if it is ahead of this time."""
        line = self.line
        before = line.at(boot_ns)
        if now_ns > before:
            gap = line.gap_ns - (now_ns - before)
            self.line = Line(now_ns, boot_ns, self._faster(gap), gap)
            self._tell(gap)

    def go_on_with(self, now_ns: int, *, wall_ns: int, boot_ns: int) -> None:
        """Set the time regardless of the wall clock, then compare the two."""
        self.line = Line(now_ns, boot_ns, 0, 0)
        self.look(wall_ns, boot_ns)

    def look(self, wall_ns: int, boot_ns: int) -> None:
        """Compare time with the wall clock, and set the rate until the next look."""
        now = self.line.at(max(boot_ns, self.line.boot_ns))
        gap = wall_ns - now
        if self._stands(gap, boot_ns):
            log.warning(_FOLLOWED, gap // _MS)
            now, gap, self._told = wall_ns, 0, False
        self.line = Line(now, boot_ns, self._faster(gap), gap)
        self._tell(gap)

    def _stands(self, gap: int, boot_ns: int) -> bool:
        """Return True if the wall clock is far ahead and has stayed there long enough."""
        if gap <= SMALL_NS:
            self._jump = None
            return False
        if self._jump is None or abs(self._jump[1] - gap) > SMALL_NS:
            self._jump = (boot_ns, gap)
        stands = boot_ns - self._jump[0] >= STANDS_NS
        if stands:
            self._jump = None
        return stands

    def _faster(self, gap: int) -> int:
        if gap > SMALL_NS:
            return 0
        # This rate closes the gap by the next look, within the limits.
        return max(-SLOWER_PPM, min(FASTER_PPM, gap * 1_000_000 // LOOK_NS))

    def _tell(self, gap: int) -> None:
        """Log once that time and the wall clock differ, and once that they agree again."""
        if abs(gap) <= SMALL_NS:
            if self._told:
                log.warning("The machine's clock and the broker's time agree again.")
            self._told = False
        elif not self._told:
            self._told = True
            log.warning(_AHEAD if gap > 0 else _BEHIND, abs(gap) // _MS)


def _boot_ns() -> int:
    return time.clock_gettime_ns(_BOOT_CLOCK)


class BrokerClock(SystemClock):
    """Wall clock whose jumps do not change the length of intervals.

    Args:
        wall_ns: the wall clock.
        boot_ns: a monotonic clock.
    """

    def __init__(
        self,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        boot_ns: Callable[[], int] = _boot_ns,
    ) -> None:
        self._wall_ns, self._boot_ns = wall_ns, boot_ns
        self._lock = threading.Lock()
        self._keeper = Timekeeper(wall_ns(), boot_ns())

    @override
    def ahead_ms(self) -> int:
        """Return how far this time is ahead of the wall clock in ms; negative: behind."""
        self._now_ns()
        return -self._keeper.line.gap_ns // _MS

    @override
    def go_on_from(self, at_ms: int) -> None:
        """Continue from this time if it is later: it was stored as the current one."""
        with self._lock:
            self._keeper.go_on_from(at_ms * _MS, self._boot_ns())

    @override
    def mark(self) -> Line | None:
        """Return the line by which this time follows the monotonic clock."""
        self._now_ns()  # looks at the wall clock
        return self._keeper.line

    @override
    def go_on_with(self, mark: Line, *, last_at_ms: int) -> None:
        """Continue from a stored line, unless it is from another machine or too far ahead."""
        with self._lock:
            boot, wall = self._boot_ns(), self._wall_ns()
            if mark.boot_ns > boot or not -SLOWER_PPM <= mark.faster_ppm <= FASTER_PPM:
                return
            now = mark.at(boot)
            ahead = now - max(wall, last_at_ms * _MS)
            if ahead > AHEAD_MOST_NS:
                log.warning(_FOREIGN, ahead // _MS)
                return
            self._keeper.go_on_with(now, wall_ns=wall, boot_ns=boot)

    @override
    def _now_ns(self) -> int:
        boot, line = self._boot_ns(), self._keeper.line
        if boot - line.boot_ns >= LOOK_NS:
            with self._lock:
                # Another thread may have looked meanwhile.
                boot = self._boot_ns()
                if boot - self._keeper.line.boot_ns >= LOOK_NS:
                    self._keeper.look(self._wall_ns(), boot)
                line = self._keeper.line
        return line.at(boot)


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


class Timer:
    """A call that is made at its time unless it is cancelled."""

    __slots__ = ("_call", "at_ms")

    def __init__(self, at_ms: int, call: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call. If the thread has already taken it, it may still run."""
        self._call = None

    def fire(self) -> None:
        """Make the call once; log an error, so that the other timers still run."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            call()
        except Exception:
            log.exception("A timer's call failed.")


class Timers:
    """Timer thread that calls functions at their time by the broker's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Timer]] = []
        self._serial = count()
        self._closed = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-timers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Make no further calls, and join the thread."""
        with self._condition:
            self._closed = True
            self._pause.set()
            self._condition.notify_all()
        self._thread.join()

    def at(self, at_ms: int, call: Callable[[], None]) -> Timer:
        """Call a function once ``at_ms`` has come; it must hand over its work and return."""
        timer = Timer(at_ms, call)
        with self._condition:
            heapq.heappush(self._waiting, (at_ms, next(self._serial), timer))
            if self._waiting[0][2] is timer:
                self._condition.notify_all()
        return timer

    def _run(self) -> None:
        while not self._closed:
            try:
                due = self._next()
            except Exception:  # without this thread no poll ends and no lease is renewed
                log.exception("The timer thread failed; it continues.")
                self._pause.wait(_PAUSE_S)
                continue
            for timer in due:
                timer.fire()

    def _next(self) -> list[Timer]:
        """Wait for the next due timers and return them; an empty list after ``close``."""
        with self._condition:
            while not self._closed:
                now_ms, due = self._clock.now_ms(), []
                while self._waiting and self._waiting[0][0] <= now_ms:
                    due.append(heapq.heappop(self._waiting)[2])
                if due:
                    return due
                first = self._waiting[0][0] if self._waiting else None
                self._clock.wait_until(self._condition, first)
        return []
