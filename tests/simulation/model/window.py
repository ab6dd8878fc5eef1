"""A consumer's window, and what its settles have left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EFFECT_MS = 2_500


@dataclass(eq=False)
class Window:
    """One owner at a time, each with a higher epoch; closed or never opened, nobody's."""

    epoch: int = 0
    owner: str = ""
    ends_at: int = 0
    #: The last settle: its epoch and what was asked for, and the part of its answer that counts.
    settled: tuple[int, dict[str, Any], dict[str, int]] | None = None
    #: Those that count in the sink, those that did, and its version.
    files: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    version: int = 0
    #: The last replacement: what was asked for, and the answer.
    replacement: tuple[dict[str, Any], dict[str, Any]] | None = None
    totals: dict[str, int] = field(default_factory=dict)
    #: When the effect of each idempotency key was last remembered.
    effects: dict[str | None, int] = field(default_factory=dict)

    def open(self, owner: str, *, now: int, duration: int, takeover: bool) -> dict[str, Any]:
        """Its epoch and end, and whoever it yields to."""
        if self.ends_at > now and not takeover:
            mine = {"epoch": self.epoch, "expires_at_ms": self.ends_at}
            return mine if owner == self.owner else {**mine, "yielded_to": self.owner}
        unclosed = self.ends_at > 0
        self.epoch, self.owner, self.ends_at = self.epoch + 1, owner, now + duration
        mine = {"epoch": self.epoch, "expires_at_ms": self.ends_at}
        return {**mine, "follows_unclosed": unclosed}

    def fences(self, epoch: int) -> bool:
        """Whether a newer one was opened, or this one was closed."""
        return epoch != self.epoch or not self.ends_at

    def close(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.ends_at = 0

    def keep(
        self, file: str, totals: dict[str, int | None], *, effects: list[str | None], now: int
    ) -> None:
        """A file that counts, keys of effects, and states of keys; None for one that goes."""
        self.files.append(file)
        self.version += 1
        self.effects.update(dict.fromkeys(effects, now))
        self.totals.update({key: total for key, total in totals.items() if total is not None})
        for key in [key for key, total in totals.items() if total is None]:
            self.totals.pop(key, None)

    def replace(self, asked: dict[str, Any], added: str) -> dict[str, Any]:
        """A file counts instead of others; the answer."""
        removed = asked["remove"]
        self.files = [file for file in self.files if file not in removed] + [added]
        self.replaced = self.replaced + removed
        self.version += 1
        answer = {"version": self.version, "added": [added], "removed": removed}
        self.replacement = (asked, answer)
        return answer

    def seen(self, key: str | None, now: int) -> int | None:
        at = self.effects.get(key)
        return at if at is not None and now - at < EFFECT_MS else None
