"""Counts and rates of pulls and calls, by topic (semantics §6.11)."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

#: Rates cover the last minute, with one sample per second.
WINDOW_MS: Final = 60_000
_GAP_MS: Final = 1_000


@dataclass(slots=True)
class Totals:
    """Counts of a topic since the start of the consumer."""

    consumed: int = 0
    failed: int = 0
    calls: int = 0
    call_ms: float = 0.0
    pulled: int = 0
    pulls: int = 0
    pull_ms: float = 0.0


class Statistics:
    """Counts by topic, and rates over the last minute; thread-safe."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._totals: dict[str, Totals] = {}
        #: Samples of each topic's counts in the last minute: (time in ms, counts).
        self._earlier: dict[str, deque[tuple[int, Totals]]] = {}

    def consumed(self, topic: str, *, done: int, failed: int, took_ms: float) -> None:
        """Record a call of the listener with ``done + failed`` messages."""
        with self._lock:
            totals = self._of(topic)
            totals.consumed += done
            totals.failed += failed
            totals.calls += 1
            totals.call_ms += took_ms

    def pulled(self, topic: str, *, messages: int, took_ms: float) -> None:
        """Record a pull that returned at least one message."""
        with self._lock:
            totals = self._of(topic)
            totals.pulled += messages
            totals.pulls += 1
            totals.pull_ms += took_ms

    def totals(self, topic: str) -> Totals:
        """Return the counts of a topic since the start of the consumer."""
        with self._lock:
            return replace(self._of(topic))

    def report(self, topic: str) -> dict[str, Any]:
        """Return rates per second and mean times in ms, over the last minute."""
        now_ms = self._now_ms()
        with self._lock:
            now = replace(self._of(topic))
            earlier = self._earlier[topic]
            if now_ms < earlier[-1][0]:  # the clock was set back: restart the samples
                earlier.clear()
                earlier.append((now_ms, now))
            while len(earlier) > 1 and earlier[1][0] <= now_ms - WINDOW_MS:
                earlier.popleft()
            since_ms, then = earlier[0]
            # Divide by at least one second, so that the first report has finite rates.
            seconds = max(now_ms - since_ms, _GAP_MS) / 1000
            if now_ms - earlier[-1][0] >= _GAP_MS:
                earlier.append((now_ms, now))
        return {
            "consume_rt_ms": _mean(now.call_ms - then.call_ms, now.calls - then.calls),
            "consume_ok_per_s": round((now.consumed - then.consumed) / seconds, 2),
            "consume_failed_per_s": round((now.failed - then.failed) / seconds, 2),
            "pull_rt_ms": _mean(now.pull_ms - then.pull_ms, now.pulls - then.pulls),
            "pulled_per_s": round((now.pulled - then.pulled) / seconds, 2),
        }

    def _of(self, topic: str) -> Totals:
        totals = self._totals.get(topic)
        if totals is None:
            totals = self._totals[topic] = Totals()
            self._earlier[topic] = deque([(self._now_ms(), Totals())])
        return totals


def _mean(total: float, count: int) -> float:
    return round(total / count, 3) if count else 0.0
