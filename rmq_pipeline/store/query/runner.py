"""Runs checked queries on their own connections, limited in time, memory and result size."""

import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import duckdb
import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import QueryError
from rmq_pipeline.limits import QueryLimits
from rmq_pipeline.store.connection import is_short_of_memory
from rmq_pipeline.store.query.interruptible import is_interruptible
from rmq_pipeline.store.query.process import (
    LOOK_S,
    Limit,
    Line,
    QueryProcesses,
    abandoned_error,
    limit_error,
    read_batches,
    stopped_error,
)
from rmq_pipeline.store.statements import named, view_macros

log = logging.getLogger(__name__)

_BATCH_ROWS: Final = 65_536
#: Interval of interruptions: DuckDB loses an interruption that arrives between two statements.
_AGAIN_S: Final = 0.05
#: A late interruption may hit the end of a transaction.
_TRIES: Final = 3
_Answer = TypeVar("_Answer")


class QueryRunner:
    """Runs queries in read-only transactions; as many at a time as there are cursors.

    Args:
        prepare: called with the cursor at the beginning of each query's transaction.
        operator_bytes: memory limit of the sorts and hash tables of one query. Lists and texts that
            a query aggregates do not count; ``stop`` frees their memory.
        limits: sizes and times.
    """

    def __init__(
        self,
        cursors: Sequence[duckdb.DuckDBPyConnection],
        *,
        operator_bytes: int,
        prepare: Callable[[duckdb.DuckDBPyConnection], None],
        limits: QueryLimits = QueryLimits(),
    ) -> None:
        self._limits = limits
        self._cursors = tuple(cursors)
        self._prepare = prepare
        #: Creates the cursors that parse queries before they are admitted. One thread at a time
        #: uses it, because DuckDB refuses concurrent calls on a connection.
        self._parser = cursors[0].cursor()
        self._parser_lock = threading.Lock()
        #: Macros that stand for views, each with its parameter.
        self.macros = view_macros()
        self._processes = QueryProcesses(limits, len(cursors))
        self._free: queue.LifoQueue[duckdb.DuckDBPyConnection] = queue.LifoQueue()
        self._line = Line("other queries")
        for cursor in cursors:
            cursor.execute(named("limit_operators", size=f"'{operator_bytes}B'"))
            self._free.put(cursor)

    def run(
        self,
        sql: str,
        *,
        views: Collection[str] = (),
        timeout_s: float,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> pa.Table:
        """Return the result of a checked query.

        Args:
            views: the views that it may read. A query that DuckDB cannot reliably interrupt runs in
                a process of its own, on a copy of their rows.
            timeout_s: the time limit.
            is_abandoned: called now and then; once it returns True, the query is stopped.

        Raises:
            QueryError: DuckDB refuses the query, it exceeds ``timeout_s``, its result is larger
                than the limits allow, or it was stopped to free memory or for a checkpoint.
        """
        limit = Limit(timeout_s, Deadline(timeout_s), _guarded(is_abandoned))
        if self._is_interruptible(sql):
            return self._in_turn(lambda cursor: self._answer(cursor, sql), limit)
        from rmq_pipeline.store.query.analysis import readings

        read = readings(sql, views, macros=self.macros)
        with self._processes.started(limit) as process:

            def feed(cursor: duckdb.DuckDBPyConnection) -> None:
                self._begin(cursor, sql)
                process.feed(
                    cursor,
                    sql,
                    readings=read,
                    parameters=self.macros,
                    may_run=self._is_interruptible,
                )

            self._in_turn(feed, limit)
            return process.answer(self._limits.result_bytes)

    def _is_interruptible(self, sql: str) -> bool:
        # The connection may be closed. Under the lock, because closing it closes the cursor, too,
        # and fails while the cursor is busy.
        with (
            suppress(duckdb.ConnectionException),
            self._parser_lock,
            self._parser.cursor() as cursor,
        ):
            return is_interruptible(cursor, sql, macros=frozenset(self.macros))
        return False

    def _in_turn(
        self,
        work: Callable[[duckdb.DuckDBPyConnection], _Answer],
        limit: Limit,
    ) -> _Answer:
        """Wait for a free cursor, return the result of ``work``, and translate DuckDB's errors."""
        cursor = self._turn(limit)
        ended = threading.Event()
        watch = threading.Thread(
            target=_interrupt,
            args=(cursor, ended),
            kwargs={"limit": limit},
            name="rmq-query-limit",
            daemon=True,
        )
        try:
            watch.start()
            return work(cursor)
        except duckdb.InterruptException as error:
            if limit.deadline.is_over:
                raise limit_error(limit.timeout_s) from error
            if limit.is_abandoned():
                raise abandoned_error() from error
            raise stopped_error() from error
        except duckdb.Error as error:
            if is_short_of_memory(error):
                raise QueryError(
                    "The query needs more memory than a query may use.",
                    remedy="Select fewer rows or columns.",
                ) from error
            raise QueryError(str(error)) from error
        finally:
            ended.set()
            if watch.ident is not None:
                watch.join()  # it must not interrupt the next query of this connection
            _roll_back(cursor)
            if not self._cursors:  # ``close`` did not wait for this query
                cursor.close()
            self._free.put(cursor)

    def _turn(self, limit: Limit) -> duckdb.DuckDBPyConnection:
        """Wait for a free cursor."""

        def take(wait_s: float) -> duckdb.DuckDBPyConnection | None:
            with suppress(queue.Empty):
                return self._free.get(timeout=wait_s)
            return None

        return self._line.wait(take, limit)

    def stop(self) -> None:
        """Interrupt all running queries, and wait up to 5 s each for their memory to be freed."""
        taken = [self._take_interrupted() for _ in self._cursors]
        for cursor in taken:
            if cursor is not None:
                self._free.put(cursor)

    @contextmanager
    def paused(self, patience_s: float) -> Iterator[None]:
        """Let no query run: wait ``patience_s`` for running queries, then interrupt them."""
        deadline = Deadline(patience_s)
        taken = [self._take(deadline.left_s) for _ in self._cursors]
        try:
            yield
        finally:
            for cursor in taken:
                if cursor is not None:
                    self._free.put(cursor)

    def close(self) -> None:
        """Interrupt all running queries and close the connections. Idempotent."""
        self._processes.close()
        taken = [self._take_interrupted() for _ in self._cursors]
        self._cursors = ()
        with self._parser_lock:
            self._parser.close()
        for cursor in taken:
            if cursor is not None:  # a query that cannot be interrupted keeps its cursor
                cursor.close()
                self._free.put(cursor)  # waiting callers get an error

    def _begin(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> None:
        """Check that it is one SELECT, and begin its transaction."""
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("A query must be one SELECT.")
        cursor.execute(named("begin_query"))
        self._prepare(cursor)

    def _answer(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
        self._begin(cursor, sql)
        # Close the reader: while it is open, a rollback does not end the transaction.
        with cursor.sql(sql).to_arrow_reader(_BATCH_ROWS) as reader:
            batches = read_batches(reader, most_bytes=self._limits.result_bytes)
            return pa.Table.from_batches(batches, schema=reader.schema)

    def _take(self, timeout_s: float) -> duckdb.DuckDBPyConnection | None:
        try:
            return self._free.get(timeout=timeout_s)
        except queue.Empty:
            return self._take_interrupted()

    def _take_interrupted(self) -> duckdb.DuckDBPyConnection | None:
        deadline = Deadline(self._limits.stop_s)
        while True:
            self._processes.stop_copies()
            for cursor in self._cursors:
                cursor.interrupt()
            try:
                return self._free.get(timeout=_AGAIN_S)
            except queue.Empty:
                if deadline.is_over:
                    return None


def _guarded(is_abandoned: Callable[[], bool]) -> Callable[[], bool]:
    """Return the function with False in place of an error, which would end the query's limits."""

    def is_surely_abandoned() -> bool:
        try:
            return is_abandoned()
        except Exception:
            log.exception("a query cannot tell whether its caller is there")
            return False

    return is_surely_abandoned


def _interrupt(cursor: duckdb.DuckDBPyConnection, ended: threading.Event, *, limit: Limit) -> None:
    """Interrupt a query repeatedly, from its deadline or the loss of its caller to its end."""
    while not ended.wait(min(limit.deadline.left_s, LOOK_S)):
        if limit.deadline.is_over or limit.is_abandoned():
            break
    while not ended.wait(_AGAIN_S):
        cursor.interrupt()


def _roll_back(cursor: duckdb.DuckDBPyConnection) -> None:
    """End the transaction of a query, if the query has begun one."""
    for _ in range(_TRIES):
        with suppress(duckdb.Error):
            cursor.rollback()
            return
