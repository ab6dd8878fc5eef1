"""Export of files from DuckDB on a connection of its own, one at a time."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import duckdb

from rmq_pipeline.clock import Deadline
from rmq_pipeline.store.statements import named

#: Time that ``close`` waits for an interrupted export, and the interval of interruptions.
_STOP_S: Final = 5.0
_AGAIN_S: Final = 0.05
_Answer = TypeVar("_Answer")


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
