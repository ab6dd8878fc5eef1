"""Runs a query that DuckDB cannot reliably interrupt in a process of its own, which can be killed.

The process receives the rows that the query reads, from one transaction, and no file access. It
ends with the query, at the query's time limit, or when the broker ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import duckdb
import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import QueryError, QueryPostponedError
from rmq_pipeline.limits import MIB, QueryLimits
from rmq_pipeline.store.query.body_columns import TYPES
from rmq_pipeline.store.query.body_places import PLACE
from rmq_pipeline.store.query.body_uses import COLUMNS
from rmq_pipeline.store.statements import named, quoted

if TYPE_CHECKING:
    from rmq_pipeline.store.query.analysis import Reading

_BATCH_ROWS: Final = 65_536
_COMMAND: Final = (sys.executable, "-m", "rmq_pipeline.store.query.worker")
#: Time to wait for a killed process to exit.
_GONE_S: Final = 10.0
_CONFIG: Final = {
    "threads": 1,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
    "temp_directory": "",
}
_Turn = TypeVar("_Turn")
#: Interval at which a query checks for its caller.
LOOK_S: Final = 0.5
READ_FEWER: Final = (
    "Compare topic, queue_id, queue_offset or stored_at_ms of messages with constants in WHERE, or"
    " add LIMIT."
)
SELECT_LESS: Final = "Select fewer rows or columns, or set a longer timeout_s."


def limit_error(timeout_s: float) -> QueryError:
    """Return the error of a query that exceeded its time limit."""
    return QueryError(f"The query did not end within {timeout_s:g} s.", remedy=SELECT_LESS)


def abandoned_error() -> QueryError:
    """Return the error of a query whose caller has gone."""
    return QueryPostponedError("The query was stopped: its caller has gone.")


def stopped_error() -> QueryError:
    """Return the error of a query that was interrupted for the broker."""
    return QueryPostponedError(
        "The query was stopped: the broker needed its memory or a checkpoint."
    )


def read_batches(reader: Iterable[pa.RecordBatch], *, most_bytes: int) -> list[pa.RecordBatch]:
    """Return the batches of a query's answer.

    Raises:
        QueryError: they have more than ``most_bytes``.
    """
    size, batches = 0, []
    for batch in reader:
        size += batch.nbytes
        if size > most_bytes:
            raise QueryError(
                f"The answer is larger than {most_bytes // MIB} MiB.",
                remedy="Select fewer rows or columns.",
            )
        batches.append(batch)
    return batches


class Limit(NamedTuple):
    """When a query must end."""

    timeout_s: float
    deadline: Deadline
    is_abandoned: Callable[[], bool]


class Line:
    """Queries that wait for a turn, in the order of their arrival.

    Each looks for its caller now and then; one that looks does not lose its place to a newcomer.
    """

    def __init__(self, others: str) -> None:
        """Create an empty line; ``others`` names in an error what has the turns."""
        self._others = others
        self._lock = threading.Lock()
        #: Set for the first one.
        self._waiting: deque[threading.Event] = deque()

    def wait(self, take: Callable[[float], _Turn | None], limit: Limit) -> _Turn:
        """Return the turn that ``take`` returns within a number of seconds, else None.

        Raises:
            QueryPostponedError: the caller has gone, or no turn was free until the time limit.
        """
        is_first = threading.Event()
        with self._lock:
            self._waiting.append(is_first)
            self._waiting[0].set()
        try:
            while True:
                if is_first.wait(min(limit.deadline.left_s, LOOK_S)):
                    turn = take(min(limit.deadline.left_s, LOOK_S))
                    if turn is not None:
                        return turn
                if limit.is_abandoned():
                    raise abandoned_error()
                if limit.deadline.is_over:
                    raise QueryPostponedError(
                        f"The query has waited {limit.timeout_s:g} s for {self._others}."
                    )
        finally:
            with self._lock:
                self._waiting.remove(is_first)
                if self._waiting:
                    self._waiting[0].set()


class QueryProcesses:
    """Starts one process per query, at most ``most`` at the same time."""

    def __init__(self, limits: QueryLimits, most: int) -> None:
        self._limits = limits
        self._turns = threading.Semaphore(most)
        self._line = Line("other queries in processes")
        self._lock = threading.Lock()
        self._running: set[QueryProcess] = set()
        self._closed = False

    @contextmanager
    def started(self, limit: Limit) -> Iterator[QueryProcess]:
        """Start a process; kill it at the time limit and at the end of the block.

        Raises:
            QueryError: other queries occupied all processes until the time limit.
        """
        self._line.wait(lambda wait_s: self._turns.acquire(timeout=wait_s) or None, limit)
        try:
            with self._lock:
                if self._closed:
                    raise QueryPostponedError("The broker closes the home.")
                process = _start(self._limits, limit)
                self._running.add(process)
            try:
                yield process
            finally:
                process.end()
                with self._lock:
                    self._running.discard(process)
        finally:
            self._turns.release()

    def stop_copies(self) -> None:
        """Kill processes during copying: an interruption does not end a write to a slow reader."""
        with self._lock:
            copying = [process for process in self._running if process.phase == "copying"]
        for process in copying:
            process.kill(stopped_error())

    def close(self) -> None:
        """Kill all running processes, and start no more."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill(QueryPostponedError("The query was stopped: the broker closes the home."))


@dataclass
class _Copies:
    """Statements that create the copied rows under the names that the query uses."""

    tables: list[tuple[str, str]] = field(default_factory=list)
    #: Calls of each macro, as (table, argument).
    calls: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


class QueryProcess:
    """The process of one query: ``feed`` copies its rows, then ``answer`` reads the result."""

    def __init__(self, limits: QueryLimits, limit: Limit) -> None:
        self._limits = limits
        self._limit = limit
        #: While the phase is "copying", a transaction is open for this process.
        self.phase: Literal["starting", "copying", "running"] = "starting"
        #: The error of a process that was killed.
        self._killed: QueryError | None = None
        # -m puts the current folder first on the module path, where foreign files could hide
        # modules.
        self._process = subprocess.Popen(
            _COMMAND,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._ended = threading.Event()
        watch = threading.Thread(target=self._watch, name="rmq-query-limit", daemon=True)
        try:
            watch.start()
        except BaseException:
            self.end()
            raise

    def feed(
        self,
        cursor: duckdb.DuckDBPyConnection,
        query: str,
        *,
        readings: Sequence[Reading],
        parameters: Mapping[str, str],
        may_run: Callable[[str], bool],
        bodies: Sequence[str] = (),
    ) -> None:
        """Copy the rows that the query reads, in the cursor's open transaction, and start it.

        Args:
            parameters: the parameter of each macro.
            may_run: returns True if the broker's own process may run a query.
            bodies: columns of messages that ``feed_bodies`` must then send.

        Raises:
            QueryError: the query reads too much, or its process was killed.
        """
        copies = _Copies()
        sources = [
            self._source(cursor, reading, copies=copies, may_run=may_run) for reading in readings
        ]
        after = [
            _macro(name, parameters[name], calls=calls) for name, calls in copies.calls.items()
        ]
        if bodies:
            copies.tables.append(_body_table(bodies))
            after += _body_views(bodies)
        given = {
            "query": query,
            "tables": copies.tables,
            "after": after,
            "lock": named("lock_settings"),
            "memory_bytes": self._limits.process_bytes,
            "config": _CONFIG | {"memory_limit": f"{self._limits.process_bytes // 2}B"},
        }
        self.phase = "copying"
        with self._explained():
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            room = self._limits.copy_bytes
            for source in sources:
                room = self._copy(cursor, source, room=room)
            self._process.stdin.flush()
        self.phase = "running"

    def feed_bodies(self, read: Iterable[pa.Table], columns: Sequence[str]) -> None:
        """Send the bodies of messages, each as soon as it is read.

        No transaction is open meanwhile. The process is killed at its limit, which ends this, too.

        Args:
            read: tables with PLACE and the columns.
            columns: some of COLUMNS.

        Raises:
            QueryError: the bodies are too large, or the process was killed.
        """
        places = [(name, pa.string() if name == "topic" else pa.int64()) for name in PLACE]
        wanted = pa.schema([*places, *((name, COLUMNS[name]) for name in columns)])
        room = self._limits.body_bytes
        with self._explained():
            stream = pa.ipc.new_stream(self._process.stdin, wanted)
        for table in read:
            room -= table.select(list(columns)).nbytes
            if room < 0:
                raise QueryError(
                    f"The query reads more than {self._limits.body_bytes // MIB} MiB of bodies.",
                    remedy=READ_FEWER,
                )
            with self._explained():
                stream.write_table(table.select(wanted.names).cast(wanted))
        with self._explained():
            stream.close()
            assert self._process.stdin is not None
            self._process.stdin.flush()

    def answer(self, most_bytes: int) -> pa.Table:
        """Return the result of the query.

        Raises:
            QueryError: the query failed, or its result is larger than ``most_bytes``.
        """
        with self._explained():
            reader = pa.ipc.open_stream(self._process.stdout)
            batches = read_batches(reader, most_bytes=most_bytes)
            if self._process.wait():
                raise EOFError("an answer was followed by an error")
            return pa.Table.from_batches(batches, schema=reader.schema)

    def kill(self, error: QueryError) -> None:
        """Kill the process; pending calls raise this error."""
        self._killed = self._killed or error
        self._process.kill()

    def end(self) -> None:
        """Kill the process, close its pipes and wait until it has exited."""
        self._ended.set()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)

    def _watch(self) -> None:
        """Kill the process at its time limit, or when its caller has gone."""
        while not self._ended.wait(min(self._limit.deadline.left_s, LOOK_S)):
            is_late = self._limit.deadline.is_over
            if is_late or self._limit.is_abandoned():
                self.kill(limit_error(self._limit.timeout_s) if is_late else abandoned_error())
                return

    def _source(
        self,
        cursor: duckdb.DuckDBPyConnection,
        reading: Reading,
        *,
        copies: _Copies,
        may_run: Callable[[str], bool],
    ) -> str:
        """Return the query for the rows of a reading, and add its table to the copies."""
        whole = named("all_of", source=reading.source)
        if not may_run(whole):
            raise QueryError(
                f"The argument of {reading.source} needs a function that DuckDB may not interrupt.",
                remedy="Give a constant, such as ms since 1970 or a TIMESTAMP.",
            )
        found = cursor.sql(whole)
        types = dict(zip(found.columns, found.types, strict=True))
        columns = reading.columns(found.columns)
        table = reading.name
        if reading.argument is not None:
            calls = copies.calls.setdefault(reading.name, [])
            table = f"{reading.name} {len(calls)}"
            calls.append((quoted(table), reading.argument))
        typed = ", ".join(f"NULL::{types[name]} AS {quoted(name)}" for name in columns)
        copies.tables.append(
            (
                named("create_copy", table=quoted(table), typed=typed),
                named("fill_copy", table=quoted(table)),
            )
        )
        return named(
            "copied_rows",
            columns=", ".join(map(quoted, columns)),
            source=reading.source,
            alias=quoted(reading.alias),
            condition=reading.condition(found.columns),
        )

    def _copy(self, cursor: duckdb.DuckDBPyConnection, source: str, *, room: int) -> int:
        """Write the rows of a source to the process; return how many bytes may still be copied."""
        with cursor.sql(source).to_arrow_reader(_BATCH_ROWS) as reader:
            stream = pa.ipc.new_stream(self._process.stdin, reader.schema)
            for batch in reader:
                room -= batch.nbytes
                if room < 0:
                    raise QueryError(
                        f"The query reads more than {self._limits.copy_bytes // MIB} MiB. It uses "
                        "a function that DuckDB may not interrupt, so it runs in a process of its "
                        "own, and the rows that it reads are copied to that process.",
                        remedy="Compare columns with constants in WHERE, name the columns, or "
                        "apply that function in a second step to the answer.",
                    )
                stream.write_batch(batch)
            stream.close()
        return room

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace the error of a broken pipe by the reason why the process ended."""
        try:
            yield
        except (OSError, EOFError, pa.ArrowException) as error:
            raise self._reason() from error

    def _reason(self) -> QueryError:
        assert self._process.stderr is not None
        text = self._process.stderr.read().decode(errors="replace")
        try:
            said: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            said = {"memory": False, "text": ""}
        if self._killed is not None:
            return self._killed
        if said["memory"]:
            return QueryError(
                "The query needs more memory than its process may use: "
                f"{self._limits.process_bytes // MIB} MiB.",
                remedy="Select fewer rows or columns.",
            )
        if not said["text"]:
            return QueryError(
                f"The process of the query ended without an answer, with code {self._code()}.",
                remedy="Select fewer rows or columns: the system may have run out of memory.",
            )
        return QueryError(said["text"])

    def _code(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GONE_S)
        return None


def _start(limits: QueryLimits, limit: Limit) -> QueryProcess:
    try:
        return QueryProcess(limits, limit)
    except OSError as error:
        raise QueryPostponedError(
            f"The query needs a process of its own, which did not start: {error}."
        ) from error


def _body_table(columns: Sequence[str]) -> tuple[str, str]:
    """Return the statements that create and fill the table of the bodies."""
    types = {"topic": "VARCHAR", "queue_id": "BIGINT", "queue_offset": "BIGINT", **TYPES}
    typed = ", ".join(f"NULL::{types[name]} AS {name}" for name in (*PLACE, *columns))
    table = "read_bodies"
    return named("create_copy", table=table, typed=typed), named("fill_copy", table=table)


def _body_views(columns: Sequence[str]) -> list[str]:
    """Return the statements that put the bodies beside the copied rows of messages."""
    given = ", ".join(f"b.{name}" for name in columns)
    return [
        named("create_bodies"),
        named("create_messages_with_bodies", bodies=given),
        named("create_text_of_body"),
    ]


def _macro(name: str, parameter: str, *, calls: Sequence[tuple[str, str]]) -> str:
    """Build a macro that returns the copied rows for each of the original calls."""
    branches, former = [], "true"
    for table, argument in calls:
        branches.append(
            named(
                "copied_branch",
                table=table,
                parameter=parameter,
                argument=argument,
                former=former,
            ).rstrip(";")
        )
        former += f" AND ({parameter})::VARCHAR IS DISTINCT FROM ({argument})::VARCHAR"
    return named(
        "create_copied_macro",
        macro=quoted(name),
        parameter=parameter,
        branches=f"({' UNION ALL '.join(branches)})",
    )
