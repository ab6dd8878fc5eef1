"""A copy of the database in the home, from which ``rmq backup`` takes the state."""

import re
import secrets
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from rmq_pipeline import durable_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import BusyError, RequestError, StorageError, StoreFullError
from rmq_pipeline.store.database import FILE_NAME

#: Folder in the home, with a folder for the copy. The name of the latter is in the answer, so that
#: a caller notices that another copy has replaced the one that it asked for.
FOLDER: Final = ".state-copy"
#: The files of a copy; nothing else in a folder is deleted.
FILES: Final = (FILE_NAME, f"{FILE_NAME}.wal")
_NAME: Final = re.compile("[0-9a-f]{16}")
_TURNS: Final[WeakKeyDictionary[Engine, threading.Lock]] = WeakKeyDictionary()
_MAKING: Final = threading.Lock()


def copy_state(engine: Engine) -> dict[str, Any]:
    """Replace the copy; dispatch waits while the file is copied, and the writer does not.

    Raises:
        RequestError: the log is in a store, so the home alone is no backup.
        BusyError: another copy is under way.
        StoreFullError: the copy does not fit next to the reserve.
        StorageError: copying failed.
    """
    if engine.replication is not None:
        raise RequestError(
            "The commit log is in log_store: a copy of the home has only a part of it.",
            remedy="Back up the database of log_store.",
        )
    with _MAKING:
        turn = _TURNS.setdefault(engine, threading.Lock())
    if not turn.acquire(blocking=False):
        raise BusyError("The state is being copied for another caller.")
    try:
        return _copied(engine)
    finally:
        turn.release()


def _copied(engine: Engine) -> dict[str, Any]:
    home = engine.home
    delete_copies(home.path)
    size, free = home.database.stat().st_size, shutil.disk_usage(home.path).free
    # The log needs room for its next file; the write-ahead log of DuckDB is small.
    if 2 * size + engine.settings.log_file_bytes > free:
        raise StoreFullError(f"The disk has {free} free bytes, and a copy of the state needs more.")
    name = secrets.token_hex(8)
    folder = home.path / FOLDER / name
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        position, waited_s = engine.database.copy(folder)
        durable_files.sync(folder)
    except BaseException as error:
        delete_copy(folder)
        if isinstance(error, OSError):
            raise StorageError(f"Copying the state failed: {error}.") from error
        raise
    waited_ms = round(waited_s * 1000, 1)
    return {"folder": name, "position": position, "bytes": size, "waited_ms": waited_ms}


def delete_copies(home: Path) -> None:
    """Delete the copies that no backup has fetched."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for folder in (home / FOLDER).iterdir():
            if _NAME.fullmatch(folder.name):
                delete_copy(folder)
    with suppress(OSError):  # it has other files, or does not exist
        (home / FOLDER).rmdir()


def delete_copy(folder: Path) -> None:
    """Delete a copy; other files in the folder stay, and so does the folder then."""
    with suppress(OSError):  # it is not there, or is deleted with the next copy
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
