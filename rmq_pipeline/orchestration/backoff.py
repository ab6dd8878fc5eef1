"""Backoff of windows whose runs fail, computed from the run storage.

No state is kept in memory or in a cursor. A restart of the daemon changes nothing, and runs that an
operator launches count too.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import dagster as dg
import psutil

from rmq_pipeline.orchestration.upkeep_assets import NOTHING_ACKED_TAG, WINDOW_TAG, YIELDED_TAG

#: Pause after the first failed run; each further failed run doubles the pause.
FIRST_S: Final = 20.0
#: Longest pause. Pauses of 20, 40, 80, 160, 320 and 600 s allow at most 10 failed runs an hour.
MOST_S: Final = 600.0
#: Part of each sentence of ``Backoff.reasons``.
RETRIED: Final = "the next run starts at "
#: Number of runs examined. Six consecutive failures reach the longest pause; runs that do not count
#: may be between them.
_LOOK_BACK: Final = 30
_OVER: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)


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


def times(failures: int) -> str:
    """Return the number of failures in words."""
    return "once" if failures == 1 else f"{failures} times in a row"
