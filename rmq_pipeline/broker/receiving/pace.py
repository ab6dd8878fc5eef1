"""How fast a consumer group may be given messages: a token bucket for each limited group."""

from dataclasses import dataclass
from typing import Final

from rmq_pipeline.group import Group

#: Credit is counted in thousandths of a message: a rate per second is what comes in each ms.
_MESSAGE: Final = 1000


@dataclass(slots=True)
class Pace:
    """The bucket of one group: what it had at a moment, and what comes in.

    It holds what one second brings, and always room for one message: over any time t no more than
    rate × t + that is taken out.
    """

    rate_per_s: float
    at_ms: int
    credit: float

    @classmethod
    def full(cls, rate_per_s: float, at_ms: int) -> "Pace":
        """A bucket that nothing was taken out of."""
        pace = cls(rate_per_s, at_ms, 0.0)
        pace.credit = pace._room()
        return pace

    def _room(self) -> float:
        return max(1.0, self.rate_per_s) * _MESSAGE

    def _credit_at(self, now_ms: int) -> float:
        gained = max(0, now_ms - self.at_ms) * self.rate_per_s
        return min(self._room(), self.credit + gained)

    def allows(self, now_ms: int) -> int:
        """Messages that may be delivered now."""
        return int(self._credit_at(now_ms) // _MESSAGE)

    def next_ms(self, now_ms: int) -> int:
        """When a message may be delivered next."""
        missing = _MESSAGE - self._credit_at(now_ms)
        return now_ms if missing <= 0 else now_ms + max(1, -int(-missing // self.rate_per_s))

    def spend(self, messages: int, now_ms: int) -> None:
        """So many were delivered; never below nothing, for who has forgotten what it had."""
        self.credit = max(0.0, self._credit_at(now_ms) - messages * _MESSAGE)
        self.at_ms = max(self.at_ms, now_ms)

    def alter(self, rate_per_s: float, now_ms: int) -> None:
        """Another rate from now on."""
        self.credit = self._credit_at(now_ms)
        self.at_ms = max(self.at_ms, now_ms)
        self.rate_per_s = rate_per_s
        self.credit = min(self.credit, self._room())


class Paces:
    """The buckets of all groups that have a limit, by group_id.

    They are as the log says: a group's settings and its deliveries fill and empty them. Where the
    log does not reach back, a bucket begins empty: a restart gives nobody a second burst.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def put(self, group: Group, now_ms: int) -> None:
        """The group was created or altered."""
        known = self._paces.get(group.group_id)
        if group.max_rate_per_s is None:
            self._paces.pop(group.group_id, None)
        elif known is None:
            self._paces[group.group_id] = Pace.full(group.max_rate_per_s, now_ms)
        else:
            known.alter(group.max_rate_per_s, now_ms)

    def forget(self, group_id: int) -> None:
        """The group was deleted."""
        self._paces.pop(group_id, None)

    def empty(self, now_ms: int) -> None:
        """Nobody has anything left: what was delivered before is not known."""
        for pace in self._paces.values():
            pace.credit, pace.at_ms = 0.0, now_ms

    def of(self, group_id: int) -> Pace | None:
        """The group's bucket; None without a limit."""
        return self._paces.get(group_id)

    def delivered(self, group_id: int, messages: int, *, now_ms: int) -> None:
        """Messages were leased by the group."""
        pace = self._paces.get(group_id)
        if pace is not None:
            pace.spend(messages, now_ms)
