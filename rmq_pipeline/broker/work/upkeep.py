"""Background work by the broker itself: all of it in mode self, overdue work in mode dagster."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rmq_pipeline.broker.decide.background import Due, NoteFallback
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.redelivery import revive
from rmq_pipeline.broker.work.schedule import deliver_scheduled
from rmq_pipeline.broker.work.transaction_checks import check_transactions
from rmq_pipeline.errors import RocketMQError

log = logging.getLogger(__name__)

Mode = Literal["self", "dagster", "none"]
#: Longest single call, so that a closing broker need not wait long.
_SLICE_MS = 5_000
_REVIVE_EVERY_MS = 1_000
_ARCHIVE_EVERY_MS = 60_000
#: In mode dagster: interval of looks for overdue work on the archive.
_ARCHIVE_LOOK_MS = 5_000
_LIMIT = 100_000


class Upkeep:
    """Threads for background work inside the broker."""

    def __init__(
        self,
        engine: Engine,
        mode: Mode,
        *,
        archive: Mapping[str, Callable[[], Any]],
        due: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Start the threads.

        Args:
            archive: jobs of the archive, by name, in this order.
            due: returns the due work, as ``Broker.due`` does.
        """
        self._engine = engine
        self._archive, self._due = archive, due
        #: Job of the archive -> since when it has been due without a window.
        self._due_since_ms: dict[str, int] = {}
        self._bell = threading.Condition()
        self._stopped = False
        self.last_fallback: dict[str, Any] | None = None
        jobs: list[Callable[[], None]] = []
        if mode == "self":
            jobs = [self._going_on(self._deliver_slice), self._going_on(self._check_slice)]
            jobs.append(self._every(_REVIVE_EVERY_MS, self._revive))
            jobs.append(self._every(_ARCHIVE_EVERY_MS, *archive.values()))
        elif mode == "dagster":
            jobs = [self._every(_REVIVE_EVERY_MS, self._fall_back)]
            # A seal takes longer with a longer log; revive must not wait for it.
            jobs.append(self._every(_ARCHIVE_LOOK_MS, self._fall_back_archive))
        self._threads = [
            threading.Thread(target=job, name="rmq-upkeep", daemon=True) for job in jobs
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wake and end the threads."""
        with self._bell:
            self._stopped = True
            self._bell.notify_all()
        for thread in self._threads:
            thread.join()

    def _going_on(self, wait_and_do: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            while not self._stopped:
                self._try(wait_and_do)

        return run

    def _deliver_slice(self) -> Any:
        return deliver_scheduled(self._engine, wait_ms=_SLICE_MS, limit=_LIMIT, window=None)

    def _check_slice(self) -> Any:
        return check_transactions(self._engine, wait_ms=_SLICE_MS, limit=_LIMIT, window=None)

    def _revive(self) -> Any:
        return revive(self._engine, wait_ms=0, limit=_LIMIT, window=None)

    def _every(self, interval_ms: int, *jobs: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            while True:
                at_ms = self._engine.clock.now_ms() + interval_ms
                with self._bell:
                    if self._stopped:
                        return
                    self._engine.clock.wait_until(self._bell, at_ms)
                for job in jobs:
                    self._try(job)

        return run

    def _try(self, job: Callable[[], Any]) -> None:
        """Run a job. After a refusal (full disk, closing broker), log it; the next turn retries."""
        if self._stopped:
            return
        try:
            job()
        except RocketMQError as error:
            if not self._stopped:
                log.warning("Background work was refused: %s", error)
                with self._bell:
                    if not self._stopped:
                        self._bell.wait(1.0)
        except Exception:
            log.exception("Background work failed; it is tried again.")
            with self._bell:
                if not self._stopped:
                    self._bell.wait(1.0)

    def _fall_back(self) -> None:
        """Do the overdue work of Dagster's runs, and record it.

        Does not wait for live windows. A run may spend long in the checker of one topic, and
        the producers of all other topics would get no checks meanwhile.
        """
        failures = self._engine.dead_letter_failures
        due = self._engine.submit(Due(failures.offsets()))
        limit_ms = self._engine.settings.fallback_overdue_ms
        oldest = due["jobs"]["deliver_scheduled"]["next_due_ms"]
        if oldest is not None and due["now_ms"] - oldest > limit_ms:
            report = deliver_scheduled(self._engine, wait_ms=0, limit=_LIMIT, window=None)
            self._note("deliver_scheduled", due["now_ms"] - oldest, report=report)
        oldest = due["jobs"]["check_transactions"]["next_due_ms"]
        if oldest is not None and due["now_ms"] - oldest > limit_ms:
            report = check_transactions(self._engine, wait_ms=0, limit=_LIMIT, window=None)
            self._note("check_transactions", due["now_ms"] - oldest, report=report)
        ended = due["jobs"]["revive"].get("oldest_ended_ms")
        if ended is not None and due["now_ms"] - ended > limit_ms:
            report = self._revive()
            if any(report[done] for done in ("revived", "parked", "dead_lettered")):
                self._note("revive", due["now_ms"] - ended, report=report)
        elif failures and failures.take_time(due["now_ms"]):  # no run retries these
            dead_letter_exhausted(self._engine, None, limit=AT_ONCE, again=True)

    def _fall_back_archive(self) -> None:
        """Seal, merge and expire what no window has done; without that, the disk fills up.

        A job with an open window is skipped; the remaining work is due for the next window.
        """
        jobs, now_ms = self._due()["jobs"], self._engine.clock.now_ms()
        for job, do in self._archive.items():
            if not jobs[job]["due"] or jobs[job].get("window"):
                self._due_since_ms.pop(job, None)
                continue
            overdue_ms = now_ms - self._due_since_ms.setdefault(job, now_ms)
            if overdue_ms <= self._engine.settings.fallback_overdue_ms:
                continue
            del self._due_since_ms[job]
            report = do()
            if any(report.values()):
                self._note(job, overdue_ms, report=report)

    def _note(self, job: str, overdue_ms: int, *, report: dict[str, Any]) -> None:
        self._engine.submit(NoteFallback(job, overdue_ms, report))
        self.last_fallback = {
            "job": job,
            "at_ms": self._engine.clock.now_ms(),
            "overdue_ms": overdue_ms,
        }
        log.warning("The broker did %s itself, overdue by %d ms.", job, overdue_ms)
