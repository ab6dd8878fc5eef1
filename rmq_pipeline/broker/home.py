"""A broker's folder: opened by one process, of a format this version reads."""

import fcntl
import json
import os
from pathlib import Path
from typing import Final, Self

from rmq_pipeline.errors import HomeFormatError, HomeLockedError

FORMAT: Final = 4


class Home:
    """The folders of a home, and the lock that says it is ours."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.log = path / "log"
        self.database = path / "state.duckdb"
        self.topics = path / "topics"
        self.events = path / "events"
        self.handoff = path / "handoff"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock the home; a new one is made.

        Raises:
            HomeLockedError: another process has it; names it.
            HomeFormatError: another version wrote it, in another format.
        """
        path = path.absolute()
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise HomeLockedError(f"{path} is open in {_holder(path)}.") from error
        home = cls(path, lock)
        try:
            home._check_format()
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            for folder in (home.topics, home.events, home.handoff):
                folder.mkdir(exist_ok=True)
        except BaseException:
            home.close()
            raise
        return home

    def _check_format(self) -> None:
        file = self.path / "format"
        if not file.exists():
            file.write_text(f"{FORMAT}\n")
            return
        text = file.read_text().strip()
        if text != str(FORMAT):
            raise HomeFormatError(f"{self.path} has format {text!r}; this version reads {FORMAT}.")

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _holder(path: Path) -> str:
    """Who has the home open, as far as its files tell."""
    pid = (path / "lock").read_text().strip() or "unknown"
    try:
        endpoint = json.loads((path / "endpoint.json").read_text())
        return f"process {pid}, a broker at {endpoint.get('flight')}"
    except (OSError, ValueError):
        return f"process {pid}"
