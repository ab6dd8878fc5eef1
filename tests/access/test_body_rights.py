"""Bodies in SQL with users: the right to run SQL is not the right to read messages."""

from collections.abc import Callable, Iterator
from typing import Any

import adbc_driver_flightsql.dbapi as adbc
import adbc_driver_manager
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import bodies
from rmq_pipeline.broker.work.reading import fetch
from rmq_pipeline.errors import ForbiddenError
from rmq_pipeline.flight.server import FlightServer
from tests.access.conftest import PASSWORDS, SignIn
from tests.access.verb_rights import CLUSTER

Allow = Callable[..., None]
GET = f"{CLUSTER} get"
READS = ("topic:orders get", "topic:orders sub")
#: Each would show a body, or tell one of something about it.
QUERIES = (
    "SELECT body FROM messages WHERE topic = 'orders'",
    "SELECT \"BODY\" AS x FROM main.messages AS t WHERE topic = 'orders'",
    "SELECT x FROM (SELECT *, m.body AS x FROM messages AS m) WHERE topic = 'orders'",
    "WITH a AS (SELECT *, body FROM messages), b AS (FROM a) SELECT COLUMNS('bo.*') FROM b",
    "SELECT * REPLACE (1 AS queue_id, body AS topic) FROM messages WHERE topic = 'orders'",
    "SELECT m FROM messages AS m WHERE m.body IS NOT NULL",
    "SELECT unnest(m) FROM messages AS m WHERE m.body IS NOT NULL",
    "SELECT to_json(m) FROM messages AS m ORDER BY m.body",
    "SELECT 1 FROM messages WHERE body = 'hello'::BLOB",
    "SELECT count(*) FROM messages GROUP BY body",
    "SELECT a.topic FROM messages AS a JOIN messages AS b USING (body)",
    "SELECT * FROM (SELECT 'x'::BLOB AS body) NATURAL JOIN (SELECT body FROM messages)",
    "SELECT 'x'::BLOB AS body UNION BY NAME SELECT body, topic FROM messages",
    "SELECT (SELECT max(body) FROM messages WHERE topic = t.topic) FROM topics AS t",
    "SELECT 1 FROM topics AS t WHERE EXISTS (SELECT 1 FROM messages AS m WHERE m.body > 'a'::BLOB)",
    "SELECT t.topic, x.body FROM topics AS t, LATERAL (SELECT body FROM messages) AS x",
    "SELECT 1 FROM topics AS t LEFT JOIN messages AS m ON m.body IS NOT NULL",
    "SELECT topic FROM messages ORDER BY body LIMIT 1",
    "SELECT properties FROM messages",
    "SELECT max(m.properties['k']) FROM messages AS m",
    "SELECT lag(body) OVER (ORDER BY queue_offset) FROM messages",
)


@pytest.fixture(scope="module", autouse=True)
def stored(broker: Broker) -> Iterator[None]:
    broker.create_topic("secret", queues=1)
    for topic in ("orders", "secret"):
        broker.send(topic, pa.table({"body": [b"hello"] * 2}))
    yield
    broker.delete_topic("secret")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of messages whose bodies were read."""
    found: list[int] = []

    def counted(*args: Any, **more: Any) -> pa.Table:
        table = fetch(*args, **more)
        found.append(table.num_rows)
        return table

    monkeypatch.setattr(bodies, "fetch", counted)
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_reads_a_body_without_the_rights(
    sign_in: SignIn, allow: Allow, reads: list[int], query: str
) -> None:
    allow(GET)

    with pytest.raises(ForbiddenError, match=r"User ann may not get topic \w+"):
        sign_in("ann").sql(query)

    assert not reads


@pytest.mark.parametrize(
    ("rights", "told"),
    [
        ((), "may not get topic orders"),
        (("topic:orders sub",), "may not get topic orders"),
        (("topic:orders get",), "may not sub topic orders"),
    ],
)
def test_both_rights_are_needed(
    sign_in: SignIn, allow: Allow, reads: list[int], rights: tuple[str, ...], told: str
) -> None:
    allow(GET, *rights)

    with pytest.raises(ForbiddenError, match=told):
        sign_in("ann").sql(QUERIES[0])

    assert not reads


def test_the_rights_are_needed_on_each_topic_that_is_read(
    sign_in: SignIn, allow: Allow, reads: list[int]
) -> None:
    allow(GET, *READS)
    ann = sign_in("ann")

    assert ann.sql(QUERIES[0])["body"].to_pylist() == [b"hello"] * 2
    assert reads == [2]
    with pytest.raises(ForbiddenError, match="may not get topic secret"):
        ann.sql("SELECT body FROM messages")
    assert reads == [2]
    assert sign_in("root").sql("SELECT count(body) AS n FROM messages")["n"].to_pylist() == [4]


def test_bodies_alone_are_not_enough(sign_in: SignIn, allow: Allow) -> None:
    allow(*READS)

    with pytest.raises(ForbiddenError, match="may not get cluster"):
        sign_in("ann").sql(QUERIES[0])


def test_the_rights_of_the_views_are_as_before(
    sign_in: SignIn, allow: Allow, reads: list[int]
) -> None:
    allow(GET)

    for query in ("SELECT * FROM messages", "SELECT m FROM messages AS m", "FROM messages"):
        assert sign_in("ann").sql(query).num_rows == 4, query
    assert not reads


def test_flight_sql_asks_for_the_same_rights(
    endpoint: FlightServer, allow: Allow, reads: list[int]
) -> None:
    sent = {"username": "ann", "password": PASSWORDS["ann"]}
    allow(GET)
    with adbc.connect(f"grpc://{endpoint.address}", db_kwargs=sent, autocommit=True) as connection:
        for query, values in ((QUERIES[0], None), (QUERIES[0] + " AND queue_offset < ?", [9])):
            with pytest.raises(adbc_driver_manager.Error, match="may not get topic orders") as told:
                select(connection, query, values)
            unauthorized = adbc_driver_manager.AdbcStatusCode.UNAUTHORIZED
            assert told.value.status_code == unauthorized
        assert not reads

        allow(GET, *READS)
        assert select(connection, QUERIES[0], None)["body"].to_pylist() == [b"hello"] * 2


def test_flight_sql_tells_the_columns_and_binds_values(endpoint: FlightServer) -> None:
    sent = {"username": "root", "password": PASSWORDS["root"]}
    sql = "SELECT *, body, properties FROM messages WHERE topic = ? AND queue_offset < ?"
    with adbc.connect(f"grpc://{endpoint.address}", db_kwargs=sent, autocommit=True) as connection:
        found = select(connection, sql, ["orders", 1])
        starred = select(connection, "SELECT * FROM messages", None)
        told = connection.adbc_get_table_schema("messages")
        text = select(connection, "SELECT body::VARCHAR FROM messages LIMIT 1", None)

    assert found.schema.types[-2:] == [pa.binary(), schema.PROPERTIES]
    assert found.column_names == [*starred.column_names, "body", "properties"]
    assert found["body"].to_pylist() == [b"hello"]
    assert told.names == found.column_names
    assert text.to_pylist() == [{"CAST(body AS VARCHAR)": "hello"}]


def select(connection: adbc.Connection, query: str, values: list[Any] | None) -> pa.Table:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetch_arrow_table()
