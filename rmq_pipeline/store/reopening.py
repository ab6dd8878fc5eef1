"""DuckDB's errors: their classification, and reopening a database that DuckDB has invalidated."""

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import duckdb

from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.store.log import log_file

#: Checks whether a closed database is still open, and the pause between them.
_LOOKS: Final = 20
_LOOK_EVERY_S: Final = 0.05
#: Descriptors of the open files of this process (Linux).
_DESCRIPTORS: Final = Path("/proc/self/fd")
#: Errors of DuckDB that do not depend on the rows.
_OF_THE_STORE: Final = (
    duckdb.OperationalError,  # disk, memory, a connection that is closed or busy, a transaction
    duckdb.FatalException,
    duckdb.InternalException,
    duckdb.InterruptException,
    duckdb.PermissionException,
)


class HeldError(StorageError):
    """An invalidated database is still open in this process; another process can open it."""

    remedy = "Start the broker again."


def release(path: Path) -> None:
    """Wait until a closed database file is released, then drop its pages from the page cache.

    DuckDB reuses the invalidated instance while any object refers to it. After a failed sync the
    kernel marks pages as clean that may not be on disk; the next open must read the disk.

    Raises:
        HeldError: a connection still has the file open.
    """
    pause = threading.Event()
    for _ in range(_LOOKS):
        gc.collect()  # the traceback of an error may hold a reader
        if not is_open(path):
            break
        pause.wait(_LOOK_EVERY_S)
    else:
        raise HeldError(f"{path} is still being read, and cannot be opened again yet.")
    for file in (path, path.with_name(f"{path.name}.wal")):
        with suppress(OSError):
            _forget_pages(file)


def is_open(path: Path) -> bool:
    """Return True if this process has a file open; False where /proc is missing."""
    try:
        wanted = path.stat()
        descriptors = list(_DESCRIPTORS.iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(wanted, descriptor.stat()):
                return True
    return False


def _forget_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_of_data(error: Exception) -> bool:
    """Return True if the rows caused the error, and not the disk, the memory or a file."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    if isinstance(cause, duckdb.Error):
        return not (isinstance(cause, _OF_THE_STORE) or is_short_of_memory(cause))
    return isinstance(cause, ValueError | LookupError | TypeError)


def is_short_of_memory(error: BaseException | None) -> bool:
    """Return True if DuckDB ran out of memory; its commits and queries word this differently."""
    text = str(error)
    return isinstance(error, duckdb.OutOfMemoryException) or any(
        sign in text for sign in ("failed to pin block", "failed to allocate")
    )


def translation(what: str, error: duckdb.Error | OSError) -> StorageError | StoreFullError:
    """Translate an error of DuckDB or of its files to an error of the store."""
    text = f"{what} failed in DuckDB: {error}."
    is_full = any(os.strerror(number) in str(error) for number in log_file.FULL)
    return StoreFullError(text) if is_full else StorageError(text)
