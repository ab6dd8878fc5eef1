"""DuckDB: the tables that dispatch derives from the commit log, and the queries on them.

``state.duckdb`` holds the tables of sql/schema.sql as of the log position ``dispatched``. All
writes (dispatch, expiry, checkpoint) use one connection under a lock. Every read uses its own
cursor and sees the last committed transaction.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeVar

import duckdb
import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import QueryError, StorageError, StoreFullError
from rmq_pipeline.limits import QUERY_TIMEOUT_S, QueryLimits
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store import (
    connection,
    consume_queue,
    history,
    keyed_state,
    opening,
    stored_state,
)
from rmq_pipeline.store.connection import Exporter, FileCopier
from rmq_pipeline.store.consume_queue import IndexPage, Question
from rmq_pipeline.store.fold import Fold
from rmq_pipeline.store.history import KeptHistory, Snapshot
from rmq_pipeline.store.log.stretch import Stretch
from rmq_pipeline.store.query import body_columns, body_uses
from rmq_pipeline.store.query.runner import Bodies, BodySource, QueryRunner
from rmq_pipeline.store.statements import named, quoted
from rmq_pipeline.store.stored_state import SinkTables, StoredSegments, StoredState

__all__ = ["Database", "IndexPage", "StoredSegments", "StoredState"]

#: File name of the database in its home.
FILE_NAME: Final = "state.duckdb"
#: Attempts of a transaction when queries hold the memory of DuckDB.
_ATTEMPTS: Final = 3
#: Queries that run at the same time.
_QUERIES: Final = 2
#: Time for running queries to end before a checkpoint interrupts them; new queries wait.
_PATIENCE_S: Final = 5.0
#: Time that a checkpoint then waits for the broker's own reads, and the retry interval.
_READS_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.01
_Answer = TypeVar("_Answer")


class Database:
    """The open ``state.duckdb`` of a home. Any thread may use it."""

    def __init__(
        self,
        root: duckdb.DuckDBPyConnection,
        home: Path,
        *,
        memory_bytes: int,
        queries: QueryLimits,
        fetch: Callable[[str], None] | None,
    ) -> None:
        self._home = home
        self._sweep = history.Sweep(home, at_once=fetch is None)
        self._files = history.FilesInUse(home, fetch=fetch)
        self._copier = FileCopier(home / FILE_NAME)
        #: Used only to create cursors: a connection serves one thread at a time.
        self._root = root
        self._writer = root.cursor()
        self._lock = threading.Lock()
        self._idle: list[duckdb.DuckDBPyConnection] = []
        self._prepare()
        share = memory_bytes // 4
        self._exporter = Exporter(root.cursor(), operator_bytes=share)
        self._queries = QueryRunner(
            [root.cursor() for _ in range(_QUERIES)],
            operator_bytes=share,
            prepare=self._files.update,
            limits=queries,
        )
        self._writer.execute(named("lock_settings"))
        self._fold = Fold(self._writer)
        ((reached, *_),) = self._writer.sql(named("state_reached")).fetchall()
        #: Log position that the tables reflect; all earlier frames are durably in them.
        self.dispatched: int = reached
        #: Why the database must be reopened; it answers no more calls.
        self.broken: str | None = None
        self._views: dict[str, pa.Schema] = {}
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        memory_bytes: int,
        threads: int = 1,
        queries: QueryLimits = QueryLimits(),
        fetch: Callable[[str], None] | None = None,
    ) -> Self:
        """Open the database of a home, or create it.

        Args:
            path: its file.
            memory_bytes: memory of DuckDB.
            threads: of DuckDB.
            queries: limits of queries.
            fetch: called before a query with the path of a history file that the home lacks.

        Raises:
            StoreFullError: the disk has no space for the writes of opening.
            StorageError: it cannot be opened.
        """
        try:
            root = connection.connect(path, memory_bytes=memory_bytes, threads=threads)
            try:
                history.let_in(root, path.parent)
                return cls(
                    root, path.parent, memory_bytes=memory_bytes, queries=queries, fetch=fetch
                )
            except BaseException:
                root.close()
                raise
        except (duckdb.Error, OSError) as error:
            raise connection.translation(f"Opening {path}", error) from error

    def dispatch(self, stretches: Sequence[Stretch]) -> None:
        """Apply frames to the tables and advance ``dispatched`` to their end, in one transaction.

        Args:
            stretches: consecutive frames, the first one at ``dispatched``.

        Raises:
            StorageError: the transaction failed. If memory was short, the frames were split, and
                the first of them may be applied.
        """
        if not stretches:
            return
        try:
            with self._lock:
                self._write("Dispatch", lambda: self._move(stretches))
                self.dispatched = stretches[-1].end
        except StorageError as error:
            middle = len(stretches) // 2
            if not middle or not connection.is_short_of_memory(
                error.__cause__
            ):  # keyed state may be wide
                raise
            self.dispatch(stretches[:middle])
            self.dispatch(stretches[middle:])

    def load_state(self) -> StoredState:
        """Return the state tables but the segments, read in one transaction."""
        return self._read(stored_state.load)

    def load_segments(self) -> StoredSegments:
        """Return the registered segments, read in one transaction."""
        return self._read(stored_state.load_segments)

    def index(self, topic_id: int, queue_id: int, *, start: int, stop: int) -> IndexPage:
        """Return the rows of a queue in [start, stop) that are dispatched and have not expired."""
        return self._read(
            lambda cursor: consume_queue.index(
                cursor, topic_id=topic_id, queue_id=queue_id, start=start, stop=stop
            )
        )

    def backlog(
        self,
        topic_id: int,
        queue_id: int,
        *,
        hashes: Int64s,
        starts: Int64s,
        stop: int,
        limit: int,
    ) -> tuple[Int64s, Int64s]:
        """Return the first ``limit`` messages of each message group between its start and ``stop``.

        Returns:
            message_group_hash and queue_offset of each message, in offset order.
        """
        return self._read(
            lambda cursor: consume_queue.backlog(
                cursor,
                topic_id=topic_id,
                queue_id=queue_id,
                hashes=hashes,
                starts=starts,
                stop=stop,
                limit=limit,
            )
        )

    def find(self, question: Question[_Answer]) -> _Answer:
        """Return the result of a question about rows of consume queues."""
        return self._read(question.run)

    def query(
        self,
        sql: str,
        *,
        timeout_s: float,
        is_abandoned: Callable[[], bool] = lambda: False,
        bodies: BodySource | None = None,
    ) -> pa.Table:
        """Return the result of one SELECT over the views.

        Args:
            sql: the query.
            timeout_s: its time limit.
            is_abandoned: called now and then; once it returns True, the query is stopped.
            bodies: reads bodies and properties; None: messages has no such columns.

        Raises:
            QueryError: the query is not one SELECT over the views, fails, or exceeds ``timeout_s``.
            ForbiddenError: the query reads bodies that its caller may not read.
        """
        # A broker that answers no query need not import sqlglot: 0.14 s of the processor at start.
        from rmq_pipeline.store.query import analysis

        views = self._view_names()
        analysis.check(sql, views, macros=self._queries.macros)
        try:
            return self._queries.run(
                sql,
                views=views,
                timeout_s=timeout_s,
                is_abandoned=is_abandoned,
                bodies=None if bodies is None else self._bodies(sql, bodies),
            )
        except QueryError as error:
            if not body_columns.is_missing(error.message):
                raise
            raise QueryError(error.message, remedy=body_columns.WHO_HAS_THEM) from error

    def _bodies(self, sql: str, source: BodySource | None) -> Bodies | None:
        """Return what a query needs that may name bodies of messages; None if it does not."""
        if not body_columns.may_name(sql):
            return None
        # Made once. This query is not stopped meanwhile.
        views = {name: columns.names for name, columns in self._view_columns().items()}
        return Bodies(views, source)

    def columns(self, sql: str, *, is_abandoned: Callable[[], bool] = lambda: False) -> pa.Schema:
        """Return the columns of one SELECT over the views; names that repeat get numbers.

        Raises:
            QueryError: as ``query``.
        """
        from rmq_pipeline.store.query import analysis

        views = self._view_names()
        analysis.check(sql, views, macros=self._queries.macros)
        return self._columns(sql, views=views, is_abandoned=is_abandoned)

    def views(self, *, is_abandoned: Callable[[], bool] = lambda: False) -> Mapping[str, pa.Schema]:
        """Return the columns of each view that a query may read, by name.

        Those of messages include the columns that a star leaves out.

        Raises:
            QueryError: as ``query``.
        """
        found = dict(self._view_columns(is_abandoned=is_abandoned))
        for name, of_type in body_uses.COLUMNS.items():
            found[body_uses.VIEW] = found[body_uses.VIEW].append(pa.field(name, of_type))
        return found

    def _view_columns(
        self, *, is_abandoned: Callable[[], bool] = lambda: False
    ) -> Mapping[str, pa.Schema]:
        """Return the columns that a star of each view has."""
        if not self._views:  # opening the home has made them, and nothing changes them
            names = self._view_names()
            self._views = {
                name: self._columns(
                    named("all_of", source=quoted(name)).rstrip(";"),
                    views=names,
                    is_abandoned=is_abandoned,
                )
                for name in names
            }
        return self._views

    def _view_names(self) -> list[str]:
        rows = self._read(lambda cursor: cursor.execute(named("view_names")).fetchall())
        return [name for (name,) in rows]

    def _columns(
        self,
        sql: str,
        *,
        views: Sequence[str],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> pa.Schema:
        return self._queries.run(
            # A line of its own: the query may end in a comment.
            named("columns_of", query=f"(\n{sql}\n)"),
            views=views,
            timeout_s=QUERY_TIMEOUT_S,
            is_abandoned=is_abandoned,
            bodies=self._bodies(sql, None),
        ).schema

    def stop_queries(self) -> None:
        """Interrupt the running queries."""
        self._queries.stop()

    def keyed_state(
        self, group_id: int, topic_id: int, *, hashes: Int64s | None
    ) -> pa.Table | None:
        """Return the state of message groups, or of all if ``hashes`` is None.

        Returns:
            message_group and the consumer's columns; None if the group never had state there. Where
            two message groups share a hash, both are returned.
        """
        return self._read(
            lambda cursor: keyed_state.read(
                cursor, group_id=group_id, topic_id=topic_id, hashes=hashes
            )
        )

    def has_keyed_state(self) -> bool:
        """Return True if any consumer group keeps state."""
        return self._read(keyed_state.is_kept)

    def first_of_groups(self, topic_id: int, *, hashes: Int64s) -> pa.Table:
        """Return the first message of each message group in a topic.

        Returns:
            message_group_hash, queue_id (null: in several queues), queue_offset.
        """
        return self._read(
            lambda cursor: keyed_state.first_of_groups(cursor, topic_id=topic_id, hashes=hashes)
        )

    def ended_halves(self, queue_offset: Int64s) -> pa.Table:
        """Return the half messages at these offsets that were resolved.

        Returns:
            queue_offset, message_id_hash, producer_group, and the event kind as resolution.
        """
        asked = pa.table({"queue_offset": queue_offset})

        def ask(cursor: duckdb.DuckDBPyConnection) -> pa.Table:
            return (
                cursor.register("asked_halves", asked).sql(named("ended_halves")).to_arrow_table()
            )

        return self._read(ask)

    def sink_files(self, group_id: int, *, removed: bool) -> tuple[int, pa.Table]:
        """Return the version of a group's sink and its current files, or the replaced ones."""
        return self._read(lambda cursor: stored_state.sink_files(cursor, group_id, removed=removed))

    def sink(self, group_id: int, *, replacement_id: str) -> SinkTables:
        """Return a group's sink: current files, replaced files, and the answer of a replacement."""
        return self._read(
            lambda cursor: stored_state.sink(cursor, group_id, replacement_id=replacement_id)
        )

    def dead_letter_origins(
        self, topic_id: int, *, queue_id: Int32s, queue_offset: Int64s
    ) -> pa.Table:
        """Return the origins of messages of a dead letter topic.

        Returns:
            ordinal, topic, message_id, queue_id, queue_offset; topic_id and message_group_hash if
            the original message is retained. A message that is not a dead letter has no row.
        """
        return self._read(
            lambda cursor: stored_state.dead_letter_origins(
                cursor, topic_id=topic_id, queue_id=queue_id, queue_offset=queue_offset
            )
        )

    def effects_seen(self, group_id: int, *, keys: pa.Array, after_ms: int) -> pa.Array:
        """Return when each idempotency key last had an effect after ``after_ms``; null if never."""
        return self._read(
            lambda cursor: stored_state.effects_seen(
                cursor, group_id=group_id, keys=keys, after_ms=after_ms
            )
        )

    def export_events(self, to_position: int, path: Path) -> int:
        """Write the events before a position to a Parquet file, not synced; return their count."""
        return self._export(lambda cursor: history.export_events(cursor, to_position, path=path))

    def merge_events(self, files: Sequence[Path], path: Path) -> int:
        """Merge event Parquet files into one, not synced; return the number of events."""
        return self._export(lambda cursor: history.merge_events(cursor, files, path=path))

    def export_snapshot(self, path: Path) -> Snapshot:
        """Write the dispatched state to a Parquet file, not synced."""
        return self._export(lambda cursor: history.export_snapshot(cursor, path))

    def events_since(self, position: int) -> int:
        """Return the approximate number of events from a position on."""
        return self._read(lambda cursor: history.events_since(cursor, position))

    def sweep_history(self) -> list[Path]:
        """Delete history files that no longer count after a grace period; return their paths.

        No file may be written there meanwhile, and all registrations must be dispatched.
        """
        return self._sweep.run(self.kept_history())

    def kept_history(self) -> KeptHistory:
        """Return the registered snapshots and event files."""
        return self._read(history.kept)

    def delete_events(self, to_position: int) -> None:
        """Delete the events before a position; event Parquet already contains them."""
        params = {"to_position": to_position}
        with self._lock:
            self._write(
                "Deleting events", lambda: self._writer.execute(named("delete_events"), params)
            )

    def checkpoint(self) -> None:
        """Write DuckDB's write-ahead log into the database file.

        A transaction that reads the data to move is in the way. Queries are paused or interrupted.

        Raises:
            StorageError: it failed, or reads blocked it until the time limit.
        """
        self._insist("Checkpoint", self._take_checkpoint)

    def copy(self, folder: Path) -> tuple[int, float]:
        """Copy the database, as it is between two transactions, to a folder; not synced.

        Dispatch, expiry and checkpoints wait meanwhile.

        Returns:
            The log position of the copy, and the seconds that the others waited.

        Raises:
            StoreFullError: the disk is full.
            StorageError: copying failed, or the database must be reopened.
        """
        with self._lock:
            if self.broken is not None or self._closed:
                raise StorageError(self.broken or "The database is closed.")
            started = time.monotonic()
            try:
                self._copier.copy(folder)
            except OSError as error:
                raise connection.translation("Copying", error) from error
            return self.dispatched, time.monotonic() - started

    def close(self) -> None:
        """Stop queries and exports, and release the file. Idempotent."""
        self._closed = True
        self._queries.close()
        self._exporter.close()
        with self._lock:
            for cursor in (*self._idle, self._writer, self._root):
                with suppress(duckdb.Error):  # an executing cursor must not keep the others open
                    cursor.close()
            self._idle.clear()
            self._copier.close()

    def let_go(self) -> None:
        """Close a broken database, so that the next open reads the file on disk.

        Raises:
            StorageError: a connection still uses it, and DuckDB would share the broken instance.
        """
        self.broken = self.broken or "It was closed."
        self.close()
        connection.release(self._home / FILE_NAME)

    def _prepare(self) -> None:
        """Create the tables and views, unless this version already created them."""
        if opening.made_by(self._writer) != (this := opening.made_by_this()):
            self._writer.begin()
            opening.make(self._writer, self._home, made_by=this, files=self._files)
            self._writer.commit()
        history.write_nothing(self._writer, self._home)
        self._files.update(self._writer, may_fetch=False)

    def _move(self, stretches: Sequence[Stretch]) -> None:
        # A commit that failed for lack of memory may have taken effect. If the frames were split,
        # the first of them may be applied.
        ((reached, *_),) = self._writer.sql(named("state_reached")).fetchall()
        if left := [stretch for stretch in stretches if stretch.end > reached]:
            self._fold.apply((rows for stretch in left for rows in stretch.rows), left[-1].end)

    def _take_checkpoint(self) -> None:
        if self._is_taken():
            return
        with self._queries.paused(_PATIENCE_S):
            deadline = Deadline(_READS_S)
            pause = threading.Event()
            while not deadline.is_over:
                if self._is_taken():
                    return
                pause.wait(_LOOK_EVERY_S)
            with self._lock:
                self._writer.checkpoint()

    def _is_taken(self) -> bool:
        """Take a checkpoint; return False if a transaction is in its way."""
        try:
            with self._lock:
                self._writer.checkpoint()
        except duckdb.TransactionException:
            return False
        return True

    def _write(self, what: str, action: Callable[[], object]) -> None:
        def transaction() -> None:
            with suppress(duckdb.Error):  # its rollback may have failed for lack of memory
                self._writer.rollback()
            try:
                self._writer.begin()
                action()
                self._writer.commit()
            except BaseException:
                self._roll_back()
                raise

        self._insist(what, transaction)

    def _read(self, ask: Callable[[duckdb.DuckDBPyConnection], _Answer]) -> _Answer:
        """Run a read on a cursor of its own; a cursor that failed is not reused."""

        def answer() -> _Answer:
            try:
                cursor = self._idle.pop()
            except IndexError:
                cursor = self._root.cursor()
            found = ask(cursor)
            self._idle.append(cursor)
            if self._closed:  # closed meanwhile: an open cursor would keep the file open
                cursor.close()
            return found

        return self._insist("Reading", answer)

    def _insist(self, what: str, action: Callable[[], _Answer]) -> _Answer:
        """Return the result of ``action``; if memory is short, stop queries and retry."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return action()
            except duckdb.Error as error:
                if not connection.is_short_of_memory(error):
                    raise self._translated(what, error) from error
                self._queries.stop()
        try:
            return action()
        except duckdb.Error as error:
            raise self._translated(what, error) from error

    def _translated(self, what: str, error: duckdb.Error) -> StorageError | StoreFullError:
        """Return the store's error. After a fatal error DuckDB answers no more calls."""
        if isinstance(error, duckdb.FatalException | duckdb.InternalException):
            self.broken = self.broken or f"{what} failed in DuckDB: {error}."
        return connection.translation(what, error)

    def _export(self, write: Callable[[duckdb.DuckDBPyConnection], _Answer]) -> _Answer:
        """Write a file with the memory limit of a query."""
        return self._insist("Exporting", lambda: self._exporter.run(write))

    def _roll_back(self) -> None:
        # DuckDB may have rolled back itself, or be unusable: report only the first error.
        with suppress(duckdb.Error):
            self._writer.rollback()
        self._fold.forget()
