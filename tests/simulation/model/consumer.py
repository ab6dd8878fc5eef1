"""What a consumer group may be given, message by message: small enough to be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tests.simulation.model.entry import Entry
from tests.simulation.model.pace import Pace
from tests.simulation.model.window import Window

MAX_ATTEMPTS = 3
BACKOFF_MS = (700, 1_500)


@dataclass(eq=False)
class Consumer:
    """A consumer group of one topic: what it may be given, and what becomes of that."""

    name: str
    topic: str
    ordered: bool
    on_failure: str
    filter: dict[str, str]
    wants: Callable[[int], bool]
    entries: dict[int, Entry] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)  # message groups that are given up
    #: The messages that died; one may die again.
    deaths: list[int] = field(default_factory=list)
    #: Deaths that are in this order: of a message with which its group was given up, and of what
    #: follows it. By message group those that more will follow.
    lines: list[list[int]] = field(default_factory=list)
    line: dict[str, list[int]] = field(default_factory=dict)
    #: Offsets of dead letters that were redriven.
    redriven: set[int] = field(default_factory=set)
    pace: Pace = field(default_factory=Pace)
    window: Window = field(default_factory=Window)
    #: The lite topics of each client; empty where the topic has none.
    clients: dict[str, set[str]] = field(default_factory=dict)
    #: Whether order is by queue, and up to which offset it is known what lies in each.
    by_queue: bool = False
    located: dict[int, int] = field(default_factory=dict)

    def having(self, state: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state == state]

    def leased(self) -> list[Entry]:
        return [entry for entry in self.having("open") if entry.receipt]

    def key_of(self, entry: Entry) -> str:
        """What it is kept in order with."""
        return entry.key if self.ordered and entry.key else f"#{entry.number}"

    def repeated(self, attempt: str, now: int) -> dict[str, list[Entry]]:
        """What a receive of the same attempt has leased; only order by queue knows of them."""
        assert not attempt, now
        return {}

    def look(self, now: int) -> None:
        """What the broker finds out when it looks at all of it."""
        self.expire(now)

    def given_now(self, entries: list[Entry]) -> None:
        """Some of one key were given, in order."""

    def behind(self, entry: Entry) -> Iterator[Entry]:
        """What follows it in its message group."""
        for other in self.entries.values() if self.ordered and entry.key else ():
            if other.key == entry.key and other.place > entry.place:
                yield other

    def store(self, number: int, key: str, *, priority: int, now: int) -> None:
        entry = Entry(number, key, priority, len(self.entries), now)
        self.entries[number] = entry
        if not self.wants(number):
            entry.state = "passed"
        elif key in self.quarantined:
            self.die(entry, self.line[key])

    def deliverable(self, now: int, asked: Collection[str] | None = None) -> dict[str, list[Entry]]:
        """By message group, in order; a message without order is alone. Lite topics if asked."""
        found: dict[str, list[Entry]] = defaultdict(list)
        stopped = {entry.key for entry in self.leased() if self.ordered}
        for entry in self.entries.values():
            key = self.key_of(entry)
            if (
                entry.receipt
                or entry.state == "parked"
                or (entry.state == "open" and entry.free_at > now)
            ):
                stopped.add(key)
            elif entry.state == "open" and key not in stopped and (asked is None or key in asked):
                found[key].append(entry)
        return found

    def expire(self, now: int) -> None:
        """Leases that have ended, the earliest first."""
        ended = [entry for entry in self.leased() if entry.leased_until <= now]
        for entry in sorted(ended, key=lambda e: (e.leased_until, e.place)):
            if entry.receipt:
                self.fail(entry, free_at=entry.leased_until)

    def take_over(self, epoch: int, now: int) -> None:
        """What an older window was given is given back, uncharged."""
        for entry in self.leased():
            if 0 < entry.epoch < epoch:
                entry.receipt, entry.attempts, entry.free_at = "", entry.attempts - 1, now

    def fail(self, entry: Entry, *, free_at: int, rejected: bool = False) -> None:
        """It waits or is given up; what was given with it from behind comes back uncharged."""
        entry.receipt, entry.free_at = "", free_at
        for other in self.behind(entry):
            if other.receipt:
                other.receipt, other.attempts = "", other.attempts - 1
        if rejected or (entry.attempts >= MAX_ATTEMPTS and self.on_failure != "park"):
            line: list[int] = []
            self.die(entry, line)
            if self.on_failure == "dead_letter_group" and self.ordered and entry.key:
                self.lines.append(line)
                if entry.key not in self.quarantined:
                    self.line[entry.key] = line
                self.quarantined.add(entry.key)
                for other in self.behind(entry):
                    if other.state == "open":
                        self.die(other, line)
        elif entry.attempts >= MAX_ATTEMPTS:
            entry.state = "parked"

    def die(self, entry: Entry, line: list[int]) -> None:
        entry.receipt, entry.state = "", "dead"
        line.append(len(self.deaths))
        self.deaths.append(entry.number)

    def settle(self, outcomes: Iterable[tuple[Entry, str, int | None]], now: int) -> None:
        """Outcomes of one call: ack, retry (after a while of its own), dead_letter."""
        failed, stopped = [], set()
        for entry, outcome, after in sorted(outcomes, key=lambda o: o[0].place):
            if outcome == "ack":
                entry.receipt, entry.state = "", "acked"
            elif not (self.ordered and entry.key in stopped):
                failed.append((entry, outcome, after))
                if entry.key and (outcome == "retry" or self.on_failure == "dead_letter_group"):
                    stopped.add(entry.key)
        for entry, outcome, after in reversed(failed):
            delay = BACKOFF_MS[min(entry.attempts, len(BACKOFF_MS)) - 1] if after is None else after
            self.fail(entry, free_at=now + delay, rejected=outcome == "dead_letter")

    def unpark(self, now: int, *, key: str | None, skip: bool) -> dict[str, int]:
        """The failed ones come first, or not at all; then what they have held up."""
        parked = [e for e in self.having("parked") if key is None or e.key == key]
        for entry in parked:
            entry.state, entry.attempts, entry.free_at = "open", 0, now
            for other in self.behind(entry):
                other.free_at = min(other.free_at, now)
        for entry in parked if skip else ():
            self.die(entry, [])
        lifted = self.quarantined if key is None else self.quarantined & {key}
        self.quarantined = self.quarantined - lifted
        counts = {"unparked": 0, "skipped": 0, "lifted": len(lifted), "pardoned": len(lifted)}
        return {**counts, "skipped" if skip else "unparked": len(parked)}

    def redrive(self, number: int, *, offset: int, now: int) -> str:
        if offset in self.redriven:
            return "already"
        self.redriven.add(offset)
        if (entry := self.entries[number]).state == "gone":
            return "gone"
        if entry.state not in ("open", "parked"):
            entry.state, entry.attempts, entry.free_at = "open", 0, now
        return "redriven"

    def reset(self, now: int, *, earliest: bool) -> None:
        """All of it again, or nothing of what is there."""
        self.quarantined = set()
        for entry in self.entries.values():
            again = earliest and entry.state != "gone" and self.wants(entry.number)
            if entry.state in ("open", "parked", "ahead") or again:
                entry.state = "open" if earliest else "passed"
                entry.receipt, entry.attempts, entry.free_at = "", 0, now

    def lose(self, number: int) -> None:
        """It has expired, read or not."""
        entry = self.entries[number]
        assert not entry.under_way, f"{self.name}: {entry} is lost"
        entry.state = "gone"

    def pass_over(self, queue: list[tuple[int, int]], *, asked: int, now_at: int) -> None:
        """A reader is done with what lies before an offset of a queue: (offset, message)."""
        for offset, number in queue:
            entry = self.entries[number]
            assert not entry.under_way, f"{self.name}: {entry} was passed over"
            if entry.state == "open" and offset < asked:
                entry.state = "passed"
            assert entry.state != "open" or offset >= now_at, f"{self.name}: {entry} is lost"
