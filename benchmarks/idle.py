"""How soon an idle system works: a message that is scheduled, and one that windows take.

Everything of `rmq up` runs (broker, Dagster's daemon, webserver and code server, the flights), but
nothing is under way: before each trial no run is unfinished and no window open, and the message is
sent at a random moment of the sensors' ticks. What is timed begins with the send, and is on the
broker's clock. Between trials runs are ended through Dagster, and RMQ_BUSY_S keeps windows from
following each other, which they otherwise do for ten minutes. A departure is taken by a window in
Spark and by one on threads, both from the same send.
``python benchmarks/idle.py --help`` for the number of trials.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.examples.flights.dataset import departures
from rmq_pipeline.examples.flights.pipeline import (
    AIRCRAFT_CHECKS,
    AIRCRAFT_ROTATIONS,
    DEPARTURES,
    PIPELINE,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import UNFINISHED
from rmq_pipeline.orchestration.project import CodeLocation

TOPIC = "later"
SCHEDULED_RUN = "deliver_scheduled"
#: Of departures, by what their windows run on.
CONSUMERS = {"Spark": AIRCRAFT_ROTATIONS, "Python": AIRCRAFT_CHECKS}
#: How far ahead messages are scheduled: before a window can be up, and about when one can.
AHEAD_S = (1.0, 2.0, 5.0, 10.0)
LATE_P99_S = 8.0
HANDLED_S = 25.0
#: A sensor ticks every 5 s: a window must live as long to be seen by one.
SEEN_S = 6.0
TICK_S = 5.0
LOOK_S = 0.02
GIVE_UP_S = 120.0


@dataclass(frozen=True)
class Trial:
    """What one message waited for, in seconds since it was sent (or since it was due)."""

    seconds: float
    #: From the send until a run was requested, and from that until its process worked.
    requested: float
    started: float


@dataclass(frozen=True)
class Row:
    """One line of the result, in seconds; ``target`` is for ``judged``."""

    name: str
    n: int
    p50: float
    p99: float
    longest: float
    #: Medians: from the send to the run's request, and from that to its start.
    requested: float
    started: float
    early: int
    judged: str = ""
    target: float | None = None

    @property
    def met(self) -> bool:
        """Whether the target was, and nothing came early."""
        value = self.p99 if self.judged == "p99" else self.longest
        return self.early == 0 and (self.target is None or value <= self.target)


class Idle:
    """The whole application, brought to rest before each trial."""

    def __init__(self, client: Client, dagster: DevServer) -> None:
        self.client, self._dagster = client, dagster
        self._departures = departures(1)
        self._random = random.Random(5)
        self._ended: set[str] = set()

    def scheduled(self, ahead_s: float) -> Trial:
        """How late a message is that is due in so many seconds."""
        self._rest()
        before = self._stored()
        sent_s = time.time()
        due_ms = int(1000 * (sent_s + ahead_s))
        self.client.send(TOPIC, pa.table({"body": [b"x"], "deliver_at_ms": [due_ms]}))
        self._wait(lambda: self._stored() > before)
        self._linger()
        stored_ms = self._last_stored_ms()
        requested_s, started_s = self._run(SCHEDULED_RUN, since_s=sent_s)
        return Trial((stored_ms - due_ms) / 1000, requested_s - sent_s, started_s - requested_s)

    def handled(self, number: int) -> dict[str, Trial]:
        """How long a departure takes to be in the sink and settled, for each of CONSUMERS."""
        self._rest()
        sent_s = time.time()
        self.client.send(DEPARTURES.name, self._departures.slice(number, 1))
        settled_s: dict[str, float] = {}

        def all_settled() -> bool:
            lags = self._lags()
            for engine, consumer in CONSUMERS.items():
                if not lags.get(consumer.group.name):
                    settled_s.setdefault(engine, time.time() - sent_s)
            return len(settled_s) == len(CONSUMERS)

        self._wait(all_settled, every_s=0.1)
        self._linger()
        trials = {}
        for engine, consumer in CONSUMERS.items():
            requested_s, started_s = self._run(f"{consumer.spec.name}_window", since_s=sent_s)
            trials[engine] = Trial(settled_s[engine], requested_s - sent_s, started_s - requested_s)
        return trials

    def _rest(self) -> None:
        """Until nothing was under way for a whole tick of the sensors, and a random part of one."""
        self._wait(self._is_over, every_s=0.2)
        rested_s = TICK_S + self._random.uniform(0, TICK_S)
        until = time.monotonic() + rested_s
        while time.monotonic() < until:
            time.sleep(0.2)
            if not self._is_over():
                until = time.monotonic() + rested_s

    def _is_over(self) -> bool:
        """Whether no run is unfinished and no window open; those that are, are ended."""
        runs = [run["runId"] for run in self._dagster.graphql.runs(statuses=UNFINISHED)]
        if new := [run_id for run_id in runs if run_id not in self._ended]:
            self._dagster.graphql.terminate(new)
            self._ended.update(new)
        due = self.client.due()
        facts = [*due["jobs"].values(), *due["groups"].values()]
        return not runs and not any(each.get("window") for each in facts)

    def _linger(self) -> None:
        time.sleep(SEEN_S)

    def _wait(self, condition: Callable[[], bool], *, every_s: float = LOOK_S) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"Nothing happened for {GIVE_UP_S:.0f} s.")
            time.sleep(every_s)

    def _lags(self) -> dict[str, int]:
        query = "SELECT consumer_group, sum(lag)::BIGINT AS n FROM lag GROUP BY ALL"
        rows = self.client.sql(query).to_pylist()
        return {row["consumer_group"]: int(row["n"] or 0) for row in rows}

    def _stored(self) -> int:
        queues = self.client.describe_topic(TOPIC)["offsets"]
        return sum(queue["max_offset"] for queue in queues)

    def _last_stored_ms(self) -> int:
        query = f"SELECT max(stored_at_ms) AS at_ms FROM messages WHERE topic = '{TOPIC}'"
        return int(self.client.sql(query).to_pylist()[0]["at_ms"])

    def _run(self, job: str, *, since_s: float) -> tuple[float, float]:
        """When the first run of a job was created since then, and when it began to work."""
        with dg.DagsterInstance.from_config(str(self._dagster.dagster_home)) as instance:
            records = instance.get_run_records(dg.RunsFilter(job_name=job), limit=10)
        times = [(r.create_timestamp.timestamp(), r.start_time or 0.0) for r in records]
        # The sensor may have asked for it just before the answer of the send came.
        found = [each for each in times if each[0] >= since_s - LOOK_S]
        if not found:
            raise RuntimeError(f"No run of {job} since {since_s}: {records}")
        return min(found)


@contextmanager
def running(folder: Path) -> Iterator[Idle]:
    """Everything of `rmq up`, in a folder of its own."""
    home = folder / "home"
    os.environ["RMQ_SINKS"] = str(folder / "sinks")
    with ExitStack() as stack:
        stack.enter_context(Supervisor(home))
        client = stack.enter_context(Client(home=home))
        client.create_topic(TOPIC, type="delay")
        PIPELINE.ensure(client)
        env = {"RMQ_HOME": str(home), "RMQ_BUSY_S": "0"}
        code = CodeLocation.find("rmq_pipeline.examples.flights.definitions")
        dagster = stack.enter_context(DevServer(folder / "dagster_home", env=env, code=code))
        yield Idle(client, dagster)


def main() -> int:
    """Measure, print, and say by the exit code whether the targets were met."""
    arguments = _arguments()
    # What ends a benchmark from outside also ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if arguments.quick:
        arguments.scheduled, arguments.handled = 4, 1
    folder = Path(tempfile.mkdtemp(prefix="rmq-idle-", dir=arguments.folder))
    trials: dict[str, list[Trial]] = {}
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn())
    try:
        with running(folder) as idle, Progress(*columns, console=Console(stderr=True)) as bar:
            scheduled = bar.add_task("scheduled", total=arguments.scheduled)
            for i in range(arguments.scheduled):
                ahead_s = AHEAD_S[i % len(AHEAD_S)]
                trials.setdefault(_ahead(ahead_s), []).append(idle.scheduled(ahead_s))
                bar.console.print(f"{_ahead(ahead_s)}: {trials[_ahead(ahead_s)][-1]}")
                bar.advance(scheduled)
            handled = bar.add_task("handled", total=arguments.handled)
            for i in range(arguments.handled):
                for engine, trial in idle.handled(i).items():
                    trials.setdefault(engine, []).append(trial)
                    bar.console.print(f"{engine}: {trial}")
                bar.advance(handled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = _rows(trials)
    if arguments.json:
        facts = [{**asdict(row), "met": row.met} for row in rows]
        told = {name: [asdict(each) for each in of] for name, of in trials.items()}
        print(json.dumps({"rows": facts, "trials": told, "load": os.getloadavg()}, indent=2))
    else:
        Console().print(_table(rows))
    return 0 if all(row.met for row in rows) else 1


def _ahead(seconds: float) -> str:
    return f"late, scheduled {seconds:.0f} s ahead"


def _rows(trials: dict[str, list[Trial]]) -> list[Row]:
    late = [trial for name, of in trials.items() if name not in CONSUMERS for trial in of]
    rows = [_row(name, of) for name, of in trials.items() if name not in CONSUMERS]
    if late:
        rows.append(_row("late, any of these", late, judged="p99", target=LATE_P99_S))
    for engine in CONSUMERS:
        if engine in trials:
            name = f"until a row is settled in {engine}"
            rows.append(_row(name, trials[engine], judged="longest", target=HANDLED_S))
    return rows


def _row(name: str, trials: list[Trial], *, judged: str = "", target: float | None = None) -> Row:
    seconds = np.array([trial.seconds for trial in trials])
    requested = np.array([trial.requested for trial in trials])
    started = np.array([trial.started for trial in trials])
    p50, p99 = np.quantile(seconds, [0.5, 0.99]).tolist()
    return Row(
        name=name,
        n=len(trials),
        p50=p50,
        p99=p99,
        longest=float(seconds.max()),
        requested=float(np.median(requested)),
        started=float(np.median(started)),
        early=int(np.sum(seconds < 0)),
        judged=judged,
        target=target,
    )


def _table(rows: list[Row]) -> Table:
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    title = f"An idle system, {os.cpu_count()} cores: seconds"
    table = Table(title=title, caption=f"Load average {load}. Requested, started: medians.")
    for name in ("measured", "n", "p50", "p99", "max", "requested", "started", "target", ""):
        table.add_column(name, justify="left" if name == "measured" else "right")
    for row in rows:
        target = "" if row.target is None else f"{row.judged} ≤ {row.target:g}"
        verdict = "[green]met[/]" if row.met else "[red]missed[/]"
        values = (row.p50, row.p99, row.longest, row.requested, row.started)
        table.add_row(
            row.name,
            str(row.n),
            *(f"{value:.1f}" for value in values),
            target,
            "" if row.target is None and row.met else verdict,
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduled", type=int, default=20, help="trials with a scheduled message")
    parser.add_argument("--handled", type=int, default=5, help="trials with a departure")
    parser.add_argument("--quick", action="store_true", help="4 and 1 of them")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
