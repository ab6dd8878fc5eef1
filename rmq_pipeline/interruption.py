"""Waiting for Ctrl-C or a request to end, without missing it."""

import os
import signal
from types import FrameType


class Interruption:
    """Comes with the first SIGINT or SIGTERM, or with ``set``; for the main thread.

    Python runs a handler in the main thread when that wakes, but a signal may be taken by another
    thread and so wake nobody. Its number, written to a pipe where it is taken, wakes the reader.
    """

    def __init__(self) -> None:
        """From now on the first signal does not end the process; a second Ctrl-C interrupts it."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def set(self) -> None:
        """End the wait; from any thread."""
        os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Return once it has come."""
        os.read(self._reader, 1)

    @staticmethod
    def _note(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
