"""The demo: departures of 2013 through broker, Dagster and Spark, and every row checked.

Run by `rmq demo`, or as ``python -m rmq_pipeline.examples.flights.demo``. Everything lies in a
fresh folder: the broker's home, DAGSTER_HOME, the sinks and the airline's own files. The demo only
publishes departures and changes of crews; that anything happens to them is the doing of Dagster's
sensors. When all that can be done is done, it releases a grounded aircraft and corrects a handler,
and launches the jobs that give parked messages and dead letters another chance.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

from rmq_pipeline import logs
from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.errors import OperatorError, RequestError, RocketMQError
from rmq_pipeline.examples.flights import crews, facts, operations, verify
from rmq_pipeline.examples.flights.crew_desk import CrewDesk
from rmq_pipeline.examples.flights.dataset import DAYS_OF_YEAR, departures
from rmq_pipeline.examples.flights.display import Display
from rmq_pipeline.examples.flights.pipeline import DEPARTURES, PIPELINE
from rmq_pipeline.examples.flights.progress import CHECKS, ROTATIONS, SUMMARY, Progress, Tally, look
from rmq_pipeline.examples.flights.publishing import publish
from rmq_pipeline.examples.flights.repairs import GROUNDED, Repairs
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import Listening
from rmq_pipeline.handling.sink import sink_files
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import UNFINISHED
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.orchestration.transaction_checker import JOB as CHECK_JOB
from rmq_pipeline.spark import session

#: Asked of the broker this often.
LOOK_S: Final = 1.0
#: A broker that was killed is back long before this.
RETRY_S: Final = 90.0
#: A consumer's window ends when nothing came for 20 s; then its run is over.
WINDOWS_END_S: Final = 45.0


def run(
    *, days: int = 7, keep: bool = False, as_json: bool = False, timeout_s: float | None = None
) -> int:
    """Run the demo; the exit code: 1 when a fact is wrong or it took too long.

    Args:
        days: of January 2013 and after, 1 to 365.
        keep: leave the UI up until it is interrupted, and the files after that.
        as_json: the facts are one JSON object on stdout, everything else goes to stderr.
        timeout_s: for publishing and draining; by default 10 minutes and 8 s a day.

    Raises:
        RequestError: there are not that many days.
        OperatorError: there is no Java for Spark.
        RocketMQError: broker or Dagster cannot be started, or not again.
    """
    if not 1 <= days <= DAYS_OF_YEAR:
        raise RequestError(f"There are 1 to {DAYS_OF_YEAR} days, not {days}.")
    if missing := session.java_lacks():
        raise OperatorError(missing)
    expected = verify.expected(days)
    display = Display(as_json=as_json, total=expected.published)
    folder = Path(tempfile.mkdtemp(prefix="rmq_demo_"))
    logs.set_up(file=folder / "demo.log")
    demo = Demo(folder, days=days, expected=expected, display=display)
    is_right = False
    try:
        is_right = demo.run(timeout_s=timeout_s or 600 + 8 * days, keep=keep)
    finally:
        if is_right and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            display.say(f"The files of this demo stay in {folder}.")
    return 0 if is_right else 1


class Demo:
    """One run of the demo in a folder of its own."""

    def __init__(
        self, folder: Path, *, days: int, expected: verify.Expected, display: Display
    ) -> None:
        self._folder = folder
        self._home = folder / "home"
        self._airline = folder / "airline"
        self._sinks = folder / "sinks"
        self._dagster_home = folder / "dagster_home"
        self._sent = departures(days)
        self._days = days
        self._expected = expected
        self._display = display
        self._tally = Tally()
        self._broken: list[RocketMQError] = []

    def run(self, *, timeout_s: float, keep: bool) -> bool:
        """Start everything, publish, wait, verify, end everything; whether all facts are right."""
        began_s = time.monotonic()
        self._set_environment()
        operations.ground([GROUNDED])
        with ExitStack() as stack:
            broker = stack.enter_context(self._broker())
            self._display.say(f"broker   {broker.endpoint.flight}   home {self._home}")
            client = stack.enter_context(Client(home=self._home, retry_s=RETRY_S))
            PIPELINE.ensure(client)
            self._display.say("Dagster  starting …")
            # The code is installed. The folder is only where Dagster's processes import from first.
            code = CodeLocation("rmq_pipeline.examples.flights.definitions", self._folder)
            dagster = stack.enter_context(DevServer(self._dagster_home, code=code))
            self._display.say(f"Dagster  {dagster.url}   DAGSTER_HOME {self._dagster_home}")
            desk = CrewDesk(client, crews.ledger())
            with self._display.bars():
                self._publish(client, desk)
                repairs, missing = self._work(client, dagster, until_s=began_s + timeout_s)
            self._display.say("Comparing every row with what the data says …")
            found, wrong = self._verify(client, dagster, desk=desk, repairs=repairs)
            wrong = [f"after {timeout_s:.0f} s: {line}" for line in missing] + wrong
            more = {
                "days": self._days,
                "runs": dagster.graphql.runs_by_status(),
                "broker_restarts": broker.restarts,
                "seconds": round(time.monotonic() - began_s, 1),
            }
            if keep:
                more |= {"home": str(self._home), "ui": dagster.url}
            self._display.facts(found, wrong=wrong, more=more)
            if keep:
                self._display.say(f"Everything runs on, see {dagster.url}; Ctrl-C ends it.")
                while not self._broken:
                    threading.Event().wait(LOOK_S)
        return not wrong

    def _set_environment(self) -> None:
        # What is started finds the broker by its home, which knows where a restarted one is.
        for name in ("RMQ_FLIGHT", "RMQ_GRPC", "RMQ_DEPLOYMENT"):
            os.environ.pop(name, None)
        os.environ["RMQ_HOME"] = str(self._home)
        os.environ["RMQ_SINKS"] = str(self._sinks)
        os.environ["RMQ_FLIGHTS"] = str(self._airline)

    def _broker(self) -> Supervisor:
        return Supervisor(
            self._home,
            Listening("127.0.0.1:0", "127.0.0.1:0"),
            tell=self._display.say,
            on_failure=self._broken.append,
        )

    def _publish(self, client: Client, desk: CrewDesk) -> None:
        self._display.say(f"Publishing {self._sent.num_rows:,} departures, then changes of crews …")
        publish(
            client,
            DEPARTURES.name,
            messages=self._sent,
            on_stored=lambda count: self._display.show(Progress(published=count)),
        )
        desk.work(crews.changes(self._sent), on_noted=lambda _: self._display.show(look(client)))

    def _work(
        self, client: Client, dagster: DevServer, *, until_s: float
    ) -> tuple[Repairs | None, list[str]]:
        """Wait until all is done; what people launched, and what is missing when time is over."""
        published = self._expected.published
        held = int((self._expected.checks["tail"] == GROUNDED).sum())
        self._display.say("All is sent. Sensors start the consumers, which settle what they can …")
        missing = self._wait(
            client, until_s, missing=lambda progress: progress.missing(published, held=held)
        )
        self._display.say("Waiting for the end of the consumers' runs …")
        missing += self._wait_for_windows(client, dagster)
        if missing:
            return None, missing
        repairs = Repairs(client, dagster.graphql, sinks=self._sinks)
        repairs.begin()
        self._display.say(f"{GROUNDED} may fly, cancellations are accepted: unpark and redrive …")
        missing = self._wait(client, until_s, missing=repairs.missing)
        if not missing:
            repairs.redrive_again()
            missing = self._wait(client, until_s, missing=repairs.missing)
        self._wait_for_windows(client, dagster)
        return repairs, missing

    def _wait(
        self, client: Client, until_s: float, *, missing: Callable[[Progress], list[str]]
    ) -> list[str]:
        """Wait until nothing is missing; what is when the time is over."""
        while True:
            progress = look(client)
            self._tally.update(client)
            self._display.show(progress)
            found = missing(progress) or self._unlisted(progress)
            if not found or time.monotonic() >= until_s:
                return found
            if self._broken:
                raise OperatorError(f"The broker cannot be started again: {self._broken[0]}")
            threading.Event().wait(LOOK_S)

    def _unlisted(self, progress: Progress) -> list[str]:
        """Rows that are settled, but which the manifests of the sinks do not tell readers yet."""
        settled = {
            ROTATIONS: progress.processed,
            SUMMARY: progress.increments,
            CHECKS: progress.checked,
        }
        found = {name: sum(sink_files(self._sinks / name)["rows"].to_pylist()) for name in settled}
        return [
            f"{settled[name] - found[name]:,} rows in the manifest of {name}"
            for name in settled
            if settled[name] != found[name]
        ]

    def _wait_for_windows(self, client: Client, dagster: DevServer) -> list[str]:
        """Let the consumers' windows end by themselves: their runs then have an outcome to show.

        Those that the broker still knows, when it took too long. A window works by the rules that
        it found; only the next one knows of new ones.
        """
        until_s = time.monotonic() + WINDOWS_END_S
        jobs = {consumer.job.name for consumer in PIPELINE.consumers}
        while time.monotonic() < until_s:
            if not jobs & {run["jobName"] for run in dagster.graphql.runs(statuses=UNFINISHED)}:
                break
            threading.Event().wait(LOOK_S)
        groups = client.due()["groups"]
        return [
            f"the end of a window of {consumer.group.name}"
            for consumer in PIPELINE.consumers
            if groups[consumer.group.name].get("window")
        ]

    def _verify(
        self, client: Client, dagster: DevServer, *, desk: CrewDesk, repairs: Repairs | None
    ) -> tuple[list[facts.Fact], list[str]]:
        """All facts, and what is wrong with them and with the rows."""
        self._tally.update(client)
        violations, wrong = facts.rows(self._expected, client, sent=self._sent, sinks=self._sinks)
        found = facts.facts(self._expected, progress=look(client), tally=self._tally)
        found.append(facts.Fact("order_violations", violations, 0))
        check_runs = sum(dagster.graphql.runs_by_status().get(CHECK_JOB, {}).values())
        of_crews, wrong_crews = facts.crew_facts(
            self._expected, client, desk=desk, check_runs=check_runs
        )
        found += of_crews
        wrong += wrong_crews
        if repairs is not None:
            found += repairs.facts(self._expected)
            wrong += repairs.wrong(self._expected)
        numbers = [
            f"{fact.name} is {fact.found}, not {fact.expected}"
            for fact in found
            if not fact.is_right
        ]
        return found, numbers + wrong


def main() -> int:
    """The demo with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="rmq demo")
    parser.add_argument("--days", type=int, default=7, help=f"1 to {DAYS_OF_YEAR}")
    parser.add_argument("--micro-batch", type=int, default=0, help="most messages of one")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--timeout", type=float)
    asked = parser.parse_args()
    if asked.micro_batch:
        os.environ["RMQ_MICRO_BATCH"] = str(asked.micro_batch)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return run(days=asked.days, keep=asked.keep, as_json=asked.json, timeout_s=asked.timeout)
    except RocketMQError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A second one must not cut the clean-up of the first short.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
