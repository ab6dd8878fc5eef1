"""A query that DuckDB may not end when it is interrupted runs where it can be ended."""

import contextlib
import threading
import time
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pytest

from rmq_pipeline.errors import QueryError, QueryPostponedError
from rmq_pipeline.limits import MIB, QueryLimits
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.query import process, runner
from rmq_pipeline.store.query.interruptible import is_interruptible
from rmq_pipeline.store.statements import named
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.conftest import Eventually
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import START_MS, dispatch, events, message, messages, on_queue

#: Minutes, whatever interrupts it.
FOREVER = "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000)) AS distance"


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> QueryLimits:
    """Limits of queries; a parameter of this name changes some."""
    return QueryLimits(**getattr(request, "param", {}))


@pytest.fixture
def database(open_database: OpenDatabase, limits: QueryLimits) -> Database:
    """Topic departures (2) with messages, some leased to group rotations (1), and its state."""
    database = open_database(queries=limits)
    names = [
        rows.topic(SCHEDULE_TOPIC_ID, "SCHEDULE_TOPIC_XXXX", queues=19),
        rows.topic(2, "departures", type="fifo", queues=2),
        rows.group(1, "rotations", order="message_group"),
    ]
    dispatch(database, [events(*names)])
    dispatch(
        database,
        [
            messages(
                *(message(2, 0, i, tag="t" if i % 2 else None, keys=["a b", "c"]) for i in range(5))
            ),
            events(on_queue(Kind.LEASE, 3, attempt=1)),
        ],
    )
    return database


def children() -> list[psutil.Process]:
    """The query processes of this process, which other tests of a run give children, too."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process._COMMAND[-1] in child.cmdline():
                found.append(child)
    return found


def in_thread(
    database: Database, sql: str, *, timeout_s: float
) -> tuple[threading.Thread, list[str]]:
    """The query in a thread, and where its error will be."""
    said: list[str] = []

    def run() -> None:
        try:
            database.query(sql, timeout_s=timeout_s)
        except QueryError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_it_ends_at_its_limit_and_holds_nothing_up(
    database: Database, eventually: Eventually
) -> None:
    running = [in_thread(database, FOREVER, timeout_s=4) for _ in range(2)]
    eventually(lambda: len(children()) == 2)
    pids = [child.pid for child in children()]

    assert database.query("SELECT count(*) AS n FROM messages", timeout_s=3).num_rows == 1
    database.checkpoint()
    dispatch(database, [messages(message(2, 1, 0))])
    with pytest.raises(
        QueryPostponedError, match=r"has waited 0\.1 s for other queries in processes"
    ):
        database.query(FOREVER, timeout_s=0.1)
    began = time.monotonic()
    for thread, said in running:
        thread.join(30)
        assert "did not end within 4 s" in said[0]
        assert "timeout_s" in said[0]

    assert time.monotonic() - began < 20  # levenshtein takes longer
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_closing_the_database_ends_it(database: Database, eventually: Eventually) -> None:
    thread, said = in_thread(database, FOREVER, timeout_s=300)
    # While it copies rows, the broker's own query is stopped as well, and says less.
    running = database._queries._processes._running
    eventually(lambda: any(each.phase == "running" for each in running))
    (child,) = children()

    database.close()
    thread.join(30)

    assert "closes the home" in said[0]
    assert not psutil.pid_exists(child.pid)


def test_it_ends_when_the_broker_is_gone(database: Database, eventually: Eventually) -> None:
    """The end of its input is all that it sees of a broker that was killed."""
    thread, said = in_thread(database, FOREVER, timeout_s=300)
    running = database._queries._processes._running
    eventually(lambda: any(each.phase == "running" for each in running))
    (process,) = running
    (child,) = children()

    assert process._process.stdin is not None
    process._process.stdin.close()
    thread.join(30)

    assert "ended without an answer" in said[0]
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize(
    "greedy",
    [
        "length(replace(repeat('a', 200000), 'a', repeat('b', 200000)))",
        "length(repeat('a', 2000000000))",
    ],
)
@pytest.mark.parametrize("limits", [{"process_bytes": 128 * MIB}], indirect=True)
def test_its_memory_has_a_bound(database: Database, greedy: str) -> None:
    with pytest.raises(QueryError, match="more memory than its process may use: 128 MiB"):
        database.query(f"SELECT {greedy}", timeout_s=60)

    assert children() == []


@pytest.mark.parametrize("limits", [{"copy_bytes": 10}], indirect=True)
def test_what_it_reads_has_a_bound(database: Database) -> None:
    with pytest.raises(QueryError, match="reads more than 0 MiB") as error:
        database.query("SELECT replace(message_id, 'a', 'b') FROM messages", timeout_s=60)

    assert "Compare columns with constants in WHERE" in str(error.value)
    query = "SELECT replace(message_id, 'a', 'b') FROM messages WHERE queue_offset = 99"
    assert database.query(query, timeout_s=60).num_rows == 0


@pytest.mark.parametrize("limits", [{"result_bytes": MIB}], indirect=True)
def test_its_answer_has_a_bound(database: Database) -> None:
    with pytest.raises(QueryError, match="larger than 1 MiB"):
        database.query("SELECT repeat('a', 100) FROM range(1000000)", timeout_s=60)


def test_its_error_is_that_of_duckdb(database: Database) -> None:
    with pytest.raises(QueryError, match=r"(?s)Binder Error.*nothing"):
        database.query("SELECT replace(nothing, 'a', 'b') FROM topics", timeout_s=60)


def test_a_process_that_does_not_start_is_an_error_and_keeps_no_turn(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(process, "_COMMAND", ("/nowhere/python",))
        for _ in range(3):
            with pytest.raises(QueryError, match="did not start"):
                database.query("SELECT repeat('a', 3)", timeout_s=1)

    assert database.query("SELECT repeat('a', 3) AS r", timeout_s=60)["r"].to_pylist() == ["aaa"]


def test_it_reads_no_files(database: Database) -> None:
    with pytest.raises(QueryError, match="read_text is not allowed in a query"):
        database.query("SELECT replace('a', 'a', 'b') FROM read_text('/etc/passwd')", timeout_s=60)


@pytest.mark.parametrize("argument", ["t.topic_id", "levenshtein('a', 'b')", "(SELECT 1)"])
def test_the_moment_of_a_macro_is_a_constant(database: Database, argument: str) -> None:
    query = f"SELECT replace(t.topic, 'a', 'b') FROM topics t, LATERAL (FROM lag_at({argument}))"

    with pytest.raises(QueryError, match=r"(?i)lag_at.* constant"):
        database.query(query, timeout_s=60)

    assert children() == []


SHAPES = f"""
SELECT m.queue_offset, l.* FROM messages AS m LEFT JOIN in_flight AS l
    USING (topic, queue_id, queue_offset) ORDER BY ALL;
SELECT topic, count(*), min(tag) FROM messages WHERE queue_offset >= 2 AND tag = 't' GROUP BY ALL;
WITH messages AS (SELECT * FROM messages WHERE tag IS NULL)
    SELECT queue_offset FROM messages
    UNION ALL SELECT queue_offset + 100 FROM messages ORDER BY ALL;
SELECT m FROM messages AS m ORDER BY m.queue_offset;
SELECT keys, upper(tag) AS tag FROM (SELECT * FROM messages) AS m WHERE NOT (tag IS NULL)
    ORDER BY queue_offset;
SELECT a.lag, b.lag, a.topic FROM lag_at({START_MS + 5}) AS a JOIN lag_at(t := now()) AS b
    USING (topic, queue_id) ORDER BY ALL;
SELECT EXISTS (SELECT t.* FROM in_flight WHERE topic = t.topic) AS e,
    make_timestamp(created_at_ms) FROM topics AS t ORDER BY topic;
SELECT unnest(keys) AS k, queue_offset FROM messages WHERE queue_offset IN (1, 3) ORDER BY ALL;
SELECT count(*) AS n FROM messages;
SELECT main.messages AS row FROM main.messages ORDER BY main.messages.queue_offset;
SELECT main.messages AS row FROM messages ORDER BY queue_offset;
SELECT m.queue_offset FROM main.messages AS m WHERE m.queue_offset = 3;
SELECT queue_offset FROM main.messages WHERE main.messages.queue_offset = 3;
SELECT messages.* FROM main.messages WHERE main.messages.queue_offset < 3
    AND messages.queue_offset > 1;
SELECT 1 AS one, NULL AS nothing, INTERVAL 3 DAY AS i, DATE '2026-03-07' AS d, 1.5 AS x
""".split(";")


def everything(database: Database) -> str:
    """All rows and columns of all views, with their types."""
    names = [name for (name,) in database._root.cursor().sql(named("view_names")).fetchall()]
    lists = (f"(SELECT list(v ORDER BY v) FROM {name} AS v) AS {name}" for name in names)
    return f"SELECT {', '.join(lists)}"


def test_it_has_the_answer_of_the_broker_itself(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = [*SHAPES, everything(database)]
    inside = [database.query(query, timeout_s=60) for query in queries]

    def no_query_itself(cursor: duckdb.DuckDBPyConnection, sql: str, **known: Any) -> bool:
        return sql not in queries and is_interruptible(cursor, sql, **known)

    monkeypatch.setattr(runner, "is_interruptible", no_query_itself)
    for query, expected in zip(queries, inside, strict=True):
        answer: pa.Table = database.query(query, timeout_s=60)
        assert answer.schema == expected.schema, query
        assert answer.to_pylist() == expected.to_pylist(), query
