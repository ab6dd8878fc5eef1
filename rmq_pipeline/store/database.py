"""DuckDB: what dispatch derives from the commit log, and the questions that are asked of it.

``state.duckdb`` holds the tables of sql/schema.sql at a log position, ``dispatched``. Writing
(dispatch, expiry, checkpoint) happens on one connection under a lock; every read has a cursor of
its own and sees the last committed transaction.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeVar

import duckdb
import pyarrow as pa

from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store import (
    consume_queue,
    history,
    keyed_state,
    opening,
    query_guard,
    redrives,
    sinks,
    stored_state,
)
from rmq_pipeline.store.checkpoint import checkpoint
from rmq_pipeline.store.consume_queue import IndexPage
from rmq_pipeline.store.exporter import Exporter
from rmq_pipeline.store.fold import Fold
from rmq_pipeline.store.history import KeptHistory, Snapshot
from rmq_pipeline.store.query_runner import QueryRunner, is_short_of_memory
from rmq_pipeline.store.sinks import SinkTables
from rmq_pipeline.store.statements import named
from rmq_pipeline.store.stored_state import StoredState
from rmq_pipeline.store.stretch import Stretch

__all__ = ["Database", "IndexPage", "StoredState"]

#: What may lie in DuckDB's write-ahead log before dispatch writes it into the tables' blocks. Large
#: appends bypass it; what goes there costs about a second a GiB on start.
_CHECKPOINT_THRESHOLD: Final = "32MB"
#: Disk that queries may use beyond memory.
_SPILL: Final = "4GB"
#: Attempts of a transaction that found DuckDB's memory taken by queries.
_ATTEMPTS: Final = 3
#: Queries that run at a time.
_QUERIES: Final = 2
_Answer = TypeVar("_Answer")


class Database:
    """The open ``state.duckdb`` of a home. Any thread may use it."""

    def __init__(self, root: duckdb.DuckDBPyConnection, home: Path, *, memory_bytes: int) -> None:
        self._home = home
        self._sweep = history.Sweep(home)
        #: Only ever asked for cursors: a connection serves one thread at a time.
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
            prepare=lambda cursor: history.use_files(cursor, home),
        )
        self._writer.execute(named("lock_settings"))
        self._fold = Fold(self._writer)
        self._macros = [name for (name,) in self._writer.sql(named("macro_names")).fetchall()]
        ((reached, *_),) = self._writer.sql(named("state_reached")).fetchall()
        #: The log position that the tables stand for; what is before it is durably in them.
        self.dispatched: int = reached

    @classmethod
    def open(cls, path: Path, *, memory_bytes: int, threads: int = 1) -> Self:
        """Open the database of a home, or begin one there.

        Raises:
            StoreFullError: the disk has no room for what opening writes.
            StorageError: it cannot be opened.
        """
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
        try:
            root = duckdb.connect(path, config=config)
            try:
                history.let_in(root, path.parent)
                return cls(root, path.parent, memory_bytes=memory_bytes)
            except BaseException:
                root.close()
                raise
        except (duckdb.Error, OSError) as error:
            raise _translation(f"Opening {path}", error) from error

    def dispatch(self, stretches: Sequence[Stretch]) -> None:
        """Move frames into the tables, and ``dispatched`` to the end of the last, or nothing.

        Args:
            stretches: those from ``dispatched`` on without a gap.

        Raises:
            StorageError: it failed; of what is too much for the memory, the first part may be done.
        """
        if not stretches:
            return
        try:
            with self._lock:
                self._write("Dispatch", lambda: self._move(stretches))
                self.dispatched = stretches[-1].end
        except StorageError as error:
            middle = len(stretches) // 2
            if not middle or not is_short_of_memory(error.__cause__):  # keyed state may be wide
                raise
            self.dispatch(stretches[:middle])
            self.dispatch(stretches[middle:])

    def load_state(self) -> StoredState:
        """The state tables, all of one moment."""
        return self._read(stored_state.load)

    def index(self, topic_id: int, queue_id: int, *, start: int, stop: int) -> IndexPage:
        """The rows of a queue in [start, stop) that were dispatched and have not expired."""
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
        """The first ``limit`` messages of each message group from its start on and before ``stop``.

        Returns:
            message_group_hash and queue_offset of each, in offset order.
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

    def find(self, search: consume_queue.Search) -> Int64s:
        """The first offsets of a queue with such messages, ascending."""
        return self._read(search.run)

    def query(self, sql: str, *, timeout_s: float) -> pa.Table:
        """The answer to one SELECT over the views.

        Raises:
            QueryError: it is anything else, fails, or takes longer than ``timeout_s``.
        """
        rows = self._read(lambda cursor: cursor.sql(named("view_names")).fetchall())
        query_guard.check(sql, [name for (name,) in rows], macros=self._macros)
        return self._queries.run(sql, timeout_s=timeout_s)

    def keyed_state(
        self, group_id: int, topic_id: int, *, hashes: Int64s | None
    ) -> pa.Table | None:
        """The state of these message groups, or of all: message_group and the consumer's columns.

        None when there never was any. A hash of two groups gives both.
        """
        return self._read(
            lambda cursor: keyed_state.read(
                cursor, group_id=group_id, topic_id=topic_id, hashes=hashes
            )
        )

    def has_keyed_state(self) -> bool:
        """Whether any consumer keeps state."""
        return self._read(lambda cursor: bool(cursor.sql(named("keyed_tables")).fetchall()))

    def first_of_groups(self, topic_id: int, *, hashes: Int64s) -> pa.Table:
        """Where message groups begin in a topic.

        Returns:
            message_group_hash, queue_id (null: in several queues), queue_offset.
        """
        return self._read(
            lambda cursor: keyed_state.first_of_groups(cursor, topic_id=topic_id, hashes=hashes)
        )

    def ended_halves(self, queue_offset: Int64s) -> pa.Table:
        """Those of these half messages that were ended.

        Returns:
            queue_offset, message_id_hash, producer_group, and as resolution the kind of the event.
        """
        asked = pa.table({"queue_offset": queue_offset})

        def ask(cursor: duckdb.DuckDBPyConnection) -> pa.Table:
            cursor.register("asked_halves", asked)
            return cursor.sql(named("ended_halves")).to_arrow_table()

        return self._read(ask)

    def sink_files(self, group_id: int, *, removed: bool) -> tuple[int, pa.Table]:
        """The version of a group's sink, and its files that count, or those that were replaced."""
        return self._read(lambda cursor: sinks.listed(cursor, group_id, removed=removed))

    def sink(self, group_id: int, *, replacement_id: str) -> SinkTables:
        """A group's sink: what counts, what did, and what a replacement was answered."""
        return self._read(
            lambda cursor: sinks.load(cursor, group_id, replacement_id=replacement_id)
        )

    def dead_letter_origins(
        self, topic_id: int, *, queue_id: Int32s, queue_offset: Int64s
    ) -> pa.Table:
        """Where dead letters of a dead letter topic came from.

        Returns:
            ordinal, topic, message_id, queue_id, queue_offset, and topic_id and message_group_hash
            where the message is still there; no row for what is no dead letter.
        """
        return self._read(
            lambda cursor: redrives.origins(
                cursor, topic_id=topic_id, queue_id=queue_id, queue_offset=queue_offset
            )
        )

    def effects_seen(self, group_id: int, *, keys: pa.Array, after_ms: int) -> pa.Array:
        """When each idempotency key last had an effect after a moment; null for never."""
        return self._read(
            lambda cursor: redrives.seen(cursor, group_id=group_id, keys=keys, after_ms=after_ms)
        )

    def export_events(self, to_position: int, path: Path) -> int:
        """Write the events before a position to a Parquet file, not synced; how many there are."""
        return self._export(lambda cursor: history.export_events(cursor, to_position, path=path))

    def merge_events(self, files: Sequence[Path], path: Path) -> int:
        """Write the events of several Parquet files to one, not synced; how many there are."""
        return self._export(lambda cursor: history.merge_events(cursor, files, path=path))

    def export_snapshot(self, path: Path) -> Snapshot:
        """Write the state, as far as it was dispatched, to a Parquet file, not synced."""
        return self._export(lambda cursor: history.export_snapshot(cursor, path))

    def events_since(self, position: int) -> int:
        """How many events there are from a position on, about."""
        return self._read(lambda cursor: history.events_since(cursor, position))

    def sweep_history(self) -> list[Path]:
        """Delete files of the history that do not count, some time after; which were deleted.

        Nothing is being written there meanwhile, and what was registered was dispatched.
        """
        return self._sweep.run(self.kept_history())

    def kept_history(self) -> KeptHistory:
        """Which snapshots and which files of events count."""
        return self._read(history.kept)

    def delete_events(self, to_position: int) -> None:
        """Let the events before a position go: they are in event Parquet."""
        with self._lock:
            self._write(
                "Deleting events",
                lambda: self._run("delete_events", {"to_position": to_position}),
            )

    def checkpoint(self) -> None:
        """Write what is in DuckDB's write-ahead log into its file.

        Raises:
            StorageError: it failed.
        """

        def take() -> None:
            with self._lock:
                self._writer.checkpoint()

        self._insist("Checkpoint", lambda: checkpoint(take, self._queries))

    def close(self) -> None:
        """Stop queries and exports, and let go of the file. Again: nothing happens."""
        self._queries.close()
        self._exporter.close()
        with self._lock:
            for cursor in (*self._idle, self._writer, self._root):
                with suppress(duckdb.Error):  # one that is still at work keeps the others open
                    cursor.close()
            self._idle.clear()

    def _prepare(self) -> None:
        """Make tables and views, unless they are what this version makes."""
        if self._made_by() != (this := opening.made_by_this()):
            self._writer.begin()
            opening.make(self._writer, self._home, made_by=this)
            self._writer.commit()
        history.write_nothing(self._writer, self._home)
        history.use_files(self._writer, self._home)

    def _made_by(self) -> str:
        try:
            ((made_by, *_),) = self._writer.sql(named("made_by")).fetchall()
        except (duckdb.CatalogException, ValueError):  # a new one, or one of an older version
            return ""
        return str(made_by)

    def _run(self, name: str, params: Mapping[str, int] | None = None) -> None:
        self._writer.execute(named(name), params)

    def _move(self, stretches: Sequence[Stretch]) -> None:
        # A commit that failed for want of memory may have taken effect all the same; of what went
        # in parts, the first may be done.
        ((reached, *_),) = self._writer.sql(named("state_reached")).fetchall()
        if left := [stretch for stretch in stretches if stretch.end > reached]:
            self._fold.apply((rows for stretch in left for rows in stretch.rows), left[-1].end)

    def _write(self, what: str, action: Callable[[], None]) -> None:
        """Carry out a transaction."""

        def transaction() -> None:
            with suppress(duckdb.Error):  # one that could not be rolled back for want of memory
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
        """Ask with a cursor of its own; one that failed is not used again."""

        def answer() -> _Answer:
            try:
                cursor = self._idle.pop()
            except IndexError:
                cursor = self._root.cursor()
            found = ask(cursor)
            self._idle.append(cursor)
            return found

        return self._insist("Reading", answer)

    def _insist(self, what: str, action: Callable[[], _Answer]) -> _Answer:
        """What ``action`` gives. Queries that hold the memory it needs are stopped for it."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return action()
            except duckdb.Error as error:
                if not is_short_of_memory(error):
                    raise _translation(what, error) from error
                self._queries.stop()
        try:
            return action()
        except duckdb.Error as error:
            raise _translation(what, error) from error

    def _export(self, write: Callable[[duckdb.DuckDBPyConnection], _Answer]) -> _Answer:
        """Write a file, with no more memory than a query."""
        return self._insist("Exporting", lambda: self._exporter.run(write))

    def _roll_back(self) -> None:
        # A transaction that DuckDB has ended itself has nothing to roll back, and a database that
        # it gave up answers nothing any more: the first error is the one to tell.
        with suppress(duckdb.Error):
            self._writer.rollback()
        self._fold.forget()


def _translation(what: str, error: duckdb.Error | OSError) -> StorageError | StoreFullError:
    """DuckDB's error, or one of its files, as an error of the store."""
    text = f"{what} failed in DuckDB: {error}."
    return StoreFullError(text) if "No space left on device" in str(error) else StorageError(text)
