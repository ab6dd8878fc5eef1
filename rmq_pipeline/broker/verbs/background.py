"""Verbs: background work and windows."""

from typing import Any

from rmq_pipeline import limits
from rmq_pipeline.access.rights import UPKEEP, Rights
from rmq_pipeline.broker.decide.background import CloseWindow, Due, OpenWindow, RenewWindow
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import archiving, arguments, seal
from rmq_pipeline.broker.work.redelivery import revive
from rmq_pipeline.broker.work.schedule import deliver_scheduled
from rmq_pipeline.verb import Window


class Background(Opened):
    """Verbs for background work and windows."""

    @verb(rights=Rights(cluster="get"), repeatable=True)
    def due(self) -> dict[str, Any]:
        """Return the due work of each upkeep job, and what each group can receive of each topic."""
        answer: dict[str, Any] = self._engine.submit(
            Due(self._engine.dead_letter_failures.offsets())
        )
        answer["jobs"]["seal"].update(seal.due(self._engine))
        for job, facts in archiving.due(self._engine).items():
            answer["jobs"][job].update(facts)
        return answer

    @verb(rights=Rights(window=True), repeatable=True)
    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool = False
    ) -> dict[str, Any]:
        """Open the only window of this name (``upkeep/<job>`` or ``consumer/<group>``).

        Args:
            name: name of the window.
            owner: identifies the caller; its own window is opened again.
            duration_ms: the window ends then unless it is renewed.
            takeover: end another owner's window; its leases end at once.

        Returns:
            {"epoch"}, or {"yielded_to", "epoch", "expires_at_ms"} if another owner has it.
        """
        who = arguments.text(name, "A window's name"), arguments.text(owner, "owner")
        answer: dict[str, Any] = self._engine.submit(OpenWindow(*who, duration_ms, takeover))
        return answer

    @verb(rights=Rights(window=True), repeatable=True)
    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Let the window end ``duration_ms`` from now.

        Raises:
            FencedError: a newer window has taken over.
        """
        answer: dict[str, Any] = self._engine.submit(RenewWindow(name, epoch, duration_ms))
        return answer

    @verb(rights=Rights(window=True), repeatable=True)
    def close_window(self, name: str, *, epoch: int) -> None:
        """End a window, so that the next one can open."""
        self._engine.submit(CloseWindow(name, epoch))

    @verb(rights=UPKEEP, repeatable=True)
    def deliver_scheduled(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Move due scheduled messages to their topics, each at its millisecond.

        Args:
            wait_ms: deliver messages that come due within this time, too.
            limit: number of messages at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"delivered", "dropped", "per_level", "lateness_ms": {"p50", "p99", "max"},
            "next_due_ms"}; the keys of per_level are text.
        """
        wait = arguments.poll_ms(wait_ms)
        return deliver_scheduled(self._engine, wait_ms=wait, limit=limit, window=window)

    @verb(rights=UPKEEP, repeatable=True)
    def revive(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Record ended leases, and dead-letter or park messages without attempts left.

        Args:
            wait_ms: wait this long for the first lease to end.
            limit: number of leases at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"revived", "parked", "dead_lettered", "next_visible_ms", "dead_letter_failures"}. The
            last one counts exhausted messages that cannot be read or copied now.
        """
        wait = arguments.poll_ms(wait_ms)
        return revive(self._engine, wait_ms=wait, limit=limit, window=window)

    @verb(rights=UPKEEP, repeatable=True)
    def seal(
        self, *, limit_bytes: int = limits.LOG_FILE_BYTES, window: Window | None = None
    ) -> dict[str, Any]:
        """Write old log files into Parquet segments and delete log files that are not needed.

        Args:
            limit_bytes: of log to write.
            window: refuse the call when this window has been taken over.

        Returns:
            {"segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files"}.
        """
        return seal.seal(self._engine, limit_bytes=limit_bytes, window=window)
