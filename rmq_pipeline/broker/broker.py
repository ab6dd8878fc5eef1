"""Façade with all verbs of an open broker, for endpoints, tests, notebooks and scripts."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

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
from rmq_pipeline.broker.work import queries, state_copy
from rmq_pipeline.broker.work.dead_letter import finish_dead_lettering
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.following import Follower
from rmq_pipeline.broker.work.measuring import Measuring
from rmq_pipeline.broker.work.timekeeping import BrokerClock
from rmq_pipeline.broker.work.upkeep import Mode, Upkeep
from rmq_pipeline.broker.work.writer import Writer
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import ConflictError, RequestError, StandbyError
from rmq_pipeline.settings import Settings

#: Limit for the broker's own seal: it runs until nothing is due or the broker closes.
_SEAL_ALL_BYTES = 1 << 50
#: Verbs about the process, which a broker answers that does not know whether it leads its log.
_ANY_TIME = frozenset({"ping", "status", "metrics", "promote"})
#: Longest wait of a promotion for its end.
_PROMOTION_S: Final = 30.0


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
        self._archive = archive
        self._leading = threading.Event()
        self._when_leading: list[Callable[[], None]] = []
        self._following = threading.Lock()
        self._follower: Follower | None = None
        if engine.followed is None:
            self._begin()
        else:
            self._upkeep = self._upkeep_of("none")
            self._follower = Follower(engine, on_leading=self._begin)

    def _upkeep_of(self, mode: Mode) -> Upkeep:
        return Upkeep(self._engine, mode, archive=self._archive, due=self.due)

    def _begin(self) -> None:
        """Finish what the last leader had begun, and do background work from now on."""
        finish_dead_lettering(self._engine)
        self._upkeep = self._upkeep_of(self._mode)
        with self._following:
            self._leading.set()
            calls, self._when_leading = self._when_leading, []
        for call in calls:
            call()

    def when_leading(self, call: Callable[[], None]) -> None:
        """Call a function once this broker leads; at once if it does."""
        with self._following:
            if not self._leading.is_set():
                self._when_leading.append(call)
                return
        call()

    @property
    def is_standby(self) -> bool:
        """Return True if this broker is a standby, which answers reads only."""
        return not self._leading.is_set()

    @classmethod
    def open(
        cls,
        home: Path | str,
        *,
        clock: Clock | None = None,
        upkeep: Mode = "self",
        flush: Literal["sync", "async"] = "sync",
        settings: Settings | None = None,
        standby: bool = False,
    ) -> Self:
        """Open a home, or create one; everything acknowledged before is there.

        Args:
            upkeep: self: this process does background work; dagster: Dagster's runs do,
                and the broker does what is overdue; none: nothing does it.
            flush: sync: answer after the sync; async: sync every 500 ms.
            standby: if another broker leads the log of ``log_store``, follow it, answer reads,
                and begin to lead once it has gone.

        Raises:
            HomeLockedError: another process has the home open.
            HomeFormatError: another version wrote it, in another format.
            CorruptLogError: the log is damaged; names the place.
        """
        chosen = settings or Settings()
        engine = Engine.open(
            Path(home),
            clock=clock or BrokerClock(),
            settings=chosen,
            flush=flush,
            standby=standby,
        )
        state_copy.delete_copies(engine.home.path)  # for a caller that has lost its broker
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
        self.check_serves(verb)
        return method(**args)

    def check_serves(self, verb: str, *, leader_only: bool = False) -> None:
        """Check that this broker answers a verb now.

        Args:
            leader_only: the caller wants the answer of the broker that leads.

        Raises:
            StandbyError: this broker is a standby, or may not lead any more.
            LogFencedError: another broker leads.
            LogStoreError: the store does not answer, and the lease is over.
        """
        replication = self._engine.replication
        if self._leading.is_set():
            if leader_only and replication is not None and not replication.lease_runs:
                raise StandbyError(
                    "This broker may not lead any more: its lease of the log is over.",
                    remedy="Call the broker that leads, or check log_store.",
                )
            if verb not in _ANY_TIME:
                self._engine.check_leads()
            return
        if verb == "promote":
            return
        if leader_only or not declarations(Broker)[verb].on_standby:
            followed = self._engine.followed
            leader = f" {followed.leader} leads." if followed is not None else ""
            raise StandbyError(f"This broker is a standby.{leader}")

    def wind_down(self) -> None:
        """Wake all waiting calls, and end queries and background work; other calls continue.

        For endpoints, which answer the running calls before the home is closed.
        """
        self._engine.wakeups.close()
        self._engine.members.close()
        if self._follower is not None:
            self._follower.stop()
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

    @verb(rights=Rights(cluster="update"))
    def promote(self, *, force: bool = False) -> dict[str, Any]:
        """Let a standby begin to lead; return {"role", "epoch"} once it does.

        Args:
            force: begin also while another broker leads. That one ends, and has answered nothing
                that is not stored, if its setting replication is sync. With async, its last
                answers may be lost.

        Raises:
            ConflictError: this broker is no standby.
            LogHeldError: another broker leads.
            LogStoreError: the store does not answer in time; the standby goes on trying.
        """
        if self._follower is None or self._leading.is_set():
            raise ConflictError("This broker is no standby.")
        self._follower.promote(force=force, timeout_s=_PROMOTION_S)
        replication = self._engine.replication
        return {"role": "leader", "epoch": replication.store.epoch if replication else 0}

    @verb(rights=Rights(), repeatable=True, quick=True, on_standby=True)
    def ping(self) -> dict[str, Any]:
        """Return {"pid"} of the broker's process; every authenticated caller may ask."""
        return {"pid": os.getpid()}

    @verb(rights=Rights(cluster="get"), repeatable=True, on_standby=True)
    def status(self) -> dict[str, Any]:
        """Return versions, home, process, log positions, memory, counts and flags of the broker."""
        return queries.status(
            self._engine, self._started, mode=self._mode, fallback=self._upkeep.last_fallback
        )

    @verb(rights=Rights(cluster="get"), repeatable=True, on_standby=True)
    def metrics(self) -> pa.Table:
        """Return samples of all metrics, as docs/metrics.md lists them; cheap enough for scrapes.

        Counters begin at 0 when the broker starts.

        Returns:
            name; type (counter, gauge or histogram); part (of a histogram: bucket, sum or count;
            else empty); labels; value; unit; help.
        """
        return self._measuring.samples()
