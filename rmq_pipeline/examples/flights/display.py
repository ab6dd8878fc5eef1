"""What the demo shows while it runs, and at its end."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from rmq_pipeline.examples.flights.facts import Fact
from rmq_pipeline.examples.flights.progress import Progress

#: Where there is no terminal, a line this often says that something happens.
LINE_EVERY_S: Final = 10.0


class Display:
    """Bars on a terminal, and lines elsewhere; all on stderr when stdout is for JSON."""

    def __init__(self, *, as_json: bool, total: int) -> None:
        """``total``: departures that will be published."""
        self._as_json = as_json
        self._console = Console(stderr=as_json, highlight=False, soft_wrap=True)
        self._total = total
        self._live: Live | None = None
        self._line_at_s = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Show what ``show`` is given until the block ends."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=8, transient=True) as self._live:
            yield
        self._live = None

    def show(self, progress: Progress) -> None:
        """The numbers of this moment."""
        if self._live is not None:
            self._live.update(_drawn(progress, self._total))
        elif time.monotonic() - self._line_at_s >= LINE_EVERY_S:
            self._line_at_s = time.monotonic()
            counts = [f"{name} {count:,}" for name, count, _ in _bars(progress, self._total)]
            self.say(", ".join(counts))

    def facts(self, facts: Sequence[Fact], *, wrong: Sequence[str], more: dict[str, Any]) -> None:
        """The outcome: a table, or one JSON object on stdout."""
        if self._as_json:
            found = {fact.name: fact.found for fact in facts}
            sys.stdout.write(json.dumps({**found, **more, "wrong": list(wrong)}, indent=2) + "\n")
            sys.stdout.flush()
            return
        table = Table(box=None, pad_edge=False)
        table.add_column("fact", style="bold")
        table.add_column("found", justify="right")
        table.add_column("expected", justify="right")
        for fact in facts:
            expected = _text(fact.expected) + (" or more" if fact.or_more else "")
            mark = "" if fact.is_right else "  wrong"
            table.add_row(fact.name, _text(fact.found), expected + mark)
        self._console.print(table)
        for name, value in more.items():
            self.say(f"{name}: {_text(value)}")
        for line in wrong:
            self.say(f"WRONG {line}")
        if not wrong:
            self.say("All of it is right: every row is the one computed from the data by itself.")


def _bars(progress: Progress, total: int) -> list[tuple[str, int, int | None]]:
    return [
        ("published", progress.published, total),
        ("processed", progress.processed, total - progress.dead_lettered),
        ("retried", progress.retried, None),
        ("dead-lettered", progress.dead_lettered, None),
        ("late", progress.late + progress.scheduled, None),
        ("scheduled", progress.scheduled, None),
        ("to summarize", progress.unsummarized, None),
        ("checked", progress.checked, total),
        ("held", progress.held, None),
        ("crew changes", progress.crew_changes, None),
    ]


def _drawn(progress: Progress, total: int) -> Group:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, count, whole in _bars(progress, total):
        bar = ProgressBar(total=whole, completed=count, width=40) if whole else ""
        table.add_row(name, f"{count:,}", bar)
    return Group(table)


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case int():
            return f"{value:,}"
        case dict():
            parts = (f"({_text(of)})" if isinstance(of, dict) else of for of in value.values())
            return ", ".join(f"{name} {of}" for name, of in zip(value, parts, strict=True))
        case list():
            return ", ".join(_text(each) for each in value)
    return str(value)
