"""Connections to DuckDB: opening, exporting, releasing the file; and the meaning of its errors."""

import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import duckdb

from rmq_pipeline import durable_files
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.statements import named

#: Maximum size of DuckDB's write-ahead log before dispatch writes it into the tables. Large appends
#: bypass the write-ahead log. Replaying it at start takes about a second per GiB.
_CHECKPOINT_THRESHOLD: Final = "32MB"
#: Maximum disk space for query data that does not fit in memory.
_SPILL: Final = "4GB"
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
#: Time that ``close`` waits for an interrupted export, and the interval of interruptions.
_STOP_S: Final = 5.0
_AGAIN_S: Final = 0.05
_Answer = TypeVar("_Answer")


def connect(path: Path, *, memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """Open the database file, or create it."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_bytes}B",
        "threads": threads,
        "checkpoint_threshold": _CHECKPOINT_THRESHOLD,
        "max_temp_directory_size": _SPILL,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        "python_enable_replacements": False,
    }
    return duckdb.connect(path, config=config)


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


class FileCopier:
    """Copies the files of an open database; one thread at a time.

    DuckDB locks its file for the process, and the lock ends when the process closes any descriptor
    of the file. The descriptor of the copier therefore stays open as long as the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def copy(self, folder: Path) -> None:
        """Copy the file, and the write-ahead log if there is one; nobody writes meanwhile.

        Raises:
            OSError: copying failed.
        """
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        durable_files.copy_open(self._descriptor, folder / self._path.name)
        wal = self._path.with_name(f"{self._path.name}.wal")
        try:
            descriptor = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            durable_files.copy_open(descriptor, folder / wal.name)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Release the file, after DuckDB has. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Exporter:
    """Writer of DuckDB exports: any thread may call it, and one export runs at a time.

    Args:
        operator_bytes: memory limit of an export's sorts and hash tables.
    """

    def __init__(self, cursor: duckdb.DuckDBPyConnection, *, operator_bytes: int) -> None:
        self._operator_bytes = operator_bytes
        self._cursor = self._limited(cursor)
        self._turn = threading.Lock()

    def run(self, write: Callable[[duckdb.DuckDBPyConnection], _Answer]) -> _Answer:
        """Wait for the running export to end, then return the result of ``write``."""
        with self._turn:
            try:
                return write(self._cursor)
            except BaseException:
                # The transaction may still be open, and an open transaction blocks checkpoints.
                with suppress(duckdb.Error):
                    fresh = self._limited(self._cursor.cursor())
                    self._cursor.close()
                    self._cursor = fresh
                raise

    def _limited(self, cursor: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
        cursor.execute(named("limit_operators", size=f"'{self._operator_bytes}B'"))
        return cursor

    def close(self) -> None:
        """Interrupt a running export and close the connection. Idempotent."""
        deadline = Deadline(_STOP_S)
        while not self._turn.acquire(timeout=_AGAIN_S):
            self._cursor.interrupt()
            if deadline.is_over:
                return  # an export that cannot be interrupted keeps its connection
        try:
            with suppress(duckdb.Error):
                self._cursor.close()
        finally:
            self._turn.release()
