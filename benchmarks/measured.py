"""What measurements of an open broker share: rows with targets, random bodies, time, a table."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.table import Table

from rmq_pipeline.broker import Broker

BODY_BYTES = 256


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    name: str
    value: float
    #: ``/s`` or what else is counted; a target is the least there may be, but for ``%`` the most.
    unit: str
    #: None: told for comparison.
    target: float | None = None

    @property
    def most(self) -> bool:
        """Whether the target is the most there may be."""
        return self.unit == "%"

    @property
    def met(self) -> bool:
        """Whether the target was."""
        if self.target is None:
            return True
        return self.value <= self.target if self.most else self.value >= self.target


@dataclass(frozen=True)
class Bench:
    """What every measurement uses."""

    folder: Path
    broker: Broker
    #: Everything is measured with this many times as much.
    scale: float

    def count(self, n: int) -> int:
        """How many of something, at this scale."""
        return max(1, int(n * self.scale))

    def settled(self) -> None:
        """Dispatch has nothing left to do that would be counted with the next measurement."""
        self.broker.engine.dispatched()


@contextmanager
def seconds() -> Iterator[list[float]]:
    """How long the block took, once it is over."""
    taken: list[float] = []
    start = time.perf_counter()
    yield taken
    taken.append(time.perf_counter() - start)


def bodies(n: int) -> pa.Array:
    """``n`` random bodies."""
    offsets = np.arange(0, (n + 1) * BODY_BYTES, BODY_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(n * BODY_BYTES))]
    return pa.Array.from_buffers(pa.binary(), n, buffers)


def line(row: Row) -> str:
    """A row as soon as it is measured."""
    return f"{'✓' if row.met else '✗'} {row.name}: {row.value:,.1f} {row.unit}"


def table(rows: list[Row], load: tuple[float, float, float]) -> Table:
    """All rows, beside their targets."""
    title = f"Upkeep and filters: {BODY_BYTES:,} B bodies, sync flush, {os.cpu_count()} cores"
    result = Table(title=title, caption=f"Load average {', '.join(f'{x:.1f}' for x in load)}.")
    for name in ("measured", "value", "target", ""):
        result.add_column(name, justify="left" if name == "measured" else "right")
    for row in rows:
        relation = "≤" if row.most else "≥"
        verdict = "[green]met[/]" if row.met else "[red]missed[/]"
        result.add_row(
            row.name,
            f"{row.value:,.1f} %" if row.most else f"{row.value:,.0f} {row.unit}",
            "" if row.target is None else f"{relation} {row.target:,.0f}",
            "" if row.target is None else verdict,
        )
    return result
