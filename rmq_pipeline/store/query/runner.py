"""Runs checked queries on their own connections, limited in time, memory and result size."""

import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import duckdb
import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import QueryError
from rmq_pipeline.limits import QueryLimits
from rmq_pipeline.store.connection import is_short_of_memory
from rmq_pipeline.store.query.body_columns import BodyQuery, body_query, original
from rmq_pipeline.store.query.body_places import PLACE, PLACED
from rmq_pipeline.store.query.body_uses import VIEW
from rmq_pipeline.store.query.interruptible import is_interruptible
from rmq_pipeline.store.query.process import (
    LOOK_S,
    READ_FEWER,
    Limit,
    Line,
    QueryProcesses,
    abandoned_error,
    limit_error,
    read_batches,
    stopped_error,
)
from rmq_pipeline.store.statements import named, view_macros

if TYPE_CHECKING:
    from rmq_pipeline.store.query.analysis import Reading

log = logging.getLogger(__name__)

_BATCH_ROWS: Final = 65_536
#: Interval of interruptions: DuckDB loses an interruption that arrives between two statements.
_AGAIN_S: Final = 0.05
#: A late interruption may hit the end of a transaction.
_TRIES: Final = 3
_Answer = TypeVar("_Answer")


class BodySource(Protocol):
    """Reads the bodies of messages for the caller of a query."""

    def check(self, topics: Sequence[str]) -> None:
        """Check that the caller may read the messages of these topics.

        Raises:
            ForbiddenError: the caller may not.
        """
        ...

    def read(self, places: pa.Table, columns: Sequence[str]) -> Iterable[pa.Table]:
        """Yield the places, which have the columns PLACED, with columns of their messages."""
        ...


@dataclass(frozen=True)
class Bodies:
    """Facts for a query that may name ``body`` or ``properties`` of messages."""

    #: The columns of each view.
    views: Mapping[str, Sequence[str]]
    #: None: the query is only asked for its columns.
    source: BodySource | None = None


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
        bodies: Bodies | None = None,
    ) -> pa.Table:
        """Return the result of a checked query.

        Args:
            views: the views that it may read. A query that DuckDB cannot reliably interrupt runs in
                a process of its own, on a copy of their rows.
            timeout_s: the time limit.
            is_abandoned: called now and then; once it returns True, the query is stopped.
            bodies: given if the query may name ``body`` or ``properties`` of messages.

        Raises:
            QueryError: DuckDB refuses the query, it exceeds ``timeout_s``, its result is larger
                than the limits allow, or it was stopped to free memory or for a checkpoint.
            ForbiddenError: the caller may not read messages whose bodies the query reads.
        """
        limit = Limit(timeout_s, Deadline(timeout_s), _guarded(is_abandoned))
        wanted = None if bodies is None else self._body_query(sql, bodies.views)
        if bodies is not None and wanted is not None:
            read = self._readings(sql, views)
            try:
                answer = self._run_with_bodies(wanted, read, source=bodies.source, limit=limit)
            except QueryError as error:
                raise type(error)(original(error.message), remedy=error.remedy) from error
            return answer.rename_columns(list(map(original, answer.column_names)))
        if self._is_interruptible(sql):
            return self._in_turn(lambda cursor: self._answer(cursor, sql), limit)
        read = self._readings(sql, views)
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

    def _readings(self, sql: str, views: Collection[str]) -> "list[Reading]":
        from rmq_pipeline.store.query.analysis import readings

        return readings(sql, views, macros=self.macros)

    def _body_query(self, sql: str, views: Mapping[str, Sequence[str]]) -> BodyQuery | None:
        with (
            suppress(duckdb.ConnectionException),
            self._parser_lock,
            self._parser.cursor() as cursor,
        ):
            return body_query(cursor, sql, views=views)
        return None

    def _run_with_bodies(
        self,
        wanted: BodyQuery,
        read: "list[Reading]",
        *,
        source: BodySource | None,
        limit: Limit,
    ) -> pa.Table:
        """Run a query in a process that also gets the bodies of the messages that it may need."""
        with self._processes.started(limit) as process:

            def feed(cursor: duckdb.DuckDBPyConnection) -> pa.Table:
                self._begin(cursor, wanted.sql)
                places = self._places(cursor, wanted, source=source)
                with _registered(cursor, places.select(PLACE)):
                    process.feed(
                        cursor,
                        wanted.sql,
                        readings=[_with_place(each, wanted) for each in read],
                        parameters=self.macros,
                        may_run=self._is_interruptible,
                        bodies=wanted.columns,
                    )
                return places

            places = self._in_turn(feed, limit)
            # The transaction has ended: bodies are read from the log and from segments.
            bodies = () if source is None else source.read(places, wanted.columns)
            process.feed_bodies(bodies, wanted.columns)
            return process.answer(self._limits.result_bytes)

    def _places(
        self, cursor: duckdb.DuckDBPyConnection, wanted: BodyQuery, *, source: BodySource | None
    ) -> pa.Table:
        """Return the places of the messages whose bodies a query may need.

        Raises:
            QueryError: there are more than the limits allow.
            ForbiddenError: the caller may not read messages of their topics.
        """
        most = self._limits.body_rows
        rows = 0 if source is None else most + 1
        parts = [self._places_of(cursor, queries, rows=rows) for queries in wanted.places]
        whole = pa.concat_tables(parts).group_by(list(PLACED), use_threads=False).aggregate([])
        found = whole.sort_by([(name, "ascending") for name in ("topic_id", *PLACE[1:])])
        if source is not None:
            source.check(sorted(found["topic"].unique().to_pylist()))
        if found.num_rows > most:
            raise QueryError(
                f"The query reads the bodies of more than {most} messages.", remedy=READ_FEWER
            )
        return found

    def _places_of(
        self, cursor: duckdb.DuckDBPyConnection, queries: Sequence[str], *, rows: int
    ) -> pa.Table:
        for query in queries:
            text = named("places_of_use", query=f"(\n{query}\n)", most=str(rows)).rstrip(";")
            if not query or not self._is_interruptible(text):
                continue
            with suppress(duckdb.BinderException, duckdb.CatalogException):
                relation = cursor.sql(text)
                return relation.to_arrow_table()
        raise QueryError(
            "The broker cannot tell of which messages the query reads bodies.", remedy=READ_FEWER
        )

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


@contextmanager
def _registered(cursor: duckdb.DuckDBPyConnection, places: pa.Table) -> Iterator[None]:
    """Let queries of the cursor read ``wanted_places``."""
    cursor.register("wanted_places", places)
    try:
        yield
    finally:
        cursor.unregister("wanted_places")


def _with_place(reading: "Reading", wanted: BodyQuery) -> "Reading":
    """Return a reading of messages with the columns that name the messages."""
    if reading.name != VIEW:
        return reading
    names = None if reading.names is None else reading.names | set(PLACE)
    source = named("messages_at_places").rstrip(";") if wanted.is_complete else reading.source
    return replace(reading, names=names, source=source)


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
