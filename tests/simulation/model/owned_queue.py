"""What is promised of a queue that clients lock, and of one whose readers keep their offsets."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Given:
    """A message that was delivered and is not settled."""

    attempt: int
    #: The end of its lease; 0 when it was given back.
    until: int = 0
    receipt: str = ""

    def is_with_somebody(self, now: int) -> bool:
        return self.until > now

    def release(self) -> None:
        self.attempt, self.until = self.attempt - 1, 0


@dataclass(slots=True)
class OwnedQueue:
    """One queue of the topic, as the two consumer groups have it."""

    end: int = 0
    #: Everything before was delivered; of that the unsettled ones are ``given``.
    cursor: int = 0
    given: dict[int, Given] = field(default_factory=dict)
    #: Who locked it last, since when and until when; None: it was unlocked since.
    lock: tuple[str, int, int] | None = None
    #: Of the group that reads by offset; -1: it has not begun.
    committed: int = -1
    resets: int = 0

    def holder(self, now: int) -> str | None:
        return self.lock[0] if self.lock is not None and self.lock[2] > now else None

    def take_over(self, client: str, *, now: int, until: int) -> bool:
        """Whether it is the client's now; what others had of it is given back."""
        if self.holder(now) not in (None, client):
            return False
        if self.holder(now) is None:
            self.lock = (client, now, until)
            self.end_leases(now)
        else:
            assert self.lock is not None
            self.lock = (client, self.lock[1], until)
        return True

    def unlock(self, client: str, now: int) -> bool:
        if self.lock is None or self.lock[0] != client:
            return False
        self.lock = None
        self.end_leases(now)
        return True

    def end_leases(self, now: int) -> None:
        for given in self.given.values():
            if given.is_with_somebody(now):
                given.release()

    def deliverable(self, now: int) -> dict[int, int]:
        """By offset which attempt it would be."""
        again = {
            offset: given.attempt + 1
            for offset, given in self.given.items()
            if not given.is_with_somebody(now)
        }
        return again | dict.fromkeys(range(self.cursor, self.end), 1)

    def settled_before(self) -> int:
        return min(self.given, default=self.cursor)

    def commit(self, before: int, after: int) -> None:
        if before in (-1, self.committed):
            self.committed = after
