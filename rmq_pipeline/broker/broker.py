"""Façade with all verbs of an open broker, for endpoints, tests, notebooks and scripts."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa

from rmq_pipeline.access import Access
from rmq_pipeline.access.rights import Rights
from rmq_pipeline.broker.verbs import signature
from rmq_pipeline.broker.verbs.access import AccessControl
from rmq_pipeline.broker.verbs.administration import Administration
from rmq_pipeline.broker.verbs.archiving import Archiving
from rmq_pipeline.broker.verbs.background import Background
from rmq_pipeline.broker.verbs.consumers import Consumers
from rmq_pipeline.broker.verbs.declaration import declarations, verb
from rmq_pipeline.broker.verbs.failures import Failures
from rmq_pipeline.broker.verbs.messaging import Messaging
from rmq_pipeline.broker.verbs.reading import Reading
from rmq_pipeline.broker.verbs.sinks import Sinks
from rmq_pipeline.broker.verbs.transactions import Transactions
from rmq_pipeline.broker.work import queries
from rmq_pipeline.broker.work.dead_letter import finish_dead_lettering
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.measuring import Measuring
from rmq_pipeline.broker.work.timekeeping import BrokerClock
from rmq_pipeline.broker.work.upkeep import Mode, Upkeep
from rmq_pipeline.broker.work.writer import Writer
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RequestError
from rmq_pipeline.settings import Settings

#: Limit for the broker's own seal: it runs until nothing is due or the broker closes.
_SEAL_ALL_BYTES = 1 << 50
#: Verbs about the process, which a broker answers that does not know whether it leads its log.
_ANY_TIME = frozenset({"ping", "status", "metrics"})


class Broker(
    Administration,
    Archiving,
    Messaging,
    Consumers,
    Reading,
    Background,
    Sinks,
    Transactions,
    Failures,
    AccessControl,
):
    """Open broker; all methods are safe for all threads.

    Errors are those of rmq_pipeline.errors. A call that raises has changed nothing, unless the
    error is a StorageError.
    """

    def __init__(self, engine: Engine, mode: Mode) -> None:
        super().__init__(engine)
        self._mode = mode
        self._started = time.monotonic()
        self._measuring = Measuring(engine, mode=mode)
        # In this order, because expiry frees space for the others.
        archive = {
            "expire": self.expire,
            "seal": lambda: self.seal(limit_bytes=_SEAL_ALL_BYTES),
            "compact": self.compact,
        }
        self._upkeep = Upkeep(engine, mode, archive=archive, due=self.due)

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
        """Open a home, or create one; everything acknowledged before is there.

        Args:
            upkeep: self: this process does background work; dagster: Dagster's runs do,
                and the broker does what is overdue; none: nothing does it.
            flush: sync: answer after the sync; async: sync every 500 ms.

        Raises:
            HomeLockedError: another process has the home open.
            HomeFormatError: another version wrote it, in another format.
            CorruptLogError: the log is damaged; names the place.
        """
        chosen = settings or Settings()
        engine = Engine.open(Path(home), clock=clock or BrokerClock(), settings=chosen, flush=flush)
        finish_dead_lettering(engine)
        return cls(engine, upkeep)

    def call(self, verb: str, args: Mapping[str, Any]) -> Any:
        """Call a verb by its name.

        Raises:
            RequestError: the verb is unknown, or an argument has a wrong type.
        """
        if verb not in declarations(Broker):
            raise RequestError(f"There is no verb {verb!r}.")
        method = getattr(self, verb)
        signature.check(verb, method, args=args)
        if verb not in _ANY_TIME:
            self._engine.check_leads()
        return method(**args)

    def wind_down(self) -> None:
        """Wake all waiting calls, and end queries and background work; other calls continue.

        For endpoints, which answer the running calls before the home is closed.
        """
        self._engine.wakeups.close()
        self._engine.members.close()
        self._upkeep.stop()
        self._engine.database.stop_queries()

    def close(self) -> None:
        """Answer all requests, end the background work, and unlock the home."""
        self.wind_down()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def writer(self) -> Writer:
        """Writer, for tests that put several requests into one frame."""
        return self._engine.writer

    @property
    def access(self) -> Access:
        """Access control of the endpoints."""
        return self._engine.access

    @property
    def engine(self) -> Engine:
        """Parts of the open broker."""
        return self._engine

    @verb(rights=Rights(), repeatable=True, quick=True)
    def ping(self) -> dict[str, Any]:
        """Return {"pid"} of the broker's process; every authenticated caller may ask."""
        return {"pid": os.getpid()}

    @verb(rights=Rights(cluster="get"), repeatable=True)
    def status(self) -> dict[str, Any]:
        """Return versions, home, process, log positions, memory, counts and flags of the broker."""
        return queries.status(
            self._engine, self._started, mode=self._mode, fallback=self._upkeep.last_fallback
        )

    @verb(rights=Rights(cluster="get"), repeatable=True)
    def metrics(self) -> pa.Table:
        """Return samples of all metrics, as docs/metrics.md lists them; cheap enough for scrapes.

        Counters begin at 0 when the broker starts.

        Returns:
            name; type (counter, gauge or histogram); part (of a histogram: bucket, sum or count;
            else empty); labels; value; unit; help.
        """
        return self._measuring.samples()
