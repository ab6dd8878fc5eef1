"""Runs checked queries on connections of their own, within limits of time, memory and answer."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline.errors import QueryError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.statements import named

#: The answer of a query is held in memory, outside of DuckDB's limit.
RESULT_BYTES: Final = 256 * MIB
_BATCH_ROWS: Final = 65_536
#: How long an interrupted query is waited for, and when it is interrupted again: DuckDB forgets
#: what comes between two statements.
_STOP_S: Final = 5.0
_AGAIN_S: Final = 0.05
#: An interruption that came late may meet the end of a transaction.
_TRIES: Final = 3


class QueryRunner:
    """Runs as many queries at a time as it is given cursors, each in a read-only transaction.

    Args:
        prepare: is given the cursor at the beginning of each query's transaction.
        operator_bytes: what the sorts and hash tables of one query may use. Lists and texts that a
            query gathers are not counted in it: ``stop`` gives their memory back.
    """

    def __init__(
        self,
        cursors: Sequence[duckdb.DuckDBPyConnection],
        *,
        operator_bytes: int,
        prepare: Callable[[duckdb.DuckDBPyConnection], None],
    ) -> None:
        self._cursors = tuple(cursors)
        self._prepare = prepare
        self._free: queue.LifoQueue[duckdb.DuckDBPyConnection] = queue.LifoQueue()
        for cursor in cursors:
            cursor.execute(named("limit_operators", size=f"'{operator_bytes}B'"))
            self._free.put(cursor)

    def run(self, sql: str, *, timeout_s: float) -> pa.Table:
        """The answer to a checked query.

        Raises:
            QueryError: DuckDB refuses it, it takes longer than ``timeout_s``, its answer is larger
                than RESULT_BYTES, or its memory was needed for something else.
        """
        give_up_at = time.monotonic() + timeout_s
        try:
            cursor = self._free.get(timeout=timeout_s)
        except queue.Empty:
            raise QueryError(f"Other queries left it no turn within {timeout_s:g} s.") from None
        ended = threading.Event()
        limit = threading.Thread(
            target=_interrupt,
            args=(cursor, ended),
            kwargs={"at_s": give_up_at},
            name="rmq-query-limit",
            daemon=True,
        )
        try:
            limit.start()
            return self._answer(cursor, sql)
        except duckdb.InterruptException as error:
            if time.monotonic() >= give_up_at:
                raise QueryError(f"The query did not end within {timeout_s:g} s.") from error
            raise QueryError(
                "The query was stopped: the broker needed its memory or a checkpoint."
            ) from error
        except duckdb.Error as error:
            if is_short_of_memory(error):
                raise QueryError("The query needs more memory than a query gets.") from error
            raise QueryError(str(error)) from error
        finally:
            ended.set()
            if limit.ident is not None:
                limit.join()  # it must not interrupt the next query of this connection
            _roll_back(cursor)
            self._free.put(cursor)

    def stop(self) -> None:
        """Interrupt what runs, and wait a moment for its memory."""
        taken = [self._take_interrupted() for _ in self._cursors]
        for cursor in taken:
            if cursor is not None:
                self._free.put(cursor)

    @contextmanager
    def paused(self, patience_s: float) -> Iterator[None]:
        """Let no query run: what does may end within ``patience_s``, then it is interrupted."""
        give_up_at = time.monotonic() + patience_s
        taken = [self._take(give_up_at - time.monotonic()) for _ in self._cursors]
        try:
            yield
        finally:
            for cursor in taken:
                if cursor is not None:
                    self._free.put(cursor)

    def close(self) -> None:
        """Interrupt what runs and let go of the connections. Again: nothing happens."""
        taken = [self._take_interrupted() for _ in self._cursors]
        self._cursors = ()
        for cursor in taken:
            if cursor is not None:  # a query that nothing ends keeps its own
                cursor.close()
                self._free.put(cursor)  # who waits for a turn is told

    def _answer(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("A query is one SELECT.")
        cursor.execute(named("begin_query"))
        self._prepare(cursor)
        size = 0
        batches: list[pa.RecordBatch] = []
        reader = cursor.sql(sql).to_arrow_reader(_BATCH_ROWS)
        for batch in reader:
            size += batch.nbytes
            if size > RESULT_BYTES:
                raise QueryError(
                    f"The answer is larger than {RESULT_BYTES // MIB} MiB: select less of it."
                )
            batches.append(batch)
        return pa.Table.from_batches(batches, schema=reader.schema)

    def _take(self, timeout_s: float) -> duckdb.DuckDBPyConnection | None:
        try:
            return self._free.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return self._take_interrupted()

    def _take_interrupted(self) -> duckdb.DuckDBPyConnection | None:
        give_up_at = time.monotonic() + _STOP_S
        while True:
            for cursor in self._cursors:
                cursor.interrupt()
            try:
                return self._free.get(timeout=_AGAIN_S)
            except queue.Empty:
                if time.monotonic() >= give_up_at:
                    return None


def _interrupt(cursor: duckdb.DuckDBPyConnection, ended: threading.Event, *, at_s: float) -> None:
    """Interrupt a query from a moment on until it has ended."""
    pause_s = max(0.0, at_s - time.monotonic())
    while not ended.wait(pause_s):
        cursor.interrupt()
        pause_s = _AGAIN_S


def _roll_back(cursor: duckdb.DuckDBPyConnection) -> None:
    """End the transaction of a query, which may not have come as far as to begin one."""
    for _ in range(_TRIES):
        with suppress(duckdb.Error):
            cursor.rollback()
            return


def is_short_of_memory(error: BaseException | None) -> bool:
    """Whether DuckDB failed for want of memory; a commit says so in other words than a query."""
    text = str(error)
    return isinstance(error, duckdb.OutOfMemoryException) or any(
        sign in text for sign in ("failed to pin block", "failed to allocate")
    )
