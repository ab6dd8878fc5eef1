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
    #: The attempt of the receive that gave it, where it had one.
    attempt: str = ""
    #: Where it lies; queue -1: not known yet.
    queue: int = -1
    offset: int = -1
    #: Whether it was ever given to anybody.
    given: bool = False
    #: open, parked, acked, ahead (acked behind a gap), dead, passed (by a filter, a reset, a
    #: reader's offset), gone (expired).
    state: str = "open"

    @property
    def under_way(self) -> bool:
        """Leased, waiting for a retry, or parked: nothing lets go of it, or passes it over."""
        tried = bool(self.receipt or self.attempts)
        return self.state in ("parked", "ahead") or (self.state == "open" and tried)
