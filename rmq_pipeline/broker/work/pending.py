"""Requests that wait for the writer, and the delivery of their answers."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import override

from rmq_pipeline.broker.decide.request import Request

log = logging.getLogger(__name__)


class Pending:
    """Request whose caller waits for ``done``."""

    __slots__ = ("answer", "done", "error", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answer: Any = None
        self.error: BaseException | None = None
        # A bare lock is the cheapest way to pass one answer to one waiting thread.
        self.done = threading.Lock()
        self.done.acquire()

    def finish(self) -> None:
        """Release the answer or error to the caller."""
        self.done.release()


#: Called with the answer or error in the thread that wrote the frame; it must not wait.
Done = Callable[[Any, BaseException | None], None]


class Posted(Pending):
    """Request without a waiting caller: a function gets its answer."""

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
            log.exception("A caller could not be told its answer; the request is stored.")


def small_first(together: list[Pending]) -> int:
    """Move small requests with a waiting caller to the front, before bulk; return how many.

    A waiting caller has no other request in the queue, so no order is lost. Posted requests keep
    their order.
    """
    if not is_bulk(together):
        return 0
    small = [p for p in together if not isinstance(p, Posted) and not p.request.is_bulk()]
    if small:
        first = set(map(id, small))
        together[:] = small + [p for p in together if id(p) not in first]
    return len(small)


def is_bulk(together: Iterable[Pending]) -> bool:
    """Return True if deciding one of them is slow enough that it should overlap a write."""
    return any(pending.request.is_bulk() for pending in together)
