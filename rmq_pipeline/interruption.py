"""Waiting for Ctrl-C or a stop request without missing one."""

import os
import signal
from types import FrameType


class Interruption:
    """A stop request: the first SIGINT or SIGTERM, or ``set``. Used in the main thread.

    Python runs signal handlers when the main thread wakes, but the system may deliver a signal to
    another thread, which wakes nothing. The wakeup pipe wakes the reader in both cases.
    """

    def __init__(self) -> None:
        """Install the handlers: the first signal only ends the wait, a second Ctrl-C interrupts."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def set(self) -> None:
        """End the wait; may be called from any thread."""
        os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Wait for the stop request."""
        os.read(self._reader, 1)

    @staticmethod
    def _note(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
