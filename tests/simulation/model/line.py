"""A consumer group in order by queue: one batch of a queue at a time, again from its first gap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tests.simulation.model.consumer import BACKOFF_MS, MAX_ATTEMPTS, Consumer
from tests.simulation.model.entry import Entry


@dataclass(eq=False)
class Line(Consumer):
    """The same for the queues of a topic; an entry that is acked behind a gap is ``ahead``."""

    def lines_of_queues(self) -> dict[str, list[Entry]]:
        """What is not done with, queue by queue, as far as it is known where it lies."""
        found: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries.values():
            if entry.state in ("open", "parked", "ahead") and entry.queue >= 0:
                found[self.key_of(entry)].append(entry)
        return {key: sorted(line, key=lambda e: e.offset) for key, line in found.items()}

    def key_of(self, entry: Entry) -> str:
        return f"queue {entry.queue}"

    def is_free(self, line: list[Entry], now: int) -> bool:
        return not any(
            e.state == "parked" or e.receipt or (e.state == "open" and e.free_at > now)
            for e in line
        )

    def deliverable(self, now: int, asked: Collection[str] | None = None) -> dict[str, list[Entry]]:
        assert asked is None
        lines = self.lines_of_queues()
        return {key: line for key, line in lines.items() if self.is_free(line, now)}

    def repeated(self, attempt: str, now: int) -> dict[str, list[Entry]]:
        """The batches that this attempt has leased and that are not settled."""
        found = {}
        for key, line in self.lines_of_queues().items():
            unsettled = [e for e in line if e.state != "ahead"]
            mine = [e for e in unsettled if e.receipt and e.attempt == attempt]
            first, rest = unsettled[: len(mine)], unsettled[len(mine) :]
            if attempt and mine and first == mine and self.is_free(rest, now):
                found[key] = mine
        return found

    def expire(self, now: int) -> None:
        for entry in self.leased():
            if entry.leased_until <= now:
                entry.receipt, entry.free_at = "", entry.leased_until

    def look(self, now: int) -> None:
        """The first message of a free queue is exhausted when it has no attempt left."""
        self.expire(now)
        for line in self.lines_of_queues().values():
            first = line[0]
            if self.is_free(line, now) and first.attempts >= MAX_ATTEMPTS:
                self.lose_for_good([first])
        self.close()

    def lose_for_good(self, failed: list[Entry]) -> None:
        """It is dead or parked; what lies behind it begins again, what is with somebody stays."""
        for entry in failed:
            if self.on_failure == "park":
                entry.receipt, entry.state = "", "parked"
            else:
                self.die(entry, [])
            for other in self.lines_of_queues().get(self.key_of(entry), ()):
                if other.state == "open" and other.offset > entry.offset:
                    other.attempts = 1 if other.receipt else 0

    def settle(self, outcomes: Iterable[tuple[Entry, str, int | None]], now: int) -> None:
        spent: dict[str, Entry] = {}
        for entry, outcome, after in sorted(outcomes, key=lambda o: o[0].offset):
            if outcome == "ack":
                entry.receipt, entry.state = "", "ahead"
                entry.attempts = min(entry.attempts, MAX_ATTEMPTS - 1)  # it did not fail
            elif outcome == "dead_letter":
                self.die(entry, [])
            elif entry.attempts >= MAX_ATTEMPTS and self.key_of(entry) not in spent:
                spent[self.key_of(entry)] = entry
                entry.receipt = ""
            else:
                delay = BACKOFF_MS[min(entry.attempts, len(BACKOFF_MS)) - 1]
                entry.receipt, entry.free_at = "", now + (delay if after is None else after)
        self.lose_for_good(list(spent.values()))
        self.close()

    def close(self) -> None:
        """What was acked is done with when nothing before it is unsettled."""
        for line in self.lines_of_queues().values():
            for entry in line:
                if entry.state != "ahead":
                    break
                entry.state = "acked"

    def given_now(self, entries: list[Entry]) -> None:
        """A batch begins: what was acked behind its end comes after it."""
        last = entries[-1]
        for entry in self.lines_of_queues()[self.key_of(last)]:
            if entry.state == "ahead":
                entry.state = "open"

    def unpark(self, now: int, *, key: str | None, skip: bool) -> dict[str, int]:
        counts = super().unpark(now, key=key, skip=skip)
        self.close()
        return counts
