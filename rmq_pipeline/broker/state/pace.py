"""Rate limits of consumer groups: a token bucket for each limited group."""

from dataclasses import dataclass
from typing import Final

from rmq_pipeline.group import Group

#: Credit is counted in 1/1000 of a message, so a rate per second is the gain per millisecond.
_MESSAGE: Final = 1000


@dataclass(slots=True)
class Pace:
    """Token bucket of one group: its credit at a time, and its rate.

    Capacity is the messages of one second, at least one message. In any time t the group gets at
    most rate × t + capacity messages.
    """

    rate_per_s: float
    at_ms: int
    credit: float

    @classmethod
    def full(cls, rate_per_s: float, at_ms: int) -> "Pace":
        """Return a full bucket."""
        pace = cls(rate_per_s, at_ms, 0.0)
        pace.credit = pace._room()
        return pace

    def _room(self) -> float:
        return max(1.0, self.rate_per_s) * _MESSAGE

    def _credit_at(self, now_ms: int) -> float:
        gained = max(0, now_ms - self.at_ms) * self.rate_per_s
        return min(self._room(), self.credit + gained)

    def allows(self, now_ms: int) -> int:
        """Return how many messages may be delivered now."""
        return int(self._credit_at(now_ms) // _MESSAGE)

    def next_ms(self, now_ms: int) -> int:
        """Return the time from which the next message may be delivered."""
        missing = _MESSAGE - self._credit_at(now_ms)
        return now_ms if missing <= 0 else now_ms + max(1, -int(-missing // self.rate_per_s))

    def spend(self, messages: int, now_ms: int) -> None:
        """Subtract delivered messages; clamp at 0, as a restart forgets earlier credit."""
        self.credit = max(0.0, self._credit_at(now_ms) - messages * _MESSAGE)
        self.at_ms = max(self.at_ms, now_ms)

    def alter(self, rate_per_s: float, now_ms: int) -> None:
        """Change the rate from now on."""
        self.credit = self._credit_at(now_ms)
        self.at_ms = max(self.at_ms, now_ms)
        self.rate_per_s = rate_per_s
        self.credit = min(self.credit, self._room())


class Paces:
    """Token buckets of all rate-limited groups, by group_id.

    The log determines them: group settings set the rate, and deliveries take credit. If the log
    does not reach back far enough, a bucket starts empty, so a restart allows no second burst.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def put(self, group: Group, now_ms: int) -> None:
        """Set the rate of a created or altered group."""
        known = self._paces.get(group.group_id)
        if group.max_rate_per_s is None:
            self._paces.pop(group.group_id, None)
        elif known is None:
            self._paces[group.group_id] = Pace.full(group.max_rate_per_s, now_ms)
        else:
            known.alter(group.max_rate_per_s, now_ms)

    def forget(self, group_id: int) -> None:
        """Drop the bucket of a deleted group."""
        self._paces.pop(group_id, None)

    def empty(self, now_ms: int) -> None:
        """Empty all buckets, because the earlier deliveries are unknown."""
        for pace in self._paces.values():
            pace.credit, pace.at_ms = 0.0, now_ms

    def of(self, group_id: int) -> Pace | None:
        """Return the group's bucket; None without a limit."""
        return self._paces.get(group_id)

    def delivered(self, group_id: int, messages: int, *, now_ms: int) -> None:
        """Take the credit of messages that the group leased."""
        pace = self._paces.get(group_id)
        if pace is not None:
            pace.spend(messages, now_ms)
