"""Our broker beside other queues, each on one core, synced before it answers, and checked.

``python -m benchmarks.peers --help`` for the choices. docs/comparison.md explains the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from benchmarks.measured import existing_folder
from benchmarks.peers.driver import Driver, Offer
from benchmarks.peers.drivers.beanstalk import Beanstalk
from benchmarks.peers.drivers.jetstream import JetStream
from benchmarks.peers.drivers.lite_queue import Lite
from benchmarks.peers.drivers.own_flight import OwnFlight
from benchmarks.peers.drivers.own_grpc import EmptyServer, OwnGrpc
from benchmarks.peers.drivers.postgres import Postgres
from benchmarks.peers.drivers.rabbitmq import RabbitMQ
from benchmarks.peers.drivers.raw_disk import RawDisk
from benchmarks.peers.drivers.redis_streams import RedisStreams
from benchmarks.peers.ledger import BODY_BYTES, CheckFailedError
from benchmarks.peers.pinned import CLIENT_CORE, SERVER_CORE, started
from benchmarks.peers.workloads import FULL, LIMIT_OF, QUICK, WORKLOADS, Figure, Size
from rmq_pipeline.serving.interpreter import SWITCH_INTERVAL_S, calm_garbage_collection

PEERS: Final[Mapping[str, type[Driver]]] = {
    "flight": OwnFlight,
    "grpc": OwnGrpc,
    "postgres": Postgres,
    "redis": RedisStreams,
    "jetstream": JetStream,
    "rabbitmq": RabbitMQ,
    "beanstalkd": Beanstalk,
    "litequeue": Lite,
    "empty": EmptyServer,
    "disk": RawDisk,
}


#: Columns that the table needs.
WIDTH: Final = 150


@dataclass(frozen=True)
class Line:
    """What a peer did in a workload: a figure, or the reason why there is none."""

    workload: str
    peer: str
    figure: Figure | None
    reason: str = ""

    @property
    def key(self) -> str:
        """Return what is compared: the workload and its figure."""
        name = self.figure.name if self.figure is not None else ""
        return f"{self.workload}: {name}" if name else self.workload


def measure(driver: Driver, workloads: Sequence[str], *, size: Size) -> list[Line]:
    """Run workloads on a started peer."""
    lines = []
    for name in workloads:
        workload = WORKLOADS[name]
        if lacking := workload.needs - driver.offers:
            # A limit is there for the workloads that it limits.
            if Offer.STORAGE in driver.offers:
                lines.append(Line(name, driver.name, None, f"– {min(o.value for o in lacking)}"))
            continue
        try:
            figures = workload.measure(driver, size)
        except CheckFailedError as error:
            lines.append(Line(name, driver.name, None, f"✗ {error}"))
        except Exception as error:  # noqa: BLE001 - of any client; the other peers go on
            reason = f"✗ {type(error).__name__}: {str(error)[:200]}"
            lines.append(Line(name, driver.name, None, reason))
        else:
            lines += [Line(name, driver.name, figure) for figure in figures]
    return lines


def best(lines: Sequence[Line], key: str) -> float | None:
    """Return the best figure that a peer has; limits are no peers."""
    limits = {kind.name for kind in PEERS.values() if Offer.STORAGE not in kind.offers}
    found = [
        line.figure
        for line in lines
        if line.figure is not None and line.key == key and line.peer not in limits
    ]
    values = [figure.value for figure in found]
    if not values:
        return None
    return min(values) if found[0].unit == "ms" else max(values)


def limit(lines: Sequence[Line], workload: str) -> float | None:
    """Return the raw disk's figure."""
    wanted = LIMIT_OF.get(workload, workload)
    for line in lines:
        if line.figure is not None and (line.workload, line.peer) == (wanted, RawDisk.name):
            return line.figure.value
    return None


def ratios(lines: Sequence[Line], line: Line) -> tuple[float | None, float | None]:
    """Return the shares of the best peer's figure and of the limit."""
    if line.figure is None:
        return None, None
    of_best, of_limit = best(lines, line.key), limit(lines, line.workload)
    value = line.figure.value
    return value / of_best if of_best else None, value / of_limit if of_limit else None


def table(lines: Sequence[Line], *, peers: Sequence[Driver], missing: Mapping[str, str]) -> Table:
    """Return all figures, by workload."""
    facts = [f"{each.name} {each.version}: {each.durability}." for each in peers]
    facts += [f"Left out: {name}, {reason}." for name, reason in missing.items()]
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    facts.append(
        f"Server on core {SERVER_CORE}, client on core {CLIENT_CORE}; load average {load}."
    )
    found = Table(
        title=f"Peers: {BODY_BYTES:,} B bodies, synced before the answer",
        caption="\n".join(facts),
        caption_justify="left",
    )
    found.add_column("workload")
    found.add_column("peer")
    for name in ("measured", "× best peer", "× disk", "server core", "client core"):
        found.add_column(name, justify="right")
    keys = list(dict.fromkeys(name for name in WORKLOADS))
    ordered = sorted(lines, key=lambda line: keys.index(line.workload))
    names = list(dict.fromkeys(line.key for line in ordered))
    for key in names:
        for at, line in enumerate(line for line in ordered if line.key == key):
            found.add_row(key if at == 0 else "", line.peer, *_cells(lines, line))
        found.add_section()
    return found


def _cells(lines: Sequence[Line], line: Line) -> list[str]:
    if line.figure is None:
        return [line.reason, "", "", "", ""]
    figure = line.figure
    value = f"{figure.value:,.{1 if figure.unit == 'ms' else 0}f} {figure.unit}"
    shares = [f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios(lines, line)]
    return [value, *shares, f"{figure.server:.0%}", f"{figure.client:.0%}"]


def main() -> int:
    """Measure what the command line asks for, and print it; 1 if a check failed."""
    arguments = _arguments()
    # Stop the server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    size = QUICK if arguments.quick else FULL
    # As in the broker's process: what a busy thread and the collector cost everyone else.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    calm_garbage_collection()
    folder = Path(tempfile.mkdtemp(prefix=".rmq-bench-", dir=arguments.home or Path.cwd()))
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True))
    workloads = [name for name in WORKLOADS if arguments.only in name]
    lines: list[Line] = []
    ran: list[Driver] = []
    missing: dict[str, str] = {}
    try:
        with bar:
            task = bar.add_task("")
            for name in arguments.peers or PEERS:
                kind = PEERS[name]
                if reason := kind.missing():
                    missing[kind.name] = reason
                    continue
                bar.update(task, description=kind.name)
                own, driver = folder / name, kind()
                own.mkdir()
                with started(driver, own):
                    lines += measure(driver, workloads, size=size)
                ran.append(driver)
                shutil.rmtree(own, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(lines, ran=ran, missing=missing, as_json=arguments.json)
    return 1 if any(line.reason.startswith("✗") for line in lines) else 0


def _print(
    lines: Sequence[Line], *, ran: Sequence[Driver], missing: Mapping[str, str], as_json: bool
) -> None:
    if not as_json:
        console = Console()
        # Of a file, which has no width of its own, a reader scrolls.
        console.width = max(console.width, WIDTH)
        console.print(table(lines, peers=ran, missing=missing))
        return
    rows = [
        {**asdict(line), **dict(zip(("of_best", "of_limit"), ratios(lines, line), strict=True))}
        for line in lines
    ]
    peers = [
        {"name": each.name, "version": each.version, "durability": each.durability} for each in ran
    ]
    facts = {"rows": rows, "peers": peers, "missing": missing, "load": os.getloadavg()}
    print(json.dumps(facts, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a second each: no figures to keep")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="some peers")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--home", type=existing_folder, help="folder to write in: its disk counts")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
