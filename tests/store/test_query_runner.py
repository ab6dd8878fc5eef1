"""A query has limits of time, of memory, and of what it answers, and queries have a number."""

import threading

import duckdb
import pytest

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import QueryError, QueryPostponedError, StorageError
from rmq_pipeline.limits import MIB, QueryLimits
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.query import runner
from rmq_pipeline.store.query.process import Limit, Line
from tests.conftest import Eventually
from tests.store.conftest import OpenDatabase
from tests.store.rows import dispatch, message, messages

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> QueryLimits:
    """Limits of queries; a parameter of this name changes some."""
    return QueryLimits(**getattr(request, "param", {}))


@pytest.fixture
def database(open_database: OpenDatabase, limits: QueryLimits) -> Database:
    return open_database(queries=limits)


def run_in_thread(database: Database, sql: str) -> tuple[threading.Thread, list[str]]:
    """The query in a thread, and where its error will be."""
    said: list[str] = []

    def run() -> None:
        try:
            database.query(sql, timeout_s=60)
        except QueryError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_long_query_is_stopped(database: Database) -> None:
    with pytest.raises(QueryError, match=r"did not end within 0\.2 s"):
        database.query(ENDLESS, timeout_s=0.2)

    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


@pytest.mark.parametrize(
    "sql", [ENDLESS, f"SELECT regexp_matches('a', i::text) FROM ({ENDLESS}) t(i)"]
)
def test_a_query_ends_when_its_caller_has_gone(database: Database, sql: str) -> None:
    gone = threading.Event()
    threading.Timer(0.2, gone.set).start()

    with pytest.raises(QueryError, match="its caller has gone"):
        database.query(sql, timeout_s=60, is_abandoned=gone.is_set)

    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


def test_a_query_that_waits_for_its_turn_ends_when_its_caller_has_gone(database: Database) -> None:
    queries = [database._queries._free.get() for _ in range(2)]

    with pytest.raises(QueryError, match="its caller has gone"):
        database.query("SELECT 1", timeout_s=60, is_abandoned=lambda: True)

    for cursor in queries:
        database._queries._free.put(cursor)


def test_queries_get_their_turns_in_the_order_of_their_arrival(eventually: Eventually) -> None:
    line, served = Line("other queries"), list[str]()
    is_free, limit = threading.Event(), Limit(60, Deadline(60), lambda: False)

    def wait(name: str) -> None:
        # Only the first one looks, in vain until a turn is free.
        served.append(line.wait(lambda wait_s: name if is_free.wait(wait_s) else None, limit))

    threads = []
    for n, name in enumerate("abc", 1):
        threads.append(threading.Thread(target=wait, args=(name,)))
        threads[-1].start()
        eventually(lambda n=n: len(line._waiting) == n)
    is_free.set()
    for thread in threads:
        thread.join(30)

    assert served == ["a", "b", "c"]
    assert not line._waiting


def test_a_query_that_gives_up_lets_the_next_one_look() -> None:
    line, limit = Line("other queries"), Limit(60, Deadline(60), lambda: False)
    over = Limit(0, Deadline(0), lambda: False)

    with pytest.raises(QueryPostponedError, match="has waited 0 s for other queries"):
        line.wait(lambda _: None, over)

    assert line.wait(lambda _: "turn", limit) == "turn"


@pytest.mark.parametrize(
    "sql", [ENDLESS, f"SELECT regexp_matches('a', i::text) FROM ({ENDLESS}) t(i)"]
)
def test_a_query_keeps_its_limit_when_its_caller_is_unknown(
    database: Database, sql: str, caplog: pytest.LogCaptureFixture
) -> None:
    def is_abandoned() -> bool:
        raise ValueError("the call is over")

    with pytest.raises(QueryError, match="did not end within 1 s"):
        database.query(sql, timeout_s=1, is_abandoned=is_abandoned)

    assert "cannot tell" in caplog.text


def test_a_limit_that_is_over_before_the_query_begins_holds(database: Database) -> None:
    with pytest.raises(QueryError, match="did not end within 0 s"):
        database.query(ENDLESS, timeout_s=0)

    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


def test_a_query_that_has_no_thread_for_its_limit_keeps_no_turn(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", Refused)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                database.query("SELECT 1", timeout_s=30)

    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


def test_what_runs_and_what_waits_is_ended_when_the_database_closes(
    database: Database, eventually: Eventually
) -> None:
    running = [run_in_thread(database, ENDLESS) for _ in range(2)]
    eventually(database._queries._free.empty)
    running.append(run_in_thread(database, ENDLESS))

    database.close()

    for thread, said in running:
        thread.join(30)
        assert len(said) == 1
    database.close()


def test_a_database_closes_beside_a_query_that_is_being_parsed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing = threading.Event()

    def slowly(cursor: duckdb.DuckDBPyConnection, *_: str, **__: frozenset[str]) -> bool:
        parsing.set()
        cursor.execute("SELECT sum(hash(i)) FROM range(50_000_000) AS n(i)").fetchall()
        return True

    monkeypatch.setattr(runner, "is_interruptible", slowly)
    thread, said = run_in_thread(database, "SELECT 1")
    assert parsing.wait(60)

    database.close()

    thread.join(60)
    assert len(said) == 1


def test_a_file_that_is_exported_is_ended_when_the_database_closes(
    database: Database, eventually: Eventually
) -> None:
    begun, said = threading.Event(), []

    def write(cursor: duckdb.DuckDBPyConnection) -> None:
        begun.set()
        cursor.execute(ENDLESS)

    def export() -> None:
        try:
            database._export(write)
        except StorageError as error:
            said.append(str(error))

    thread = threading.Thread(target=export)
    thread.start()
    eventually(begun.is_set)

    database.close()
    thread.join(30)

    assert len(said) == 1


@pytest.mark.parametrize("limits", [{"result_bytes": MIB}], indirect=True)
def test_answer_has_a_limit(database: Database) -> None:
    with pytest.raises(QueryError, match="larger than 1 MiB"):
        database.query("SELECT * FROM range(1000000)", timeout_s=30)

    # What was left to read keeps nobody from the next query on the same connection.
    assert database.query("SELECT 1 AS n", timeout_s=30)["n"].to_pylist() == [1]


def test_a_query_without_a_turn_says_so(database: Database, eventually: Eventually) -> None:
    running = [run_in_thread(database, ENDLESS) for _ in range(2)]
    eventually(database._queries._free.empty)

    with pytest.raises(QueryPostponedError, match="has waited"):
        database.query("SELECT 1", timeout_s=0.1)

    database._queries.stop()
    for thread, said in running:
        thread.join()
        assert "stopped" in said[0]
    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


def test_a_query_gets_no_more_memory_than_its_share(database: Database) -> None:
    greedy = "SELECT string_agg(i::VARCHAR) FROM range(60000000) AS r(i)"

    with pytest.raises(QueryError, match="memory"):
        database.query(greedy, timeout_s=60)

    assert database.query("SELECT 1", timeout_s=30).num_rows == 1


def test_dispatch_goes_on_beside_greedy_queries(database: Database) -> None:
    greedy = "SELECT list(i ORDER BY hash(i)) FROM range(60000000) AS r(i)"
    running = [run_in_thread(database, greedy) for _ in range(2)]

    for i in range(20):
        dispatch(database, [messages(*(message(2, 0, 100 * i + j) for j in range(100)))])
        assert len(database.index(2, 0, start=0, stop=9000).row) == 100 * (i + 1)

    database._queries.stop()
    for thread, said in running:
        thread.join()
        assert "memory" in said[0]


@pytest.mark.parametrize("limits", [{"stop_s": 0.1}], indirect=True)
def test_a_query_that_outlives_its_runner_lets_the_database_go(database: Database) -> None:
    queries = database._queries
    begun, may_end = threading.Event(), threading.Event()
    cursors: list[duckdb.DuckDBPyConnection] = []

    def work(cursor: duckdb.DuckDBPyConnection) -> None:
        cursors.append(cursor)
        begun.set()
        may_end.wait(20)

    limit = Limit(60, Deadline(60), lambda: False)
    thread = threading.Thread(target=queries._in_turn, args=(work, limit))
    thread.start()
    assert begun.wait(20)
    queries.close()

    may_end.set()
    thread.join(20)

    with pytest.raises(duckdb.ConnectionException):
        cursors[0].execute("SELECT 1")
