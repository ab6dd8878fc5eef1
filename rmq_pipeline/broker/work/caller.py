"""The caller of a verb, which may go away while the verb waits.

An endpoint calls a verb inside ``watching``. A verb that waits wakes at ``look_at_ms`` at the
latest. It ends without taking anything once ``waits_no_more`` returns True. Callers in this process
never go away.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from rmq_pipeline.clock import Clock

#: Time between two checks for the caller.
LOOK_MS: Final = 1_000


class _Watched(NamedTuple):
    is_gone: Callable[[], bool]
    is_closing: Callable[[], bool]


_watched: ContextVar[_Watched | None] = ContextVar("watched", default=None)


@contextmanager
def watching(
    is_gone: Callable[[], bool], *, is_closing: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Let verbs that wait in this block end early.

    Args:
        is_gone: returns True once the connection of the caller is lost.
        is_closing: returns True once the endpoint stops; its callers are still there.
    """
    token = _watched.set(_Watched(is_gone, is_closing))
    try:
        yield
    finally:
        _watched.reset(token)


def is_gone() -> bool:
    """Return True if the connection of the running verb's caller is lost."""
    watched = _watched.get()
    return watched is not None and watched.is_gone()


def waits_no_more() -> bool:
    """Return True if the running verb must not wait any longer, nor take anything."""
    watched = _watched.get()
    return watched is not None and (watched.is_closing() or watched.is_gone())


def look_at_ms(clock: Clock, at_ms: int) -> int:
    """Return the time until which a verb may wait that would wait until ``at_ms``."""
    return at_ms if _watched.get() is None else min(at_ms, clock.now_ms() + LOOK_MS)
