"""Writes files out of DuckDB with a connection of its own, one at a time."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import duckdb

from rmq_pipeline.store.statements import named

#: How long a file that is interrupted is waited for, and when it is interrupted again.
_STOP_S: Final = 5.0
_AGAIN_S: Final = 0.05
_Answer = TypeVar("_Answer")


class Exporter:
    """For any number of threads, of which one writes.

    Args:
        operator_bytes: what the sorts and hash tables of an export may use.
    """

    def __init__(self, cursor: duckdb.DuckDBPyConnection, *, operator_bytes: int) -> None:
        cursor.execute(named("limit_operators", size=f"'{operator_bytes}B'"))
        self._cursor = cursor
        self._turn = threading.Lock()

    def run(self, write: Callable[[duckdb.DuckDBPyConnection], _Answer]) -> _Answer:
        """What ``write`` gives, once it is its turn."""
        with self._turn:
            return write(self._cursor)

    def close(self) -> None:
        """Interrupt what is written and let go of the connection. Again: nothing happens."""
        give_up_at = time.monotonic() + _STOP_S
        while not self._turn.acquire(timeout=_AGAIN_S):
            self._cursor.interrupt()
            if time.monotonic() >= give_up_at:
                return  # what nothing ends keeps its own
        try:
            with suppress(duckdb.Error):
                self._cursor.close()
        finally:
            self._turn.release()
