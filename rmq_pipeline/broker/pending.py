"""Requests that wait for the writer, and where their answers go."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import override

from rmq_pipeline.broker.request import Request

log = logging.getLogger(__name__)


class Pending:
    """A request of somebody who waits for ``done``."""

    __slots__ = ("answer", "done", "error", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answer: Any = None
        self.error: BaseException | None = None
        # A bare lock is the cheapest way to hand one answer to one waiting thread.
        self.done = threading.Lock()
        self.done.acquire()

    def finish(self) -> None:
        """Let whoever waits have the answer, or the error."""
        self.done.release()


#: Is given the answer or the error, in the thread that wrote the frame: it must not wait.
Done = Callable[[Any, BaseException | None], None]


class Posted(Pending):
    """A request nobody waits for: its answer goes to a function."""

    __slots__ = ("tell",)

    def __init__(self, request: Request, tell: Done) -> None:
        self.request = request
        self.answer: Any = None
        self.error: BaseException | None = None
        self.tell = tell

    @override
    def finish(self) -> None:
        try:
            self.tell(self.answer, self.error)
        except Exception:
            log.exception("An answer found nobody; what it tells of is stored.")


def small_first(together: list[Pending]) -> int:
    """Let what is small go before bulk, if somebody waits for it; how many do.

    Who waits has asked for nothing else meanwhile, so that no order is lost. Requests that were
    posted stay in theirs.
    """
    if not is_bulk(together):
        return 0
    small = [p for p in together if not isinstance(p, Posted) and not p.request.is_bulk()]
    if small:
        first = set(map(id, small))
        together[:] = small + [p for p in together if id(p) not in first]
    return len(small)


def is_bulk(together: Iterable[Pending]) -> bool:
    """Whether one of them takes so long to decide that it should be done beside a write."""
    return any(pending.request.is_bulk() for pending in together)
