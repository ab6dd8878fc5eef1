"""Waiting for what another thread of the test's process does."""

import threading
import time
from collections.abc import Callable

#: Real seconds after which a wait for another thread is a failure.
PATIENCE_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the other thread never got there"
        pause.wait(0.001)
