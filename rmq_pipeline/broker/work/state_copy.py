"""A copy of the database in the home, from which ``rmq backup`` takes the state."""

import shutil
import threading
from typing import Any, Final
from weakref import WeakKeyDictionary

from rmq_pipeline import durable_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import BusyError, RequestError, StorageError, StoreFullError

#: Folder of the copy in the home. A backup deletes it, and the next copy replaces it.
FOLDER: Final = "backup"
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
    folder = home.path / FOLDER
    size, free = home.database.stat().st_size, shutil.disk_usage(home.path).free
    # The log needs room for its next file; the write-ahead log of DuckDB is small.
    if 2 * size + engine.settings.log_file_bytes > free:
        raise StoreFullError(f"The disk has {free} free bytes, and a copy of the state needs more.")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        position, waited_s = engine.database.copy(folder)
        durable_files.sync(folder)
    except OSError as error:
        raise StorageError(f"Copying the state failed: {error}.") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {"position": position, "bytes": size, "waited_ms": round(waited_s * 1000, 1)}
