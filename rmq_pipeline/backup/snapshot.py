"""A snapshot of a home: its database as of one log position, copied to a folder in the home.

The broker copies the file of a live home, because only it can keep the file from changing. Of a
home without a broker this process copies it, and holds the lock of the home meanwhile.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rmq_pipeline import durable_files
from rmq_pipeline.broker.work.home import ARCHIVE_FILE, FORMAT_FILE, FORMATS
from rmq_pipeline.broker.work.replicating import STORE_FILE
from rmq_pipeline.broker.work.state_copy import FILES, FOLDER, delete_copies, delete_copy
from rmq_pipeline.endpoint import LOCK_FILE
from rmq_pipeline.errors import BusyError, ConflictError, RequestError, StorageError
from rmq_pipeline.storage.place import at, opened
from rmq_pipeline.storage.root import Root, shown
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.stored_state import CopyFacts, finish_copy

#: Folders of the segments, and of the histories of keyed states.
TOPICS: Final = "topics"
_STATES: Final = "state"
#: In the home: locked by the backup that runs.
_LOCK: Final = "backup.lock"
#: Folder of the copy that the running backup reads. The broker leaves it alone.
_TAKEN: Final = ".state-backup"
#: Times that the broker is asked again because another caller replaced the copy.
_TRIES: Final = 5
#: Asks the live broker of the home for a copy; returns the answer of ``copy_state``.
AskBroker = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TakenSnapshot:
    """A copied database, its facts, and how long dispatch waited for the copy."""

    path: Path
    facts: CopyFacts
    waited_ms: float


@dataclass(frozen=True, slots=True)
class SourceHome:
    """A home to be backed up, and the archive of its segments."""

    path: Path
    id: str
    archive: Root

    @classmethod
    def open(cls, path: Path) -> "SourceHome":
        """Check that a folder is a home that can be backed up.

        Raises:
            RequestError: it is no home, or its log is in a store, or its archive cannot be opened.
        """
        path = path.absolute()
        try:
            text = (path / FORMAT_FILE).read_bytes().strip(b"\0 \n").decode(errors="replace")
            said = durable_files.load_json((path / ARCHIVE_FILE).read_bytes())
            home_id, address = str(said["id"]), said["root"]
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                f"{path} is no home of a broker, or cannot be read: {error}.",
                remedy="Give --home, and run the command as the user of the broker.",
            ) from error
        if text == "restoring":
            raise RequestError(
                f"{path} is an incomplete restore.", remedy="Delete it, and restore it again."
            )
        if text not in FORMATS:
            raise RequestError(
                f"{path} has format {text!r}; this version reads {' and '.join(FORMATS)}.",
                remedy="Use the version of rmq_pipeline that wrote it.",
            )
        if (path / STORE_FILE).exists():
            raise RequestError(
                f"The log of {path} is in log_store: the home alone is no backup.",
                remedy="Back up the database, bucket or stream of log_store.",
            )
        try:
            archive = opened(path / "topics") if address is None else at(address)
        except (ValueError, OSError) as error:
            raise RequestError(
                f"The archive {shown(address)} cannot be opened: {error}.",
                remedy="Set the variables by which the broker opens it.",
            ) from error
        return cls(path, home_id, archive)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other backups of the home away, and delete the snapshot at the end.

        Raises:
            ConflictError: another backup of the home is running.
        """
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConflictError(
                    f"Another backup of {self.path} is running.", remedy="Wait until it has ended."
                ) from error
            try:
                yield
            finally:
                delete_copy(self.path / _TAKEN)
        finally:
            os.close(lock)

    def check_outside(self, folder: Path) -> None:
        """Refuse a folder in the home, where files of backups or forks could be taken for its own.

        Raises:
            RequestError: it is the home, or in it, or has it in it.
        """
        home, place = self.path.resolve(), folder.resolve()
        if place.is_relative_to(home) or home.is_relative_to(place):
            raise RequestError(
                f"{folder} is in the home {self.path}, or has it in it.",
                remedy="Give a folder outside of the home, best on another disk.",
            )

    def snapshot(self, ask_broker: AskBroker) -> TakenSnapshot:
        """Copy the database.

        Raises:
            StorageError: the copy cannot be made or read.
            BrokerUnavailableError: the broker of the home does not answer.
            RocketMQError: the broker refuses.
        """
        taken = self.path / _TAKEN
        delete_copy(taken)  # of a backup that was killed
        position: int | None = None
        waited_ms = 0.0
        lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                answer = self._fetch(ask_broker, taken)
                position, waited_ms = int(answer["position"]), float(answer["waited_ms"])
            else:
                delete_copies(self.path)  # of a broker that has died
                self._copy_closed(taken)
        finally:
            os.close(lock)
        try:
            facts = finish_copy(taken / FILE_NAME)
        except ValueError as error:
            raise StorageError(f"The copy of the state cannot be read: {error}.") from error
        if position not in {None, facts.dispatched} or (taken / FILES[1]).exists():
            raise StorageError(
                f"The copy of the state is at log position {facts.dispatched}, and the broker"
                f" copied {position}.",
                remedy="Repeat the command.",
            )
        return TakenSnapshot(taken / FILE_NAME, facts, waited_ms)

    def _fetch(self, ask_broker: AskBroker, taken: Path) -> dict[str, Any]:
        """Let the broker copy the database, and take the copy out of the way of other callers."""
        for _ in range(_TRIES):
            answer = ask_broker()
            folder = self.path / FOLDER / str(answer["folder"])
            try:
                folder.rename(taken)
            except FileNotFoundError:  # another caller has replaced it
                continue
            return answer
        raise ConflictError(
            f"Other callers of copy_state replace the copies of {self.path}.",
            remedy="Repeat the command when no other one calls copy_state.",
        )

    def keyed_states(self, sealed_to: int) -> list[Path]:
        """Return the files of the histories of keyed states up to a log position.

        Raises:
            FileNotFoundError: files were merged or have expired meanwhile.
        """
        found = sorted((self.path / _STATES).glob("*/*-*.parquet"))
        # A folder that is listed while files are merged may show neither the old nor the new one.
        if found != sorted((self.path / _STATES).glob("*/*-*.parquet")):
            raise FileNotFoundError(errno.ENOENT, "merged meanwhile", str(self.path / _STATES))
        paths = []
        for path in found:
            start, end = (int(each) for each in path.stem.split("-"))
            if start < sealed_to < end:
                raise FileNotFoundError(errno.ENOENT, "merged meanwhile", str(path))
            if start < sealed_to:  # the others are written again from the log
                paths.append(path)
        return paths

    def _copy_closed(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        for name in FILES:
            try:
                source = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                durable_files.copy_open(source, folder / name)
            finally:
                os.close(source)


def no_broker() -> dict[str, Any]:
    """Refuse a home that is open in a process without an address."""
    raise BusyError(
        "A process has the home open, and serves no endpoint.", remedy="Wait until it has ended."
    )
