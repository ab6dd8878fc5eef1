"""Virtual time: durations as tests write them, and the background work that falls due on the way.

The broker's clock stands still until a test advances it.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import RequestError

#: "250ms", "10s", "5m", "1h" or "2d"; a timedelta; or milliseconds.
Duration: TypeAlias = str | int | timedelta

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TEXT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
#: An advance stops at the times at which work is due, but at most this often, evenly spaced. A
#: thousand messages that are due at different times would otherwise take seconds.
_MOST_STOPS: Final = 1_000


class VirtualTime:
    """The time of a broker under test, to read; ``TestBroker.advance`` moves it."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def now_ms(self) -> int:
        """Return the present time in milliseconds since 1970 UTC."""
        return self._clock.now_ms()

    def now(self) -> datetime:
        """Return the present time."""
        return datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)


def milliseconds(duration: Duration) -> int:
    """Return a duration in milliseconds.

    Raises:
        RequestError: it is no duration, or negative.
    """
    if isinstance(duration, timedelta):
        ms = duration / timedelta(milliseconds=1)
    elif isinstance(duration, str) and (found := _TEXT.fullmatch(duration.strip())):
        ms = float(found[1]) * _UNITS_MS[found[2]]
    elif isinstance(duration, int) and not isinstance(duration, bool):
        ms = duration
    else:
        raise RequestError(
            f"{duration!r} is not a duration.",
            remedy='Give "250ms", "10s", "5m", "1h" or "2d", a timedelta, or milliseconds as an'
            " int.",
        )
    if ms < 0:
        raise RequestError(
            f"{duration!r} is negative, and the broker's time never goes back.",
            remedy="Give a duration of 0 or more.",
        )
    return round(ms)


def advance(broker: Broker, clock: ManualClock, *, by_ms: int) -> None:
    """Advance the clock, and do the background work of each moment on the way.

    This is the work of the upkeep windows: scheduled messages are delivered, ended leases are
    revived, and checks of half messages are offered.
    """
    end_ms = clock.now_ms() + by_ms
    stride_ms = by_ms // _MOST_STOPS
    while True:
        now_ms = clock.now_ms()
        due_ms = [at_ms for at_ms in _do_due_work(broker) if at_ms is not None and at_ms > now_ms]
        if now_ms >= end_ms:
            return
        clock.advance(min(end_ms, max([min(due_ms, default=end_ms), now_ms + stride_ms])) - now_ms)


def _do_due_work(broker: Broker) -> list[Any]:
    """Do the background work that is due now; return when the next of each kind is due, or None."""
    return [
        broker.revive()["next_visible_ms"],
        broker.deliver_scheduled()["next_due_ms"],
        broker.check_transactions()["next_due_ms"],
    ]
