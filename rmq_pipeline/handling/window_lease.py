"""The lease of a window: opened once, renewed by a thread of its own; once lost, it stays lost."""

import logging
import threading
from types import TracebackType
from typing import Any, Final, Self

from rmq_pipeline.errors import FencedError, RocketMQError
from rmq_pipeline.verb import Window as Fence
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

#: A window's lease ends this long after its process has died.
LEASE_MS: Final = 15_000


class WindowLease:
    """The lease of the one open window of a name; a context manager that renews it."""

    def __init__(self, verbs: Verbs, *, name: str, owner: str) -> None:
        self._verbs = verbs
        self._name = name
        self._owner = owner
        self._stop = threading.Event()
        self._lost = threading.Event()
        #: Held while the epoch changes, so that no renewal uses the old epoch meanwhile.
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name=f"renew {name}", daemon=True)
        self.epoch = 0
        #: True if the previous window was never closed.
        self.follows_unclosed = False

    @property
    def owner(self) -> str:
        """Owner of the window: in Dagster, the run's id."""
        return self._owner

    @property
    def fence(self) -> Fence:
        """Name and epoch, sent with every receive and settle."""
        return self._name, self.epoch

    @property
    def lost(self) -> bool:
        """True if a newer window is known to have taken over."""
        return self._lost.is_set()

    def lose(self) -> None:
        """Record that a verb was fenced."""
        self._lost.set()

    def open(self, *, takeover: bool) -> str | None:
        """Open the window; if it is taken, return the present owner."""
        answer = self._open(takeover=takeover)
        if answer.get("yielded_to") == self._owner:
            # The answer to an earlier attempt was lost.
            answer = self._open(takeover=True)
        if "yielded_to" in answer:
            return str(answer["yielded_to"])
        self.epoch = int(answer["epoch"])
        self.follows_unclosed = bool(answer.get("follows_unclosed"))
        return None

    def reopen(self) -> None:
        """Open the window with a new epoch, which ends every delivery of the old one.

        Raises:
            FencedError: another owner has taken over.
        """
        with self._changing:
            self._verbs.renew_window(self._name, epoch=self.epoch, duration_ms=LEASE_MS)
            self.epoch = int(self._open(takeover=True)["epoch"])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self.lost:
            return
        try:
            self._verbs.close_window(self._name, epoch=self.epoch)
        except RocketMQError as failure:
            # The lease expires by itself; the error that ended the window matters more.
            logger.warning("window not closed name=%s error=%s", self._name, failure)

    def _open(self, *, takeover: bool) -> dict[str, Any]:
        return self._verbs.open_window(
            self._name, owner=self._owner, duration_ms=LEASE_MS, takeover=takeover
        )

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_MS / 3000):
            try:
                with self._changing:
                    self._verbs.renew_window(self._name, epoch=self.epoch, duration_ms=LEASE_MS)
            except FencedError:
                self.lose()
                return
            except Exception as error:  # noqa: BLE001 - the next renewal may succeed
                logger.warning("window not renewed name=%s error=%s", self._name, error)
