"""What measurements share: rows with targets, random bodies, time, a command line, a table."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import DispatchBehindError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.limits import MIB
from rmq_pipeline.serving.interpreter import SWITCH_INTERVAL_S, calm_garbage_collection
from rmq_pipeline.store.log.log_file import PAGE_BYTES, LogFile

BODY_BYTES = 256
#: Different pieces that a limit writes in turn, as rows do: the same one again lies in the cache.
PARTS = 16


#: Units of which there is to be little.
_COSTS = ("%", "ms", "s", "×", "B", "MB")


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    name: str
    value: float
    unit: str
    #: The least there may be, but the most of what is a cost; below 1, of rates: a share of the
    #: limit. None: told for comparison.
    target: float | None = None
    #: What the machine can do.
    limit: float | None = None

    @property
    def most(self) -> bool:
        """Whether the target is the most there may be."""
        return self.unit in _COSTS

    @property
    def ratio(self) -> float | None:
        """The share of the limit."""
        return self.value / self.limit if self.limit else None

    @property
    def met(self) -> bool:
        """Whether the target was."""
        if self.target is None:
            return True
        if self.most:
            return self.value <= self.target
        return (self.ratio or 0.0 if self._is_share else self.value) >= self.target

    @property
    def wanted(self) -> str:
        """The target as it is shown."""
        if self.target is None:
            return ""
        if self._is_share:
            return f"≥ {self.target:g} × limit"
        return f"{'≤' if self.most else '≥'} {self.target:,g}"

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return f"{self.value:,.{2 if self.most else 0}f} {self.unit}"

    @property
    def _is_share(self) -> bool:
        return self.limit is not None and self.target is not None and self.target < 1


@dataclass(frozen=True)
class Bench:
    """What a measurement of an open broker uses."""

    folder: Path
    broker: Broker
    #: Everything is measured with this many times as much.
    scale: float

    def count(self, n: int) -> int:
        """How many of something, at this scale."""
        return max(1, int(n * self.scale))

    def limit(self, times: int, written: int) -> float:
        """Return writes per second of ``written`` bytes in ``times`` parts."""
        return synced_per_s(self.folder, times=times, size=max(1, written // times))

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


def synced_per_s(folder: Path, *, times: int, size: int) -> float:
    """Return how many parts of ``size`` bytes a commit log's file takes per second, each synced.

    The file is the log's own, so small parts find blocks that were written before.
    """
    room = PAGE_BYTES + (times + 1) * size + MIB
    file = LogFile.create(folder, base=0, size=room, seed=1, schemas={})
    parts = [os.urandom(size) for _ in range(PARTS)]
    try:
        with seconds() as taken:
            for i in range(times):
                file.write([parts[i % PARTS]], position=i * size, length=size, dsync=True)
    finally:
        file.path.unlink()
    return times / taken[0]


def bodies(n: int, size: int = BODY_BYTES) -> pa.Array:
    """``n`` random bodies, which do not compress."""
    offsets = np.arange(0, (n + 1) * size, size, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(n * size))]
    return pa.Array.from_buffers(pa.binary(), n, buffers)


def send_patiently(broker: Broker | Client, topic: str, *, messages: pa.Table) -> None:
    """Send, and wait for dispatch when it is behind."""
    while True:
        try:
            broker.send(topic, messages)
        except DispatchBehindError:
            time.sleep(0.05)
        else:
            return


#: Measures in a folder, at a scale.
Measurement = Callable[[Path, float], list[Row]]


def with_broker(measure: Callable[[Bench], list[Row]]) -> Measurement:
    """A measurement of a broker of its own, without background work."""

    def measured(folder: Path, scale: float) -> list[Row]:
        home = Path(tempfile.mkdtemp(prefix="home-", dir=folder))
        try:
            # The caller is a thread, as at an endpoint: the main thread has signals to handle.
            with (
                Broker.open(home, upkeep="none") as broker,
                ThreadPoolExecutor(1) as caller,
            ):
                return caller.submit(measure, Bench(folder, broker, scale)).result()
        finally:
            shutil.rmtree(home, ignore_errors=True)

    return measured


def run(measurements: Mapping[str, Measurement], *, title: str, description: str | None) -> int:
    """Measure what the command line asks for, print, and say by the exit code if targets were met.

    Args:
        measurements: by the names they are asked for.
        title: of the table.
        description: of the command.
    """
    arguments = _arguments(measurements, description)
    # As in the broker's process: what a busy thread and the collector cost everyone else.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    calm_garbage_collection()
    folder = Path(tempfile.mkdtemp(prefix=".rmq-bench-", dir=arguments.home or Path.cwd()))
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True))
    rows: list[Row] = []
    try:
        with bar:
            task = bar.add_task("")
            for name in arguments.only or measurements:
                bar.update(task, description=name)
                for row in measurements[name](folder, arguments.scale):
                    rows.append(row)
                    if not arguments.json:
                        bar.console.print(f"{'✓' if row.met else '✗'} {row.name}: {row.shown}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load = os.getloadavg()
    if arguments.json:
        facts = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in rows]
        print(json.dumps({"rows": facts, "cores": os.cpu_count(), "load": load}, indent=2))
    else:
        Console().print(table(rows, title=title, load=load))
    return 0 if all(row.met for row in rows) else 1


def existing_folder(path: str) -> Path:
    """Return the folder that an argument names.

    Raises:
        ArgumentTypeError: it is not there.
    """
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no folder; make it first")
    return Path(path)


def _arguments(
    measurements: Mapping[str, Measurement], description: str | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--only", nargs="*", choices=measurements, help="some measurements")
    parser.add_argument("--scale", type=float, default=1.0, help="measure with so many times more")
    parser.add_argument("--home", type=existing_folder, help="folder to write in: its disk counts")
    return parser.parse_args()


def table(rows: list[Row], *, title: str, load: tuple[float, float, float]) -> Table:
    """All rows, beside their targets and, where there are any, limits."""
    found = Table(
        title=f"{title}, {os.cpu_count()} cores",
        caption=f"Load average {', '.join(f'{x:.1f}' for x in load)}.",
    )
    limited = any(row.limit for row in rows)
    for name in ("measured", "value", "target", *(("limit", "ratio") if limited else ()), ""):
        found.add_column(name, justify="left" if name == "measured" else "right")
    for row in rows:
        limits = [f"{row.limit:,.0f} {row.unit}", f"{row.ratio:.2f}"] if row.limit else ["", ""]
        verdict = "[green]met[/]" if row.met else "[red]missed[/]"
        found.add_row(
            row.name,
            row.shown,
            row.wanted,
            *(limits if limited else []),
            "" if row.target is None else verdict,
        )
    return found
