"""Bodies and properties in SQL: read where a query names them, and always those of its rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import bodies
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import QueryError
from rmq_pipeline.limits import MIB
from tests.broker.sealed_home import messages, open_broker, seal_all

COLUMNS = [name for name in schema.READ.names if name not in {"body", "properties"}]
#: The same in the broker, and in a DuckDB whose messages has the columns.
QUERIES = (
    "SELECT queue_offset, decode(body) FROM messages WHERE topic = 'orders' AND queue_offset < 4",
    "SELECT body FROM main.messages WHERE topic = 'orders' AND queue_id = 1 AND queue_offset = 2",
    "SELECT m.\"BODY\", m.properties['n'] FROM messages AS m WHERE m.queue_offset IN (1, 3)",
    "SELECT count(*) FROM messages WHERE topic = 'orders' AND decode(body)::JSON ->> 'id' = '7'",
    "SELECT topic, count(body), min(body) FROM messages GROUP BY 1 HAVING max(body) > 'a'::BLOB",
    (
        "SELECT i.consumer_group, m.body FROM in_flight i JOIN messages m USING (topic, queue_id,"
        " queue_offset) WHERE i.consumer_group = 'billing'"
    ),
    (
        "SELECT m.queue_id, m.body FROM messages m LEFT JOIN in_flight i USING (message_id)"
        " WHERE i.message_id IS NULL AND m.topic = 'orders' AND m.queue_offset >= 8"
    ),
    (
        "SELECT i.queue_offset, m.body FROM in_flight i LEFT JOIN messages m"
        " ON i.message_id = m.message_id AND decode(m.body, 'replace') LIKE '%\"id\": 1,%'"
    ),
    (
        "SELECT i.queue_offset, m.body FROM in_flight i FULL JOIN messages m"
        " ON i.message_id = m.message_id AND decode(m.body, 'replace') LIKE '%1%'"
        " WHERE m.tag IS NULL"
    ),
    (
        "SELECT i.queue_offset FROM in_flight i ANTI JOIN messages m"
        " ON i.message_id = m.message_id AND decode(m.body, 'replace') LIKE '%\"id\": 1,%'"
    ),
    (
        "SELECT i.queue_offset, (SELECT m.body FROM messages m WHERE m.message_id = i.message_id)"
        " FROM in_flight i"
    ),
    (
        "SELECT queue_offset FROM in_flight i WHERE EXISTS (SELECT 1 FROM messages m"
        " WHERE m.message_id = i.message_id AND decode(body, 'replace') LIKE '%3%')"
    ),
    (
        "WITH b AS (SELECT topic, queue_offset, body FROM messages WHERE topic = 'other')"
        " SELECT b.body, count(*) FROM b JOIN messages m USING (queue_offset) GROUP BY 1"
    ),
    (
        "SELECT a.queue_offset, b.body FROM messages a JOIN messages b ON a.body = b.body"
        " WHERE a.topic = 'other' AND b.topic = 'other'"
    ),
    "SELECT a.message_id FROM messages a JOIN messages b USING (body) WHERE a.topic = 'orders'",
    "SELECT body FROM messages WHERE topic = 'other' UNION ALL BY NAME SELECT 'x'::BLOB AS body",
    "SELECT body, rank() OVER (ORDER BY body) FROM messages WHERE topic = 'orders'",
    (
        "SELECT -queue_offset AS queue_offset, body FROM messages WHERE topic = 'orders' AND"
        " queue_id = 0 ORDER BY queue_offset LIMIT 2"
    ),
    (
        "SELECT i.queue_offset, m.body FROM in_flight i JOIN messages m ON m.queue_offset ="
        " 9 - i.queue_offset AND m.queue_id = i.queue_id AND m.topic = i.topic"
        " ORDER BY queue_offset, m.queue_id LIMIT 1"
    ),
    (
        "SELECT queue_id, body FROM messages WHERE topic = 'orders' ORDER BY queue_offset DESC,"
        " queue_id LIMIT 3 OFFSET 2"
    ),
    (
        "SELECT topic, decode(body) FROM messages WHERE topic = 'orders' GROUP BY ALL ORDER BY 2"
        " LIMIT 2"
    ),
    "SELECT queue_offset AS o, body FROM messages WHERE o = 3 AND topic = 'orders'",
    "SELECT q.body FROM (SELECT body, topic AS t FROM messages) q WHERE t = 'other'",
    (
        "WITH RECURSIVE r AS (SELECT 0 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3)"
        " SELECT n, m.body FROM r JOIN messages m ON m.queue_offset = n AND m.topic = 'other'"
    ),
    "SELECT max(body) FROM messages WHERE topic = 'orders' LIMIT 1",
    (
        "SELECT x.body FROM (SELECT * FROM in_flight ORDER BY queue_offset LIMIT 1) i,"
        " LATERAL (SELECT body FROM messages m WHERE m.message_id = i.message_id) x"
    ),
    "SELECT detail AS body FROM (SELECT 'a' AS detail), messages ORDER BY body LIMIT 1",
    "SELECT body FROM messages WHERE topic = 'nowhere'",
    "SELECT t.body FROM main.messages t ORDER BY ALL LIMIT 2",
    (
        "SELECT i.queue_offset, m.body"
        " FROM in_flight i ASOF JOIN messages AS m USING (topic, queue_offset)"
    ),
    "SELECT 'é', m.body -- messages\n FROM /* body */ main . \"messages\" m WHERE topic = 'other'",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Topic orders, half of it sealed, topic other, and three leased messages."""
    with open_broker(tmp_path_factory.mktemp("bodies") / "home") as broker:
        broker.create_topic("orders", queues=2)
        broker.create_topic("other", queues=1)
        broker.create_group("billing")
        broker.send("orders", orders(range(10)))
        seal_all(broker)
        broker.send("orders", orders(range(10, 20)))
        broker.send("other", pa.table({"body": [b"\xff\x00x", b"a", "é".encode()]}))
        broker.ack(broker.receive("billing", "orders", limit=5).slice(0, 2))
        yield broker


def orders(ids: Sequence[int]) -> pa.Table:
    return pa.table(
        {
            "body": [f'{{"id": {i}, "name": "é"}}'.encode() for i in ids],
            "tag": ["eu" if i % 2 else None for i in ids],
            "properties": pa.array([[("n", str(i))] for i in ids], schema.PROPERTIES),
        }
    )


@pytest.fixture(scope="module")
def oracle(broker: Broker) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with the views as tables, and the columns in messages."""
    with duckdb.connect() as connection:
        read = []
        for topic in ("orders", "other"):
            for offsets in broker.describe_topic(topic)["offsets"]:
                found = broker.read(topic, offsets["queue_id"], offset=0, limit=100)
                read.append(found.append_column("topic", pa.array([topic] * len(found))))
        given = {"messages": pa.concat_tables(read), "in_flight": broker.sql("FROM in_flight")}
        for name, table in given.items():
            connection.register("given", table)
            connection.execute(f"CREATE TABLE {name} AS FROM given")
        yield connection


def rows(table: pa.Table) -> list[str]:
    return [str(list(row.values())) for row in table.to_pylist()]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_has_the_answer_that_it_has_where_messages_has_bodies(
    broker: Broker, oracle: duckdb.DuckDBPyConnection, query: str
) -> None:
    found, expected = broker.sql(query), oracle.sql(query).to_arrow_table()

    assert found.column_names == expected.column_names
    assert sorted(rows(found)) == sorted(rows(expected))


# ---------------------------------------------------------------------------------------- shape


def test_a_star_has_no_body(broker: Broker) -> None:
    [usual] = {tuple(broker.sql("SELECT * FROM messages LIMIT 1").column_names)}

    for query, more in (
        ("SELECT * FROM messages WHERE body IS NOT NULL LIMIT 1", ()),
        ("SELECT *, body FROM messages LIMIT 1", ("body",)),
        ("SELECT m.*, m.body, properties FROM messages AS m LIMIT 1", ("body", "properties")),
        ("SELECT * REPLACE (lower(topic) AS topic) FROM messages WHERE body IS NOT NULL", ()),
        ("SELECT * FROM (SELECT *, body FROM messages LIMIT 1)", ("body",)),
        ("SELECT * EXCLUDE (body) FROM messages WHERE body IS NOT NULL LIMIT 1", ()),
    ):
        assert tuple(broker.sql(query).column_names) == (*usual, *more), query
    for query in (
        "SELECT * EXCLUDE (topic), body FROM messages LIMIT 1",
        "SELECT * EXCLUDE topic, body FROM main.messages LIMIT 1",
    ):
        assert tuple(broker.sql(query).column_names) == (*usual[1:], "body"), query


def test_a_body_as_text_is_utf8(broker: Broker) -> None:
    query = "SELECT body::VARCHAR, CAST(m.body AS TEXT) AS t FROM messages m WHERE topic = 'other'"

    found = broker.sql(query)

    assert found.column_names == ["CAST(body AS VARCHAR)", "t"]
    assert sorted(found["t"].to_pylist()) == [r"\xFF\x00x", "a", "é"]
    assert found["t"] == found[0]
    json = "SELECT json_extract(body::VARCHAR, '$.id') AS id, body::JSON ->> '$.name' AS name "
    found = broker.sql(json + "FROM messages WHERE topic = 'orders' AND queue_offset = 0")
    assert [*found["name"].to_pylist(), *sorted(found["id"].to_pylist(), key=int)][:2] == ["é"] * 2


def test_a_query_without_bodies_is_as_before(broker: Broker) -> None:
    """It starts no process and needs no right, even if something else in it has the name."""
    for query in (
        "SELECT m FROM messages AS m LIMIT 1",
        "SELECT d.properties FROM dead_letters AS d JOIN messages USING (message_id)",
        "SELECT properties FROM dead_letters JOIN messages USING (message_id)",
        "WITH messages AS (SELECT 1 AS body) SELECT body FROM messages",
        "SELECT topic AS body FROM messages ORDER BY body LIMIT 1",
        "SELECT 'body of messages' AS text",
    ):
        assert "body" not in str(broker.sql(query).schema.field(0).type), query


@pytest.mark.parametrize(
    ("query", "told"),
    [
        pytest.param(
            f"SELECT body FROM messages WHERE {' AND '.join(['queue_id < 9'] * 3_000)}",
            "too long for one that names bodies",
            id="long",
        ),
        ("SELECT body FROM messages NATURAL JOIN in_flight", "NATURAL JOIN would compare"),
        ("SELECT COLUMNS('.*'), body FROM messages", "COLUMNS"),
        ("FROM messages WHERE body IS NULL", "Write SELECT before FROM"),
        ("SELECT body FROM messages TABLESAMPLE 10%", "sample"),
        ("SELECT body FROM in_flight, messages_", "There is no view"),
        ("SELECT i.body FROM in_flight AS i, messages", "Only messages has the columns body"),
        ("SELECT body FROM lag_at(now())", "Only messages has the columns body"),
        ("SELECT body FROM (SELECT * FROM messages)", "Only messages has the columns body"),
        ("SELECT body FROM messages AS m(a, b)", "Only messages has the columns body"),
        ("SELECT body + 1 FROM messages WHERE topic = 'other'", "BLOB"),
        (
            "SELECT " + " + ".join(["(SELECT count(body) FROM messages)"] * 9),
            "in 9 places; the limit is 8",
        ),
    ],
)
def test_what_is_refused_is_told(broker: Broker, query: str, told: str) -> None:
    with pytest.raises(QueryError, match=told) as caught:
        broker.sql(query)

    assert not any(part in str(caught.value) for part in ("bodies.m", "bodies.t"))


def test_the_columns_are_told_without_the_rows(broker: Broker) -> None:
    found = broker.sql_schema("SELECT m.*, body, properties FROM messages AS m")

    assert found.names[-2:] == ["body", "properties"]
    assert [found.field(name).type for name in found.names[-2:]] == [pa.binary(), schema.PROPERTIES]
    assert broker.sql_views()["messages"].names[-2:] == ["body", "properties"]


# --------------------------------------------------------------------------------------- limits


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def home(tmp_path: Path, clock: ManualClock) -> Iterator[Broker]:
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("orders", queues=1, retention_ms=1_000)
        yield broker


def read_bodies(broker: Broker, where: str = "true") -> list[bytes | None]:
    found = broker.sql(f"SELECT body FROM messages WHERE {where} ORDER BY queue_offset")
    return list(found["body"].to_pylist())


def test_many_messages_are_refused_before_one_is_read(
    home: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = limits.QueryLimits().body_rows
    home.send("orders", pa.table({"body": [b"x"] * (most + 1)}))
    read: list[int] = []

    def counted(*args: Any, **more: Any) -> pa.Table:
        read.append(1)
        return fetch(*args, **more)

    monkeypatch.setattr(bodies, "fetch", counted)
    with pytest.raises(QueryError, match="more than 10000 messages"):
        read_bodies(home)
    assert not read

    assert len(read_bodies(home, f"topic = 'orders' AND queue_offset < {most}")) == most
    # A limit of the rows is a limit of the bodies, and so is a join.
    found = home.sql("SELECT body, queue_offset FROM messages ORDER BY queue_offset DESC LIMIT 20")
    assert found["queue_offset"].to_pylist()[:2] == [most, most - 1]
    home.create_group("billing")
    home.receive("billing", "orders", limit=3)
    found = home.sql("SELECT m.body FROM in_flight JOIN messages AS m USING (message_id)")
    assert found["body"].to_pylist() == [b"x"] * 3


def test_long_bodies_are_refused(home: Broker) -> None:
    for _ in range(17):
        home.send("orders", pa.table({"body": [bytes(4 * MIB - 1024)]}))

    with pytest.raises(QueryError, match="more than 64 MiB of bodies"):
        home.sql("SELECT sum(octet_length(body)) FROM messages")

    sizes = home.sql("SELECT octet_length(body) AS n FROM messages WHERE queue_offset < 15")
    assert sizes["n"].to_pylist() == [4 * MIB - 1024] * 15


def test_the_time_limit_holds_while_bodies_are_read(
    home: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.send("orders", pa.table({"body": [b"x"] * 100}))

    def endless(*_: Any) -> Iterator[pa.Table]:
        table = pa.table({"topic": ["orders"], "queue_id": [0], "queue_offset": [0], "body": [b""]})
        while True:
            yield table

    monkeypatch.setattr(bodies.Bodies, "read", endless)
    with pytest.raises(QueryError, match=r"did not end within 2 s"):
        home.sql("SELECT body FROM messages", timeout_s=2)


# ---------------------------------------------------------------------- messages that are no more


class Between(bodies.Bodies):
    """Does something between the query of the places and the reading of the bodies."""

    happens: Any = None

    def read(self, places: pa.Table, columns: Sequence[str]) -> Iterator[pa.Table]:
        self.happens()
        yield from super().read(places, columns)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> type[Between]:
    class Chosen(Between):
        pass

    monkeypatch.setattr(bodies, "Bodies", Chosen)
    return Chosen


@pytest.mark.every_endpoint
def test_sealed_merged_and_new_messages_have_their_bodies(
    home: Broker, between: type[Between]
) -> None:
    for start in range(0, 100, 10):
        home.send("orders", messages(10, start=start))
        seal_all(home)
    home.send("orders", messages(10, start=100))

    def seal_and_compact() -> None:
        seal_all(home)
        home.compact()

    between.happens = staticmethod(seal_and_compact)
    expected = [f"{i}:".encode() for i in range(110)]

    assert read_bodies(home) == expected
    assert read_bodies(home) == expected


def test_a_message_that_expires_meanwhile_has_no_body(
    home: Broker, between: type[Between], clock: ManualClock
) -> None:
    for start in range(3):
        home.send("orders", messages(1, start=start, body_bytes=MIB))
    seal_all(home)
    assert home.engine.log.first > MIB
    clock.advance(3_600_000)
    home.send("orders", messages(1, start=3))

    def expire() -> None:
        assert home.expire()["rows"] == 3

    between.happens = staticmethod(expire)
    assert read_bodies(home)[:2] == [None, None]

    between.happens = staticmethod(lambda: None)
    assert read_bodies(home) == [b"3:"]


def test_a_topic_that_is_created_again_gives_no_body_of_the_new_one(
    home: Broker, between: type[Between]
) -> None:
    home.send("orders", messages(3))
    seal_all(home)

    def create_again() -> None:
        home.delete_topic("orders")
        home.create_topic("orders", queues=1)
        home.send("orders", messages(3, start=7))

    between.happens = staticmethod(create_again)
    assert [each for each in read_bodies(home) if each] in ([], [b"0:", b"1:", b"2:"])

    between.happens = staticmethod(lambda: None)
    assert read_bodies(home) == [b"7:", b"8:", b"9:"]


def test_another_message_at_the_place_is_not_taken(home: Broker) -> None:
    home.send("orders", messages(2))
    engine: Engine = home.engine
    engine.dispatched()
    places = engine.database.query("SELECT * FROM messages", timeout_s=30)
    topic_id = home.describe_topic("orders")["topic_id"]
    page = engine.database.index(topic_id, 0, start=0, stop=2)
    places = places.select(["topic", "queue_id", "queue_offset"])
    for name, values in (
        ("topic_id", [topic_id] * 2),
        ("message_id", ["another", None]),
        ("position", page.position),
        ("row", page.row),
    ):
        places = places.append_column(name, pa.array(values))

    [found] = bodies.Bodies(engine).read(places, ["body"])

    assert found["body"].to_pylist() == [None, None]
    assert COLUMNS[0] in found.column_names


def test_system_topics_have_bodies(home: Broker) -> None:
    home.create_topic("late", type="delay", queues=1)
    home.send("late", pa.table({"body": [b"later"], "delay_level": [3]}))

    found = home.sql("SELECT topic, body FROM messages WHERE topic LIKE 'SCHEDULE%'")

    assert found.to_pylist() == [{"topic": "SCHEDULE_TOPIC_XXXX", "body": b"later"}]
