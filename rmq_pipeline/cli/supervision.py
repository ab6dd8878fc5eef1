"""Lock that makes one process at a time the supervisor of a home's broker."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.errors import HomeLockedError

#: Separate from the broker's lock: the supervisor holds it also while the broker is down.
LOCK_FILE: Final = "supervisor.lock"


class SupervisedError(HomeLockedError):
    """Another process supervises the broker of the home."""

    remedy = "Use that one, or stop it first with Ctrl-C where it runs."


class Supervision:
    """Lock of the home's supervisor; the system releases it when the process ends."""

    def __init__(self, lock: int) -> None:
        self._lock = lock

    @classmethod
    def begin(cls, home: Path) -> Self:
        """Lock the home against other supervisors; creates a missing home.

        Raises:
            SupervisedError: another supervisor has the lock; the error has its process id.
        """
        durable_files.make_folder(home)
        # Child processes do not inherit the descriptor: a broker that survives its supervisor
        # must not hold the lock.
        lock = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise SupervisedError(
                f"Process {holder} already supervises the broker of {home}."
            ) from None
        # The process id serves only that error message; a full disk must not prevent the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return cls(lock)

    def end(self) -> None:
        """Release the lock."""
        os.close(self._lock)
