"""The crew desk's own books: a DuckDB file that says what became of each change of a crew.

It alone decides. The desk notes a change as confirmed or cancelled; the checker, when it is asked
about a half message that the books do not know, notes it as abandoned. Whoever is first is right:
a desk that comes back finds its change abandoned, and makes it anew under another id.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

CONFIRMED: Final = "confirmed"
CANCELLED: Final = "cancelled"
ABANDONED: Final = "abandoned"

#: What the desk notes.
NOTE: Final = pa.schema(
    [
        ("change_id", pa.string()),
        ("tail", pa.string()),
        ("flight", pa.string()),
        ("crew", pa.string()),
        ("scheduled_departure_ms", pa.int64()),
        ("state", pa.string()),
    ]
)

PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.01
_OPEN: Final = """
CREATE TABLE IF NOT EXISTS changes (
    change_id VARCHAR PRIMARY KEY, tail VARCHAR, flight VARCHAR, crew VARCHAR,
    scheduled_departure_ms BIGINT, state VARCHAR NOT NULL,
    asked INTEGER NOT NULL  -- how often the checker was
)
"""
_NOTE: Final = "INSERT INTO changes SELECT *, 0 FROM given ON CONFLICT DO NOTHING"
_ASK: Final = """
INSERT INTO changes (change_id, state, asked) SELECT change_id, 'abandoned', 1 FROM given
ON CONFLICT DO UPDATE SET asked = asked + 1
"""
_STATES: Final = """
SELECT state FROM (SELECT change_id, row_number() OVER () AS n FROM given)
JOIN changes USING (change_id) ORDER BY n
"""


class Ledger:
    """The books, opened for each question: DuckDB lets one process at a time in."""

    def __init__(self, path: Path, *, patience_s: float = PATIENCE_S) -> None:
        """``patience_s``: how long another process is waited for."""
        self._path = path
        self._patience_s = patience_s

    def note(self, changes: pa.Table) -> pa.ChunkedArray:
        """Note changes; the state that each has then, which is abandoned if that was noted before.

        Args:
            changes: NOTE.
        """
        return self._write(_NOTE, changes)

    def ask(self, change_ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """The state of each change; one that is not noted is abandoned, once and for all."""
        return self._write(_ASK, pa.table({"change_id": change_ids}))

    def changes(self) -> pa.Table:
        """All that is noted: NOTE and ``asked``."""
        with self._opened() as books:
            return books.sql("FROM changes").to_arrow_table()

    def _write(self, statement: str, given: pa.Table) -> pa.ChunkedArray:
        with self._opened() as books:
            books.register("given", given)
            books.begin()
            books.execute(statement)
            states = books.sql(_STATES).to_arrow_table()["state"]
            books.commit()
        return states

    @contextmanager
    def _opened(self) -> Iterator[duckdb.DuckDBPyConnection]:
        books = self._connect()
        try:
            books.execute(_OPEN)
            yield books
        finally:
            books.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return duckdb.connect(self._path)
            except duckdb.IOException:
                # Another process is in.
                if time.monotonic() >= until_s:
                    raise
            threading.Event().wait(_PAUSE_S)
