"""History files of a log that is in a store: in the root of its archive, for all its homes.

The log names a file by its path in the home, such as ``events/<from>-<to>-<epoch>.parquet``. The
same file is in the root below ``.history/``. A leader puts it there before it registers the file.
Other homes fetch it when they need it. The epoch is that of the leader that wrote the file, so no
two leaders write the same name, and a leader deletes no file of a later epoch.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rmq_pipeline import durable_files
from rmq_pipeline.errors import StorageError
from rmq_pipeline.storage.root import Root

#: In the root. No topic has files directly in a folder that is not a number.
FOLDER: Final = ".history"
#: In the home: files that are being fetched.
_FETCHING: Final = ".fetching"
_PIECE_BYTES: Final = 4 << 20


def name_of(first: str, *, epoch: int) -> str:
    """Return the name of a history file; ``epoch`` is 0 if only one home has the log."""
    return f"{first}-{epoch}.parquet" if epoch else f"{first}.parquet"


class SharedHistory:
    """The history files of a log in the root of its archive. Thread-safe."""

    def __init__(self, root: Root, home: Path) -> None:
        self._root, self._home = root, home
        self._lock = threading.Lock()
        #: When each file in the root was first seen unregistered.
        self._since: dict[str, float] = {}
        shutil.rmtree(home / _FETCHING, ignore_errors=True)  # of a process that died

    def put(self, path: str) -> None:
        """Copy a file of the home to the root, durably.

        Raises:
            OSError: writing failed.
        """
        target = f"{FOLDER}/{path}"
        unfinished = f"{target}.{secrets.token_hex(4)}.new"
        with (self._home / path).open("rb") as source, self._root.create(unfinished) as file:
            while piece := source.read(_PIECE_BYTES):
                file.write(piece)
        self._root.sync(unfinished)
        self._root.rename(unfinished, target)
        self._root.sync_folders([target.rpartition("/")[0]])

    @property
    def root(self) -> Root:
        """The root of the archive."""
        return self._root

    def paths(self) -> set[str]:
        """Return the paths of all files in the root's folder, as the log names them."""
        return {path.removeprefix(f"{FOLDER}/") for path in self._root.files(FOLDER)}

    def fetch(self, path: str) -> None:
        """Copy a file of the root to the home, unless the home has it.

        Raises:
            StorageError: the root lacks it, or cannot be read, or the disk is full.
        """
        if (self._home / path).exists():
            return
        with self._lock:
            if (self._home / path).exists():
                return
            try:
                self._copy(path)
            except OSError as error:
                raise StorageError(
                    f"{path} is not in the home, and cannot be read from {self._root}: {error}.",
                    remedy="Check the setting archive_root, and its store.",
                ) from error

    def _copy(self, path: str) -> None:
        source = f"{FOLDER}/{path}"
        unfinished = self._home / _FETCHING / secrets.token_hex(8)
        unfinished.parent.mkdir(exist_ok=True)
        try:
            with self._root.open(source) as file, unfinished.open("wb") as target:
                while piece := file.read(_PIECE_BYTES):
                    target.write(piece)
            if unfinished.stat().st_size != self._root.size(source):
                raise OSError("the copy has another size")
            durable_files.make_folder((self._home / path).parent)
            durable_files.publish(unfinished, self._home / path)
        finally:
            unfinished.unlink(missing_ok=True)

    def sweep(self, registered: Collection[str], *, epoch: int, grace_s: float) -> list[str]:
        """Delete files in the root that have not counted for some time; return their paths.

        A standby that lags may still need one, hence the grace. A leader that was fenced without
        noticing it deletes files of its own and earlier epochs only. No later leader registers
        such a file.

        Args:
            registered: paths of the files that the log registers, once all is dispatched.
            epoch: of the leader that calls.
            grace_s: since a file was first seen unregistered.
        """
        with self._lock:
            now = time.monotonic()
            listed = [
                *self._root.files(f"{FOLDER}/events"),
                *self._root.files(f"{FOLDER}/snapshots"),
            ]
            found = {
                path
                for path in listed
                if path.removeprefix(f"{FOLDER}/") not in registered
                and _epoch_of(path) in range(1, epoch + 1)
            }
            self._since = {path: self._since.get(path, now) for path in found}
            gone = sorted(path for path in found if now - self._since[path] >= grace_s)
            for path in gone:
                self._root.delete(path)
                del self._since[path]
            return gone


def _epoch_of(path: str) -> int:
    """Return the epoch in a file's name; 0 if there is none."""
    name = path.rpartition("/")[2].partition(".")[0]
    last = name.rpartition("-")[2] if "-" in name else ""
    return int(last) if last.isdecimal() else 0
