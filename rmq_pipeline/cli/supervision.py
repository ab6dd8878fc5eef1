"""Who keeps the broker of a home running: one process at a time."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final, Self

from rmq_pipeline.errors import HomeLockedError

#: Beside the broker's own lock: a broker may die, and its supervisor keeps this one.
LOCK_FILE: Final = "supervisor.lock"


class SupervisedError(HomeLockedError):
    """Another process keeps the broker of the home running, and would lose it to a second one."""

    remedy = "Use that one, or end it first with Ctrl-C where it runs."


class Supervision:
    """The lock that says who keeps a home's broker; it goes with its process, however that ends."""

    def __init__(self, lock: int) -> None:
        self._lock = lock

    @classmethod
    def begin(cls, home: Path) -> Self:
        """Lock the home against other supervisors; a new home is made.

        Raises:
            SupervisedError: another supervisor has it; names its process.
        """
        home.mkdir(parents=True, exist_ok=True)
        # Python closes it in whatever this process starts: a broker that is left running when its
        # supervisor is killed must not keep the next one out.
        lock = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise SupervisedError(
                f"Process {holder} keeps the broker of {home} running already."
            ) from None
        # Only for that sentence, which a full disk may do without.
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return cls(lock)

    def end(self) -> None:
        """Let another supervisor have the home."""
        os.close(self._lock)
