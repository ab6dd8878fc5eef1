"""A message as one consumer group has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Entry:
    """``place`` is the order in which they were stored; the rest is what became of it."""

    number: int
    key: str
    priority: int
    place: int
    free_at: int
    attempts: int = 0
    leased_until: int = 0
    receipt: str = ""
    #: Of the window that it was delivered in; 0 for none.
    epoch: int = 0
    #: Whether it was ever given to anybody.
    given: bool = False
    #: open, parked, acked, dead, passed (by a filter, a reset, a reader's offset), gone (expired).
    state: str = "open"

    @property
    def under_way(self) -> bool:
        """Leased, waiting for a retry, or parked: nothing lets go of it, or passes it over."""
        tried = bool(self.receipt or self.attempts)
        return self.state == "parked" or (self.state == "open" and tried)
