"""The façade: all verbs of an open broker. Doors call it; so may tests, notebooks and scripts."""

import time
from pathlib import Path
from typing import Any, Literal, Self

from rmq_pipeline.access import Access
from rmq_pipeline.broker import queries
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.burying import finish_burying
from rmq_pipeline.broker.upkeep import Mode, Upkeep
from rmq_pipeline.broker.verbs.access import AccessControl
from rmq_pipeline.broker.verbs.administration import Administration
from rmq_pipeline.broker.verbs.archiving import Archiving
from rmq_pipeline.broker.verbs.background import Background
from rmq_pipeline.broker.verbs.consumers import Consumers
from rmq_pipeline.broker.verbs.failures import Failures
from rmq_pipeline.broker.verbs.lite_topics import LiteTopics
from rmq_pipeline.broker.verbs.messaging import Messaging
from rmq_pipeline.broker.verbs.reading import Reading
from rmq_pipeline.broker.verbs.redriving import Redriving
from rmq_pipeline.broker.verbs.sinks import Sinks
from rmq_pipeline.broker.verbs.transactions import Transactions
from rmq_pipeline.broker.writer import Writer
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.settings import Settings

#: The broker's own seal goes on until nothing is due; it ends early when the broker closes.
_SEAL_ALL_BYTES = 1 << 50


class Broker(
    Administration,
    Archiving,
    Messaging,
    Consumers,
    LiteTopics,
    Reading,
    Background,
    Redriving,
    Sinks,
    Transactions,
    Failures,
    AccessControl,
):
    """An open broker. Every method may be called from any thread.

    Errors are those of rmq_pipeline.errors; one that is raised has changed nothing, unless it is
    a StorageError.
    """

    def __init__(self, engine: Engine, mode: Mode) -> None:
        super().__init__(engine)
        self._mode = mode
        self._started = time.monotonic()
        # What goes makes room for what comes.
        archive = (self.expire, lambda: self.seal(limit_bytes=_SEAL_ALL_BYTES), self.compact)
        self._upkeep = Upkeep(engine, mode, archive=archive)

    @classmethod
    def open(
        cls,
        home: Path | str,
        *,
        clock: Clock | None = None,
        upkeep: Mode = "self",
        flush: Literal["sync", "async"] = "sync",
        settings: Settings | None = None,
    ) -> Self:
        """Open a home, or begin one; what was answered before is there again.

        Args:
            upkeep: who does background work: this process, Dagster's runs, or nobody.
            flush: sync answers after the disk has it; async syncs every 500 ms.

        Raises:
            HomeLockedError: another process has it open.
            HomeFormatError: another version wrote it, in another format.
            CorruptLogError: the log is damaged; names the place.
        """
        chosen = settings or Settings()
        engine = Engine.open(Path(home), clock=clock or SystemClock(), settings=chosen, flush=flush)
        finish_burying(engine)
        return cls(engine, upkeep)

    def close(self) -> None:
        """Answer what is asked, end the background work, let the home go."""
        self._engine.arrivals.close()
        self._engine.members.close()
        self._upkeep.stop()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def writer(self) -> Writer:
        """The writer, for tests that put several requests into one frame."""
        return self._engine.writer

    @property
    def access(self) -> Access:
        """Who may do what at the doors."""
        return self._engine.access

    @property
    def engine(self) -> Engine:
        """The parts of the open broker."""
        return self._engine

    def status(self) -> dict[str, Any]:
        """What an operator asks first."""
        return queries.status(
            self._engine, self._started, mode=self._mode, fallback=self._upkeep.last_fallback
        )
