"""Waiting for what another thread or process does."""

import threading
import time
from collections.abc import Callable
from typing import Final

#: Interval for polling another process, which sends no notice.
LOOK_S: Final = 0.005
#: A look that takes long, such as a query, takes the processor from what is waited for: the pause
#: after it is so many times as long, but no longer than this.
PAUSES: Final = 4
MOST_S: Final = 0.25

Told = str | Callable[[], str]


def until(condition: Callable[[], object], *, within_s: float = 60.0, what: Told = "") -> None:
    """Wait until a condition holds; fail after ``within_s``, and say ``what`` did not come.

    Args:
        what: a text, or what gives one at that moment.
    """
    give_up_at = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        looked_at = time.monotonic()
        if condition():
            return
        took_s = time.monotonic() - looked_at
        if looked_at + took_s >= give_up_at:
            said = what if isinstance(what, str) else what()
            missed = said or getattr(condition, "__qualname__", str(condition))
            raise AssertionError(f"not within {within_s:g} s: {missed}")
        pause.wait(min(max(LOOK_S, PAUSES * took_s), MOST_S))
