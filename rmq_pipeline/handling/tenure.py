"""The lease of a window: opened once, renewed by a thread of its own, lost for good."""

import logging
import threading
from types import TracebackType
from typing import Any, Final, Self

from rmq_pipeline.errors import FencedError, RocketMQError
from rmq_pipeline.handling.verbs import Fence, Verbs

logger = logging.getLogger(__name__)

#: A window outlives its process by this long.
LEASE_MS: Final = 15_000


class Tenure:
    """Being the one window of its name; a context manager that keeps the lease alive."""

    def __init__(self, verbs: Verbs, *, name: str, owner: str) -> None:
        self._verbs = verbs
        self._name = name
        self._owner = owner
        self._stop = threading.Event()
        self._lost = threading.Event()
        #: Held while the epoch changes, so that a renewal never shows the old one meanwhile.
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name=f"renew {name}", daemon=True)
        self.epoch = 0
        #: Whether the window before was never closed.
        self.follows_unclosed = False

    @property
    def owner(self) -> str:
        """Who this is: the id of the run, in Dagster."""
        return self._owner

    @property
    def fence(self) -> Fence:
        """Name and epoch, to be shown with every receive and settle."""
        return self._name, self.epoch

    @property
    def lost(self) -> bool:
        """Whether a newer window is known to have taken over."""
        return self._lost.is_set()

    def lose(self) -> None:
        """Note that a verb was fenced."""
        self._lost.set()

    def open(self, *, takeover: bool) -> str | None:
        """Open the window; the owner that has it when it is taken."""
        answer = self._open(takeover=takeover)
        if answer.get("yielded_to") == self._owner:
            # The answer to an earlier try got lost on the way.
            answer = self._open(takeover=True)
        if "yielded_to" in answer:
            return str(answer["yielded_to"])
        self.epoch = int(answer["epoch"])
        self.follows_unclosed = bool(answer.get("follows_unclosed"))
        return None

    def reopen(self) -> None:
        """A new epoch, which ends every delivery of the old one.

        Raises:
            FencedError: somebody else has taken over.
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
            # It ends by itself; the error that ended the window matters more.
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
            except Exception as error:  # noqa: BLE001 - the next try may have an answer
                logger.warning("window not renewed name=%s error=%s", self._name, error)
