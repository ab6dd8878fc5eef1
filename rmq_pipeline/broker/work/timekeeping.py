"""The broker's time: it follows the monotonic clock, and approaches the wall clock."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from typing_extensions import override

from rmq_pipeline.clock import Line, SystemClock

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

    @property
    def ahead_ns(self) -> int:
        """Lead of time over the wall clock at the last look, in ns; negative: behind."""
        return -self.line.gap_ns

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
        return self._keeper.ahead_ns // _MS

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
