"""Everything a pipeline runs on, in processes that can be killed: broker, Dagster, its runs."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import dagster as dg
import psutil

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import UNFINISHED
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.orchestration.upkeep_assets import op_name
from rmq_pipeline.orchestration.windows import JOBS
from tests.chaos.exchange import GROUP, PIPELINE
from tests.chaos.zygote import Zygote
from tests.free_address import free_address, free_port

#: Short, so that a check whose answer got lost is made again soon.
SETTINGS: Final = {"transaction_check_interval_ms": 3_000, "transaction_check_max": 1_000}
CODE: Final = CodeLocation.find("tests.chaos.exchange")
CONSUMER: Final = f"{GROUP}_window"
_STARTED: Final = re.compile(r"Started process for run \(pid: (\d+)\)")


class Floor:
    """A broker without background work of its own, and a DevServer whose runs do it."""

    def __init__(self, folder: Path) -> None:
        self.home, self.desk, self.sinks = (folder / name for name in ("home", "desk", "sinks"))
        self.desk.mkdir()
        self._address = free_address()
        self._zygote = Zygote(folder / "output")
        self._dagster_home = folder / "dagster_home"
        self._dagster = DevServer(
            self._dagster_home,
            port=free_port(),
            code=CODE,
            env={
                "RMQ_HOME": str(self.home),
                "RMQ_SINKS": str(self.sinks),
                "RMQ_CHAOS_DESK": str(self.desk),
            },
        )

    def __enter__(self) -> Self:
        self._broker = self._serve()
        self.client = Client(home=self.home)
        self.client.ping()
        PIPELINE.ensure(self.client)
        self._dagster.start()
        self._instance = dg.DagsterInstance.from_config(str(self._dagster_home))
        return self

    def __exit__(self, *_: object) -> None:
        self._dagster.stop()
        self._instance.dispose()
        self.client.close()
        os.kill(self._broker, signal.SIGTERM)
        self._zygote.ask(reap=self._broker)
        self._zygote.close()

    def _serve(self) -> int:
        return self._zygote.ask(
            serve=str(self.home), flight=self._address, upkeep="dagster", settings=SETTINGS
        )

    def kill_broker(self) -> None:
        """kill -9, and another one for its home."""
        os.kill(self._broker, signal.SIGKILL)
        assert self._zygote.ask(reap=self._broker) == -signal.SIGKILL
        self._broker = self._serve()

    def word(self, name: str) -> Path:
        """Leave word at the desk; unlink it to take it back."""
        path = self.desk / name
        path.touch()
        return path

    def has_word(self, name: str) -> bool:
        """Whether the pipeline's code has left word there."""
        return (self.desk / name).exists()

    # ------------------------------------------------------------------------------------- runs

    def launch(self, job: str, **config: Any) -> str:
        """Launch a job of upkeep as the Launchpad does; the run's id."""
        ops = {op_name(job): {"config": config}}
        return self._dagster.graphql.launch(job, location=CODE.name, config={"ops": ops})

    def launch_consumer(self) -> str:
        """Launch a window of the consumer; the run's id."""
        return self._dagster.graphql.launch(CONSUMER, location=CODE.name, config={})

    def status(self, run_id: str) -> str:
        """Status of a run."""
        return self._dagster.graphql.status(run_id)

    def is_over(self, run_id: str) -> bool:
        """Whether a run has ended."""
        return self.status(run_id) not in UNFINISHED

    def unfinished(self, *statuses: str) -> list[tuple[str, str]]:
        """Job and id of the runs that are not over."""
        runs = self._dagster.graphql.runs(statuses=statuses or UNFINISHED)
        return [(run["jobName"], run["runId"]) for run in runs]

    def worker(self, run_id: str) -> psutil.Process | None:
        """The process of a run; None before and after."""
        kind = dg.DagsterEventType.ENGINE_EVENT
        for entry in self._instance.all_logs(run_id, of_type=kind):
            if found := _STARTED.search(entry.message + entry.user_message):
                try:
                    return psutil.Process(int(found[1]))
                except psutil.NoSuchProcess:
                    return None
        return None

    def facts(self, run_id: str) -> dict[str, Any]:
        """What a run's materializations and observations say, the last one of a name."""
        found: dict[str, Any] = {}
        for entry in self._instance.all_logs(run_id):
            event = entry.dagster_event
            if event is None or not (event.is_step_materialization or event.is_asset_observation):
                continue
            data: Any = event.event_specific_data
            told = getattr(data, "materialization", None) or data.asset_observation
            found |= {name: value.value for name, value in told.metadata.items()}
        return found

    # ---------------------------------------------------------------------------------- windows

    def windows(self) -> Mapping[str, dict[str, Any]]:
        """The open windows by the job of their runs."""
        due = self.client.due()
        found = {job: due["jobs"][job]["window"] for job in JOBS}
        found[CONSUMER] = due["groups"][GROUP]["window"]
        return {job: window for job, window in found.items() if window}

    def count(self, sql: str) -> int:
        """The only number of a query."""
        return int(self.client.sql(sql).column(0)[0].as_py() or 0)


def stop(process: psutil.Process) -> list[psutil.Process]:
    """Stop a run with all that it has started; give this to ``go_on``."""
    stopped = [process]
    process.suspend()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it was about to end
            child.suspend()
            stopped.append(child)
    return stopped


def go_on(stopped: list[psutil.Process]) -> None:
    """Let them run on as if nothing had happened."""
    for process in reversed(stopped):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def pause(seconds: float) -> None:
    """A moment of a random choice, not a wait for something."""
    threading.Event().wait(seconds)
