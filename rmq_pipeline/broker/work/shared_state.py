"""A copy of the state in the archive of a log, from which a home begins without the whole log.

The copy is ``state.duckdb`` as of a log position, and the history of keyed states up to where the
log is sealed then. The files are below ``.history/state/<position>-<token>-<epoch>/`` in the
root. No copy is ever written to a folder that has one: the store of the log may name it, even if
the leader got no answer. The store names the copy that counts, so a fenced leader cannot replace
it. Frames before ``sealed_to`` may be missing in the store.
"""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from rmq_pipeline import durable_files
from rmq_pipeline.archive.shared_history import FOLDER, SharedHistory
from rmq_pipeline.errors import ArchiveError, StorageError
from rmq_pipeline.storage.root import Root
from rmq_pipeline.store.database import FILE_NAME

#: In the store of the log: the copy that counts.
NAME: Final = "state.json"
_STATE: Final = f"{FOLDER}/state"
_STATES: Final = "state"
#: In the home: a copy of the database that is being made.
COPYING: Final = ".copying"
#: In the home: exists until a home that began with a copy has the log of the store.
_MARK: Final = "begins_with_copy"
_PIECE_BYTES: Final = 4 << 20


class StateCopy(NamedTuple):
    """A copy of the state."""

    #: The position of the database.
    position: int
    #: All that was before is in segments and history files.
    sealed_to: int
    #: Folder below ``.history/state/``.
    folder: str
    #: Path in the home, size and SHA-256 of each file.
    files: tuple[tuple[str, int, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the copy as JSON."""
        return {**self._asdict(), "files": [list(each) for each in self.files]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "StateCopy":
        """Return the copy from the result of ``to_json``."""
        files = tuple((str(path), int(size), str(sha)) for path, size, sha in found["files"])
        return cls(int(found["position"]), int(found["sealed_to"]), str(found["folder"]), files)


def store(root: Root, *, home: Path, database: Path, at: tuple[int, int], epoch: int) -> StateCopy:
    """Write a copy to the root; it counts once the store of the log names it.

    Args:
        root: of the archive.
        home: whose history of keyed states is complete up to where the log is sealed.
        database: a copy of its database.
        at: position of the database, and up to where the log is sealed in it.
        epoch: of the leader that calls.

    Raises:
        OSError: writing failed.
    """
    position, sealed_to = at
    folder = f"{position:020d}-{secrets.token_hex(4)}-{epoch}"
    sources = {FILE_NAME: database}
    for path in sorted((home / _STATES).glob("*/*-*.parquet")):
        if int(path.name.partition("-")[0]) < sealed_to:  # others are written from the log
            sources[path.relative_to(home).as_posix()] = path
    files = []
    for name, source in sources.items():
        target = f"{_STATE}/{folder}/{name}"
        checked = hashlib.sha256()
        with source.open("rb") as file, root.create(target) as writing:
            while piece := file.read(_PIECE_BYTES):
                checked.update(piece)
                writing.write(piece)
        root.sync(target)
        files.append((name, root.size(target), checked.hexdigest()))
    root.sync_folders({f"{_STATE}/{folder}/{name}".rpartition("/")[0] for name in sources})
    return StateCopy(position, sealed_to, folder, tuple(files))


def delete_others(root: Root, kept: Collection[str], *, epoch: int) -> None:
    """Delete copies that no store names any more, but for those of later leaders."""
    for folder in root.folders(_STATE):
        own = folder.rpartition("-")[2]
        if folder not in kept and own.isdecimal() and int(own) <= epoch:
            for path in root.files(f"{_STATE}/{folder}"):
                root.delete(path)


class _Named(Protocol):
    """A log in a store that names a copy."""

    copy: StateCopy | None


def begin(home: Path, history: SharedHistory | None, *, log: _Named | None) -> int | None:
    """Let an empty home begin with the copy that its log has; return where its log begins.

    Returns:
        None: the home is not empty, or there is no copy.

    Raises:
        ArchiveError: the settings name no archive.
        StorageError: the copy cannot be read, or is damaged.
    """
    shutil.rmtree(home / COPYING, ignore_errors=True)  # of a process that died
    mark, frames = home / _MARK, home / "log"
    copy = log.copy if log is not None else None
    if copy is None or (not mark.exists() and any(frames.glob("*.log"))):
        return None
    if history is None:
        raise ArchiveError("The log begins with a copy of the state in its archive.")
    durable_files.replace(mark, b"")
    for folder in (frames, home / _STATES):
        shutil.rmtree(folder, ignore_errors=True)
    for name in (FILE_NAME, f"{FILE_NAME}.wal"):
        (home / name).unlink(missing_ok=True)
    for name, size, sha in copy.files:
        try:
            source = f"{_STATE}/{copy.folder}/{name}"
            _fetch(history.root, source, target=home / name, of=(size, sha))
        except OSError as error:
            raise StorageError(
                f"The copy of the state in {history.root} cannot be read: {error}.",
                remedy="Check the setting archive_root, and its store; then start again.",
            ) from error
    return copy.sealed_to


def has_begun(home: Path) -> None:
    """Record that the home has the log of the store from now on."""
    with suppress(FileNotFoundError):
        (home / _MARK).unlink()
        durable_files.sync(home)


def _fetch(root: Root, source: str, *, target: Path, of: tuple[int, str]) -> None:
    durable_files.make_folder(target.parent)
    unfinished = target.with_name(f".{target.name}.fetched")
    checked, size = hashlib.sha256(), 0
    with root.open(source) as file, unfinished.open("wb") as writing:
        while piece := file.read(_PIECE_BYTES):
            checked.update(piece)
            size += writing.write(piece)
    if (size, checked.hexdigest()) != of:
        unfinished.unlink()
        raise OSError(f"{source} is damaged")
    durable_files.publish(unfinished, target)


#: Reads a file of the store of a log, by its name.
ReadFile = Callable[[str], bytes | None]


def named_in(read: ReadFile) -> StateCopy | None:
    """Return the copy that the store of a log names; None: there is none."""
    content = read(NAME)
    return None if content is None else StateCopy.from_json(durable_files.load_json(content))
