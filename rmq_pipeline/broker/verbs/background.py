"""Background work, bounded and idempotent, and the windows that share it out."""

from typing import Any

from rmq_pipeline import limits
from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.failures.reviving import revive
from rmq_pipeline.broker.progress import Due
from rmq_pipeline.broker.scheduling.delivering import deliver_scheduled
from rmq_pipeline.broker.stored import ripe, seal, tending
from rmq_pipeline.broker.verbs.opened import Opened, Window
from rmq_pipeline.broker.windows import CloseWindow, OpenWindow, RenewWindow


class Background(Opened):
    """What runs do: scheduled delivery, revive, seal."""

    def due(self) -> dict[str, Any]:
        """What background work is due, and which groups have something to receive."""
        answer: dict[str, Any] = self._engine.submit(Due(self._engine.unburied.offsets()))
        answer["jobs"]["seal"].update(ripe.due(self._engine))
        for job, facts in tending.due(self._engine).items():
            answer["jobs"][job].update(facts)
        return answer

    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool = False
    ) -> dict[str, Any]:
        """Become the one who does this work: epoch, or yielded_to whoever does.

        A new epoch of consumer/<group> ends the leases of the older ones at once.
        """
        who = arguments.text(name, "A window's name"), arguments.text(owner, "owner")
        answer: dict[str, Any] = self._engine.submit(OpenWindow(*who, duration_ms, takeover))
        return answer

    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Hold it for longer; FencedError when somebody took over."""
        answer: dict[str, Any] = self._engine.submit(RenewWindow(name, epoch, duration_ms))
        return answer

    def close_window(self, name: str, *, epoch: int) -> None:
        """Let the next one begin."""
        self._engine.submit(CloseWindow(name, epoch))

    def deliver_scheduled(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Deliver what is due now and within ``wait_ms``, each to the millisecond; a report."""
        wait = arguments.poll_ms(wait_ms)
        return deliver_scheduled(self._engine, wait_ms=wait, limit=limit, window=window)

    def revive(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Record leases that have ended, bury what has no attempt left; a report."""
        wait = arguments.poll_ms(wait_ms)
        return revive(self._engine, wait_ms=wait, limit=limit, window=window)

    def seal(
        self, *, limit_bytes: int = limits.LOG_FILE_BYTES, window: Window | None = None
    ) -> dict[str, Any]:
        """Write old log into Parquet segments and drop it; a report."""
        return seal.seal(self._engine, limit_bytes=limit_bytes, window=window)
