"""A broker that may lose its process, or its disk, at a step of a commit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.home import OPEN_FILE
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError
from rmq_pipeline.store.dispatch import Dispatcher

if TYPE_CHECKING:
    from pathlib import Path

    from rmq_pipeline.message import Int64s
    from rmq_pipeline.settings import Settings
    from rmq_pipeline.store.log.commit_log import CommitLog


class AskedDispatcher(Dispatcher):
    """Dispatch that moves when somebody waits for it, and never by itself."""

    @override
    def start(self) -> None:
        pass

    @override
    def notify(self, position: int) -> None:
        pass

    @override
    def wait_for(self, position: int, timeout_s: float | None = None) -> bool:
        self._move()
        return True


class SteppedEngine(Engine):
    """An engine of which nothing depends on chance or on threads."""

    numbers: count[int]

    @override
    def _keep_house(self) -> None:
        """It would come when it likes: locks and members that time has ended stay until asked."""

    @override
    def _dispatcher(self, commit_log: CommitLog) -> Dispatcher:
        return AskedDispatcher(commit_log, self.database, on_failure=self._dispatch_failed)

    @override
    def new_delivery(self) -> int:
        return next(self.numbers)

    @override
    def new_deliveries(self, n: int) -> Int64s:
        return np.array([next(self.numbers) for _ in range(n)], dtype=np.int64)


@dataclass(frozen=True)
class Trouble:
    """At this step of its first commit a verb meets a failing disk, or the end of its process."""

    step: Literal["staged", "before_write", "half_written", "written"]
    crash: bool

    @property
    def stored(self) -> bool:
        """Return True if its work is on disk although no answer was sent."""
        return self.step == "written"


class CrashingBroker:
    """``broker`` over a folder; another one, over another folder, after each end of it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.clock = ManualClock()
        self._homes = (folder / f"home-{number}" for number in count())
        self._home = next(self._homes)
        self._settings = settings
        self._numbers = count(1)
        self._trouble: Trouble | None = None
        self._copied: Path | None = None
        #: A verb was cut off after its first commit: what it was to do next is left to upkeep.
        self.cut_off = False
        #: How often what is only in memory was lost.
        self.lives = 0
        self._open()

    def _open(self) -> None:
        engine: Engine = SteppedEngine.open(
            self._home, clock=self.clock, settings=self._settings, flush="sync", fault=self._step
        )
        assert isinstance(engine, SteppedEngine)
        engine.numbers = self._numbers
        self.broker = Broker(engine, "none")
        self.lives += 1

    def ask(
        self, verb: str, *arguments: Any, trouble: Trouble | None = None, **named: Any
    ) -> tuple[Any, bool]:
        """What a verb answers, and whether it took effect; no answer where it met the trouble."""
        self._trouble = trouble
        try:
            return getattr(self.broker, verb)(*arguments, **named), True
        except StorageError:
            if trouble is None or self._trouble is not None:
                raise
            if self._copied is not None:
                self._go_on_with(self._copied)
            self.cut_off |= trouble.stored
            self.lives += 1
            return None, trouble.stored
        finally:
            self._trouble = self._copied = None

    def _step(self, name: str) -> None:
        trouble = self._trouble
        if trouble is not None and trouble.step == name:
            self._trouble = None
            if trouble.crash:
                self._copied = self._copy()
            raise OSError(f"the disk fails: {name}")

    def _copy(self) -> Path:
        """What is on disk at this moment, as the next process would find it."""
        copy = next(self._homes)
        shutil.copytree(self._home, copy)
        # Of one moment: nothing was written while it was copied.
        (copy / OPEN_FILE).unlink()
        return copy

    def _go_on_with(self, home: Path) -> None:
        self.end()
        self._home = home
        self._open()

    def crash(self) -> None:
        """The process ends; the next one finds what is on disk."""
        self._go_on_with(self._copy())

    def reopen(self, *, from_the_log: bool) -> None:
        """Close and open; perhaps nothing but the log is left of the home."""
        self.broker.close()
        for file in self._home.glob("state.duckdb*") if from_the_log else ():
            file.unlink()
        self._open()

    def end(self) -> None:
        """Leave nothing behind."""
        self.broker.close()
        shutil.rmtree(self._home)
