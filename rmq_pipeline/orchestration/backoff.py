"""Backoff of windows whose runs fail, from the run storage, and their report on a terminal.

No state is kept in memory or in a cursor. A restart of the daemon changes nothing, and runs that an
operator launches count too.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

import dagster as dg
import psutil
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickStatus
from dagster_shared.error import SerializableErrorInfo

from rmq_pipeline.orchestration.upkeep_assets import NOTHING_ACKED_TAG, WINDOW_TAG, YIELDED_TAG

#: Pause after the first failed run; each further failed run doubles the pause.
FIRST_S: Final = 20.0
#: Longest pause. Pauses of 20, 40, 80, 160, 320 and 600 s allow at most 10 failed runs an hour.
MOST_S: Final = 600.0
#: Prefix of skip reasons for the operator: work is due and is not started.
NOT_STARTED: Final = "Not started: "
#: Part of each sentence of ``Backoff.reasons``.
RETRIED: Final = "the next run starts at "
#: Number of runs examined. Six consecutive failures reach the longest pause; runs that do not count
#: may be between them.
_LOOK_BACK: Final = 30
_OVER: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)
log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 3.0
#: Runs may become visible in another order than that of their update times.
OVERLAP: Final = timedelta(seconds=10)
#: Message of a code server about a run whose process ended without an error.
_DIED: Final = "unexpectedly exited"
#: Maximum length of an error's first line.
_LINE: Final = 300


@dataclass(frozen=True)
class Failing:
    """A kind of window whose newest run failed."""

    name: str
    #: The newest failed run, and when it ended, in seconds since 1970.
    run_id: str
    failed_at_s: float
    #: Number of consecutive failed runs since the code was loaded.
    failures: int

    @property
    def retry_at_s(self) -> float:
        """Earliest time of the next run request, in seconds since 1970."""
        return self.failed_at_s + pause_s(self.failures)


def pause_s(failures: int) -> float:
    """Return the pause in seconds after this many consecutive failures."""
    return float(min(MOST_S, FIRST_S * 2 ** (failures - 1)))


def failing(instance: dg.DagsterInstance, name: str, *, code_since_s: float) -> Failing | None:
    """Return the failures at the end of a window's runs; None if the newest run succeeded.

    Successful runs that yielded or acked nothing do not count. For example, a handler kills its
    process. The next window finds the message, acks nothing and succeeds. The window after that is
    killed again.

    Args:
        instance: has the runs.
        name: name of the window, as in the tag of its runs.
        code_since_s: when the code was loaded. All failures of older code count as one.
    """
    found = list(_failed(instance, name))
    if not found:
        return None
    newest = found[0]
    failures = sum(_ended_at_s(record) >= code_since_s for record in found)
    return Failing(name, newest.dagster_run.run_id, _ended_at_s(newest), max(1, failures))


def _failed(instance: dg.DagsterInstance, name: str) -> Iterator[dg.RunRecord]:
    """Yield the failed runs, newest first, up to a run that succeeded."""
    runs = dg.RunsFilter(tags={WINDOW_TAG: name}, statuses=list(_OVER))
    for record in instance.get_run_records(runs, limit=_LOOK_BACK):
        run = record.dagster_run
        if run.status == dg.DagsterRunStatus.FAILURE:
            yield record
        elif not {YIELDED_TAG, NOTHING_ACKED_TAG} & run.tags.keys():
            return


def _ended_at_s(record: dg.RunRecord) -> float:
    if record.end_time is not None:
        return float(record.end_time)
    return record.update_timestamp.replace(tzinfo=UTC).timestamp()


def now_s() -> float:
    """Return the clock of the run storage, in seconds since 1970."""
    return time.time()


@functools.cache
def code_since_s() -> float:
    """Return when this process loaded the code: a code server loads it once, at its start."""
    return psutil.Process().create_time()


@dataclass
class Backoff:
    """The backoff of all windows during one tick of a sensor."""

    instance: dg.DagsterInstance
    _asked: dict[str, Failing | None] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        """Return True if a window must not be requested yet; reads run storage once a tick."""
        if name not in self._asked:
            self._asked[name] = failing(self.instance, name, code_since_s=code_since_s())
        found = self._asked[name]
        return found is not None and now_s() < found.retry_at_s

    def reasons(self) -> list[str]:
        """Return why windows are not requested, one sentence per failing window."""
        return [
            f"{each.name} failed {times(each.failures)}, the last time in run {each.run_id}; "
            f"{RETRIED}{datetime.fromtimestamp(each.retry_at_s, UTC):%H:%M:%S} UTC, sooner when "
            "the code is loaded again or a run that you launch succeeds."
            for each in self._asked.values()
            if each is not None and now_s() < each.retry_at_s
        ]


def skip_reason(reasons: Sequence[str]) -> str:
    """Return why a tick requests nothing: one reason per line, or that nothing is due."""
    lines = "\n".join(reasons)
    return f"{NOT_STARTED}{lines}" if reasons else "Nothing is due."


def times(failures: int) -> str:
    """Return the number of failures in words."""
    return "once" if failures == 1 else f"{failures} times in a row"


class FailureWatch:
    """Reads runs and ticks of a Dagster instance; a context manager with its own thread.

    Each fact is reported once: a failing window, a new error of it, and its first success
    afterwards; a failing sensor, or its reason for starting nothing.
    """

    def __init__(
        self,
        dagster_home: Path,
        *,
        url: str,
        tell: Callable[[str], None],
        code_since_s: Callable[[], float],
    ) -> None:
        """Create the watch; nothing is read yet.

        Args:
            dagster_home: home of the instance.
            url: address of its webserver, for links to the logs of runs.
            tell: called with one line at a time, in the watch's thread.
            code_since_s: returns when the code server was started.
        """
        self._home, self._url, self._tell = dagster_home, url, tell
        self._code_since_s = code_since_s
        self._over = threading.Event()
        #: Runs updated before this time have been examined.
        self._since = datetime.now(UTC)
        #: Window -> the error that was reported.
        self._failing: dict[str, str] = {}
        #: Sensor -> the lines that were reported.
        self._sensors: dict[str, set[str]] = {}
        self._thread = threading.Thread(target=self._run, name="rmq-failure-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with dg.DagsterInstance.from_config(str(self._home)) as instance:
            while not self._over.wait(LOOK_EVERY_S):
                try:
                    self.look_at_runs(instance)
                    self.look_at_sensors(instance)
                except Exception:
                    # For example a locked table or a full disk: the next attempt may succeed.
                    log.warning("failed runs cannot be read", exc_info=True)

    def look_at_runs(self, instance: dg.DagsterInstance) -> None:
        """Report which windows fail, and which have recovered."""
        runs = dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=self._since)
        records = instance.get_run_records(runs)
        failed = {record.dagster_run.tags.get(WINDOW_TAG, "") for record in records}
        for name in sorted((failed | self._failing.keys()) - {""}):
            self._look_at(name, instance)
        # Only after all of them were examined: otherwise the next call would miss the rest.
        for record in records:
            self._since = max(self._since, record.update_timestamp - OVERLAP)

    def look_at_sensors(self, instance: dg.DagsterInstance) -> None:
        """Report which sensors fail, and what they cannot start."""
        for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
            ticks = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1)
            if ticks and ticks[0].status in {TickStatus.SKIPPED, TickStatus.FAILURE}:
                error = ticks[0].error
                said = _first_line(error) if error else ticks[0].skip_reason or ""
                self._look_at_tick(state.name, said, is_error=error is not None)

    def _look_at(self, name: str, instance: dg.DagsterInstance) -> None:
        found = failing(instance, name, code_since_s=self._code_since_s())
        if found is None:
            if self._failing.pop(name, None) is not None:
                self._tell(f"{name}: a run has succeeded again.")
            return
        why = _why(instance, found.run_id)
        if self._failing.get(name) != why:
            self._failing[name] = why
            self._tell(self._sentence(found, why))

    def _sentence(self, found: Failing, why: str) -> str:
        return (
            f"{found.name} failed {times(found.failures)}: {why}\n"
            f"  It is tried again in {pause_s(found.failures):.0f} s, then with longer pauses of "
            f"up to {MOST_S / 60:.0f} min; at once when rmq up is started again, or when a run "
            f"that you launch succeeds. Log: {self._url}/runs/{found.run_id}"
        )

    def _look_at_tick(self, sensor: str, said: str, *, is_error: bool) -> None:
        lines = {f"The sensor {sensor} failed: {said}"} if is_error else _not_started(said)
        for line in sorted(lines - self._sensors.get(sensor, set())):
            self._tell(line)
        self._sensors[sensor] = lines


def _not_started(skip_reason: str) -> set[str]:
    """Return the lines that only an operator can resolve; failed runs are reported elsewhere."""
    if not skip_reason.startswith(NOT_STARTED):
        return set()
    lines = skip_reason.removeprefix(NOT_STARTED).splitlines()
    return {f"{NOT_STARTED}{line}" for line in lines if RETRIED not in line}


def _why(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return the first line of the error with which a run failed."""
    events = dg.DagsterEventType
    kinds = {events.STEP_FAILURE, events.RUN_FAILURE, events.ENGINE_EVENT}
    said = ""
    for record in instance.get_records_for_run(run_id, of_type=kinds).records:
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        error = getattr(event.event_specific_data, "error", None)
        if event.is_step_failure and error is not None:
            return _first_line(error)
        if error is not None:
            said = _first_line(error)
        elif _DIED in (event.message or ""):
            _, died, how = (event.message or "").partition(_DIED)
            said = f"Its process {died}{how}"
        elif event.is_job_failure:
            said = said or event.message or ""
    return said.strip().partition("\n")[0][:_LINE] or "no error was recorded."


def _first_line(error: SerializableErrorInfo) -> str:
    while error.cause is not None:
        error = error.cause
    return error.message.strip().partition("\n")[0][:_LINE]
