"""How many messages a consumer group with a rate may be given, and must."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Pace:
    """What has been saved up, in thousandths of a message: a bound from above, one from below.

    They are the same but for restarts: a broker that does not know what it delivered begins with
    nothing.
    """

    #: Messages per second; 0 for no limit.
    rate: int = 0
    most: int = 0
    least: int = 0
    at: int = 0

    def _room(self) -> int:
        return max(1, self.rate) * 1_000

    def move(self, now: int) -> None:
        gained = (now - self.at) * self.rate
        self.most = min(self._room(), self.most + gained)
        self.least = min(self._room(), self.least + gained)
        self.at = now

    def alter(self, rate: int, now: int) -> None:
        self.move(now)
        unlimited, self.rate = not self.rate, rate
        if unlimited:
            self.most = self.least = self._room()
        self.move(now)

    def restart(self, now: int) -> None:
        self.move(now)
        self.least = 0

    def allows(self, n: int, now: int) -> bool:
        self.move(now)
        return not self.rate or n * 1_000 <= self.most

    def demands(self, now: int) -> bool:
        """Whether something must be given, if there is anything."""
        self.move(now)
        return not self.rate or self.least >= 1_000

    def spend(self, n: int) -> None:
        self.most, self.least = (max(0, left - n * 1_000) for left in (self.most, self.least))
