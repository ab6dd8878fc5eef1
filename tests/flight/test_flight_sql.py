"""Flight SQL with Arrow's own clients: ADBC's driver, and pyarrow for what it never sends."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import adbc_driver_flightsql.dbapi as adbc
import adbc_driver_manager
import pyarrow as pa
import pytest
from google.protobuf import any_pb2
from pyarrow import flight

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import sql_catalog, sql_messages
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.conftest import Eventually

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
#: Columns of messages that a star leaves out.
UNSTARRED = {"body", "properties"}
#: One of each type that a query can return.
TYPES = (
    *("true", "1::TINYINT", "1::UTINYINT", "1::BIGINT", "1::UBIGINT", "sum(1::BIGINT)"),
    *("0.5::FLOAT", "0.1::DOUBLE", "1.25", "'ä'", "NULL", "DATE '2026-03-07'", "TIME '02:03:04'"),
    *("TIMESTAMP '2026-03-07 02:00'", "TIMESTAMPTZ '2026-03-07 02:00+01'", "INTERVAL 1 DAY"),
    *("[1, NULL]", "{'a': 1}", "[['a']]"),
)
#: These need a process of their own.
RARE = (r"'\xAA'::BLOB", "'a'::ENUM('a', 'b')", "MAP {'a': 1}", "1::HUGEINT")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    home: Path = tmp_path_factory.mktemp("sql") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("orders", queues=2)
        broker.create_group("billing", max_attempts=1)
        broker.send(
            "orders",
            pa.table({"body": [b"x"] * 20, "tag": ["eu", "us"] * 10, "keys": [["1", "2"]] * 20}),
        )
        broker.receive("billing", "orders", limit=5)
        yield broker


@pytest.fixture(scope="module")
def endpoint(broker: Broker) -> Iterator[FlightServer]:
    with FlightServer(broker) as server:
        yield server


@pytest.fixture(scope="module")
def connection(endpoint: FlightServer) -> Iterator[adbc.Connection]:
    with adbc.connect(f"grpc://{endpoint.address}", autocommit=True) as connection:
        yield connection


@pytest.fixture
def client(endpoint: FlightServer) -> Iterator[flight.FlightClient]:
    with flight.connect(f"grpc://{endpoint.address}") as client:
        yield client


def select(connection: adbc.Connection, sql: str, values: Sequence[Any] | None = None) -> pa.Table:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetch_arrow_table()


def of_query(sql: str) -> flight.FlightDescriptor:
    return of(sql_messages.new("CommandStatementQuery", query=sql))


def of(command: Any) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(sql_messages.write_any(command))


# -------------------------------------------------------------------------------------- answers


def test_each_view_has_the_rows_of_the_verb(connection: adbc.Connection, broker: Broker) -> None:
    for view, columns in broker.sql_views().items():
        sql = f"SELECT * FROM {view} ORDER BY ALL"
        found = select(connection, sql)

        in_star = [each for each in columns if view != "messages" or each.name not in UNSTARRED]
        assert found.schema == pa.schema(in_star)
        assert found.equals(broker.sql(sql))


@pytest.mark.parametrize("expressions", [TYPES, RARE])
def test_values_of_each_type_arrive(
    connection: adbc.Connection, broker: Broker, expressions: Sequence[str]
) -> None:
    sql = f"SELECT {', '.join(f'{each} AS c{n}' for n, each in enumerate(expressions))}"

    assert select(connection, sql).to_pylist() == broker.sql(sql).to_pylist()


def test_a_query_sees_what_was_answered_before(connection: adbc.Connection, broker: Broker) -> None:
    broker.create_topic("fresh", queues=1)
    broker.send("fresh", pa.table({"body": [b"x"] * 3}))

    found = select(connection, "SELECT count(*) AS n FROM main.messages WHERE topic = 'fresh'")

    assert found["n"].to_pylist() == [3]


def test_parameters_take_values(connection: adbc.Connection) -> None:
    sql = "SELECT topic, tag FROM messages WHERE topic = ? AND tag = ? AND queue_offset < ?"

    found = select(connection, sql, ["orders", "eu", 100])

    assert found.to_pylist() == [{"topic": "orders", "tag": "eu"}] * 10
    assert select(connection, sql, ["o'; DROP", "eu", 100]).num_rows == 0


def test_a_prepared_statement_runs_again_with_other_values(connection: adbc.Connection) -> None:
    with connection.cursor() as cursor:
        parameters = cursor.adbc_prepare("SELECT ? AS a")
        found = []
        for value in (1, 2):
            cursor.execute("SELECT ? AS a", [value])
            found += cursor.fetchall()

    assert parameters is not None
    assert len(parameters) == 1
    assert found == [(1,), (2,)]


def test_the_state_of_a_moment_is_read(connection: adbc.Connection) -> None:
    before = select(connection, "SELECT * FROM in_flight_at(0)")
    now = select(connection, "SELECT * FROM in_flight_at(now())")

    assert (before.num_rows, now.num_rows) == (0, 5)


def test_pandas_reads_through_adbc(connection: adbc.Connection) -> None:
    pandas = pytest.importorskip("pandas")

    frame = pandas.read_sql("SELECT topic, tag FROM messages WHERE topic = 'orders'", connection)

    assert list(frame.columns) == ["topic", "tag"]
    assert len(frame) == 20


def test_a_large_answer_arrives_in_small_pieces(client: flight.FlightClient) -> None:
    rows = 2_000_000
    info = client.get_flight_info(of_query(f"SELECT i, i + 1 AS j FROM range({rows}) t(i)"))

    sizes, first = [], 0
    for chunk in client.do_get(info.endpoints[0].ticket):
        assert chunk.data["i"][0].as_py() == first
        first += chunk.data.num_rows
        sizes.append(chunk.data.nbytes)

    assert first == rows
    assert max(sizes) <= limits.FLIGHT_SQL_PIECE_BYTES


def test_unread_answers_have_a_limit_in_bytes(broker: Broker, eventually: Eventually) -> None:
    allowed = limits.FlightLimits(calls_bytes=48 * limits.MIB)
    sql = "SELECT i, i + 1 AS j FROM range(2000000) t(i)"  # 32 MB

    def is_answered(client: flight.FlightClient) -> bool:
        (end,) = client.get_flight_info(of_query(sql)).endpoints
        with contextlib.suppress(pa.ArrowInvalid):
            client.do_get(end.ticket).read_all()
            return True
        return False

    with (
        FlightServer(broker, allowed=allowed) as server,
        flight.connect(f"grpc://{server.address}") as client,
    ):
        (end,) = client.get_flight_info(of_query(sql)).endpoints
        unread = client.do_get(end.ticket)
        unread.read_chunk()
        (end,) = client.get_flight_info(of_query(sql)).endpoints
        with pytest.raises(pa.ArrowInvalid, match="Calls under way hold"):
            client.do_get(end.ticket).read_all()

        unread.cancel()
        eventually(lambda: is_answered(client))


def test_an_answer_that_is_too_large_is_refused(connection: adbc.Connection) -> None:
    with pytest.raises(adbc_driver_manager.ProgrammingError, match="larger than 256 MiB"):
        select(connection, "SELECT i, i, i FROM range(20000000) t(i)")


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELEC 1", "does not parse at line 1"),
        ("SELECT * FROM nope", "There is no view nope"),
        ("SELECT * FROM store.topics", "not a view"),
        ("SELECT nope FROM messages", "nope"),
        ("SELECT * FROM read_text('/etc/passwd')", "not allowed"),
        ("DELETE FROM messages", "must be a SELECT, not DELETE"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("BEGIN", "must be a SELECT"),
    ],
)
def test_a_bad_statement_says_why(connection: adbc.Connection, sql: str, why: str) -> None:
    with pytest.raises(adbc_driver_manager.ProgrammingError, match=why) as caught:
        select(connection, sql)
    assert caught.value.status_code == adbc_driver_manager.AdbcStatusCode.INVALID_ARGUMENT


def test_writing_and_transactions_are_refused(connection: adbc.Connection) -> None:
    refused = adbc_driver_manager.NotSupportedError
    with connection.cursor() as cursor:
        with pytest.raises(refused, match="writing of tables"):
            cursor.adbc_ingest("t", pa.table({"a": [1]}))
        with pytest.raises(refused, match="other than SELECT"):
            cursor.executemany("SELECT ?", [[1], [2]])


@pytest.mark.parametrize(
    "action",
    [
        *("BeginTransaction", "EndTransaction", "BeginSavepoint", "CreatePreparedSubstraitPlan"),
        *("CancelQuery", "SetSessionOptions", "CloseSession", "nope", ""),
    ],
)
def test_other_actions_are_refused(client: flight.FlightClient, action: str) -> None:
    with pytest.raises(NotImplementedError, match="does not support"):
        list(client.do_action(flight.Action(action, b"")))


def test_a_statement_in_a_transaction_is_refused(client: flight.FlightClient) -> None:
    command = sql_messages.new("CommandStatementQuery", query="SELECT 1", transaction_id=b"1")

    with pytest.raises(NotImplementedError, match="transactions"):
        client.get_flight_info(of(command))


def in_any(data: bytes, name: str = "CommandStatementQuery") -> bytes:
    url = f"type.googleapis.com/arrow.flight.protocol.sql.{name}"
    return bytes(any_pb2.Any(type_url=url, value=data).SerializeToString())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (b"", "not one of Flight SQL"),
        (b"\xff\xff\xff", "not a"),
        (b'{"verb": "sql"}', "not a"),
        (in_any(b"\x0a\x02\xff\xfe"), "not a CommandStatementQuery"),
        (in_any(b"\x0a\x7fshort"), "not a CommandStatementQuery"),
        (in_any(b"", "CommandNope"), "does not support CommandNope"),
        (in_any(b"", "CommandStatementUpdate"), "other than SELECT"),
        (in_any(b"\x0a" + b"a" * 100, "TicketStatementQuery"), "not a TicketStatementQuery"),
        (any_pb2.Any(type_url="type.googleapis.com/x" * 50).SerializeToString(), "not one of"),
        (
            in_any(
                sql_messages.new("CommandStatementQuery", query="x" * 600_000).SerializeToString()
            ),
            "600000 characters",
        ),
    ],
)
def test_a_message_that_is_no_command_is_refused(
    client: flight.FlightClient, command: bytes, why: str
) -> None:
    descriptor = flight.FlightDescriptor.for_command(command)
    for ask in (client.get_flight_info, client.get_schema):
        with pytest.raises((pa.ArrowInvalid, NotImplementedError), match=why):
            ask(descriptor)
    with pytest.raises((pa.ArrowInvalid, NotImplementedError)):
        client.do_get(flight.Ticket(command)).read_all()
    with pytest.raises((pa.ArrowInvalid, NotImplementedError)):
        list(client.do_action(flight.Action("CreatePreparedStatement", command)))


def test_an_any_in_an_any_is_not_opened(client: flight.FlightClient) -> None:
    nested = in_any(in_any(b"", "CommandGetTables"))  # as a query: its text is the type's name

    with pytest.raises(pa.ArrowInvalid, match="must be a SELECT"):
        client.get_schema(flight.FlightDescriptor.for_command(nested))


def test_a_message_of_more_than_4_mib_is_refused(client: flight.FlightClient) -> None:
    with pytest.raises(pa.ArrowInvalid, match="larger than max"):
        client.get_flight_info(of_query("x" * 5_000_000))


def test_a_ticket_that_was_changed_is_refused(client: flight.FlightClient) -> None:
    (end,) = client.get_flight_info(of_query("SELECT 12345")).endpoints
    changed = end.ticket.ticket.replace(b"12345", b"54321")

    with pytest.raises(pa.ArrowInvalid, match="not a ticket of the running broker"):
        client.do_get(flight.Ticket(changed)).read_all()
    assert client.do_get(end.ticket).read_all().to_pylist() == [{"12345": 12345}]


# ----------------------------------------------------------------------------------- parameters


def prepared(client: flight.FlightClient, sql: str) -> Any:
    request = sql_messages.new("ActionCreatePreparedStatementRequest", query=sql)
    action = flight.Action("CreatePreparedStatement", sql_messages.write_any(request))
    (answer,) = client.do_action(action)
    _, made = sql_messages.read_any(answer.body.to_pybytes())
    return sql_messages.new(
        "CommandPreparedStatementQuery", prepared_statement_handle=made.prepared_statement_handle
    )


def bind(client: flight.FlightClient, command: Any, values: pa.Table, **options: Any) -> Any:
    call = flight.FlightCallOptions(**options)
    writer, reader = client.do_put(of(command), values.schema, call)
    with writer:
        writer.write_table(values)
        writer.done_writing()
        answer = reader.read()
    assert answer is not None
    found = sql_messages.read("DoPutPreparedStatementResult", answer.to_pybytes())
    return sql_messages.new(
        "CommandPreparedStatementQuery", prepared_statement_handle=found.prepared_statement_handle
    )


def test_values_are_in_the_new_handle_alone(client: flight.FlightClient) -> None:
    command = prepared(client, "SELECT ? AS a")
    filled = bind(client, command, pa.table({"x": [7]}))

    (end,) = client.get_flight_info(of(filled)).endpoints

    assert client.do_get(end.ticket).read_all().to_pylist() == [{"a": 7}]
    assert client.get_schema(of(filled)).schema.names == ["a"]
    again = bind(client, filled, pa.table({"x": [8]}))
    (end,) = client.get_flight_info(of(again)).endpoints
    assert client.do_get(end.ticket).read_all().to_pylist() == [{"a": 8}]
    with pytest.raises(pa.ArrowInvalid, match="1 parameters without values"):
        client.get_flight_info(of(command))


@pytest.mark.parametrize(
    ("values", "options", "why"),
    [
        (pa.table({"a": [1, 2]}), {}, "2 rows of parameters"),
        (pa.table({"a": [1], "b": [2]}), {}, "2 values are bound"),
        (pa.table({"a": [[1]]}), {}, "cannot be bound"),
        (pa.table({"a": ["x" * 3_000_000]}), {}, "more than 2097152 bytes"),
        (
            pa.table({"a": ["x" * 10_000]}),
            {"write_options": pa.ipc.IpcWriteOptions(compression="lz4")},
            "compressed",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(
    client: flight.FlightClient, values: pa.Table, options: dict[str, Any], why: str
) -> None:
    command = prepared(client, "SELECT ?")

    with pytest.raises(pa.ArrowInvalid, match=why):
        bind(client, command, values, **options)


def test_a_put_of_anything_else_is_refused(client: flight.FlightClient) -> None:
    update = sql_messages.new("CommandStatementQuery", query="SELECT 1")

    with pytest.raises(NotImplementedError, match="does not support"):
        bind(client, update, pa.table({"a": [1]}))


# -------------------------------------------------------------------------------------- catalog


def test_tools_find_the_views(connection: adbc.Connection, broker: Broker) -> None:
    (catalog,) = connection.adbc_get_objects(depth="columns").read_all().to_pylist()
    (schema,) = catalog["catalog_db_schemas"]
    tables = {each["table_name"]: each for each in schema["db_schema_tables"]}

    assert (catalog["catalog_name"], schema["db_schema_name"]) == ("", "main")
    assert set(tables) == set(broker.sql_views())
    for name, columns in broker.sql_views().items():
        assert tables[name]["table_type"] == "VIEW"
        found = [each["column_name"] for each in tables[name]["table_columns"]]
        assert found == columns.names


def test_tools_filter_the_views(connection: adbc.Connection) -> None:
    def found(**filters: Any) -> list[str]:
        rows = connection.adbc_get_objects(depth="tables", **filters).read_all().to_pylist()
        return [
            table["table_name"]
            for catalog in rows
            for schema in catalog["catalog_db_schemas"] or ()
            for table in schema["db_schema_tables"] or ()
        ]

    assert found(table_name_filter="sink%") == ["sink_files", "sink_replacements"]
    assert found(table_name_filter="la_") == ["lag"]
    assert found(table_name_filter=r"in\_flight") == ["in_flight"]
    assert found(table_name_filter="%" * 500 + "a_%b" * 100) == []
    assert found(table_types_filter=["TABLE"]) == []
    assert found(db_schema_filter="other") == []


def test_a_table_has_a_schema(connection: adbc.Connection, broker: Broker) -> None:
    assert connection.adbc_get_table_schema("lag") == broker.sql_views()["lag"]
    assert connection.adbc_get_table_types() == ["VIEW"]
    with connection.cursor() as cursor:
        assert cursor.adbc_execute_schema("SELECT 1 AS a FROM lag").names == ["a"]


def test_facts_about_the_server_are_told(
    connection: adbc.Connection, client: flight.FlightClient
) -> None:
    info = client.get_flight_info(of(sql_messages.new("CommandGetSqlInfo")))
    facts = client.do_get(info.endpoints[0].ticket).read_all()
    facts.validate(full=True)
    by_number = dict(zip(*facts.to_pydict().values(), strict=True))

    assert info.schema == facts.schema
    assert set(by_number) >= {*range(6), 8, 9, *range(500, 577)}
    assert by_number[3] is True
    assert by_number[504] == '"'
    assert by_number[563] is False
    assert by_number[528] == 6
    assert connection.adbc_get_info()["vendor_name"] == "rmq_pipeline"


#: The kinds of FlightSql.proto's enum SqlInfo, which JDBC's driver casts to without a check.
KINDS = {
    "string_value": (*range(3), 504, 513, 514, 529, 530, 531),
    "bool_value": (
        *(3, 4, 5, 9, 10, 500, 501, 502, 506, 515, 516, 518, 519, 520, 521, 523, 524, 527, 532),
        *(536, 537, 539, 556, 563, 565, 566, *range(572, 577)),
    ),
    "bigint_value": (*range(541, 556), *range(557, 563)),
    "int32_bitmask": (
        *(8, 100, 101, 503, 505, 507, 522, 525, 526, 528, 533, 534, 535, 538, 540, 564),
        *range(567, 572),
    ),
    "string_list": range(508, 513),
    "int32_to_int32_list_map": (517,),
}


def test_each_fact_has_the_kind_of_the_protocol() -> None:
    facts = sql_catalog.answer(
        "CommandGetSqlInfo", sql_messages.new("CommandGetSqlInfo"), views=dict
    )
    (values,) = facts["value"].chunks
    names = [values.type[code].name for code in values.type_codes.to_pylist()]

    found = dict(zip(facts["info_name"].to_pylist(), names, strict=True))

    assert found == {number: kind for kind, numbers in KINDS.items() for number in numbers}


@pytest.mark.parametrize(
    "name",
    [
        *("CommandGetCatalogs", "CommandGetXdbcTypeInfo", "CommandGetPrimaryKeys"),
        *("CommandGetExportedKeys", "CommandGetImportedKeys", "CommandGetCrossReference"),
    ],
)
def test_there_are_no_keys_and_catalogs(client: flight.FlightClient, name: str) -> None:
    info = client.get_flight_info(of(sql_messages.new(name)))
    answer = client.do_get(info.endpoints[0].ticket).read_all()

    assert answer.num_rows == 0
    assert answer.schema == info.schema


# -------------------------------------------------------------------------------------- the end


def running(broker: Broker) -> int:
    return 2 - broker._engine.database._queries._free.qsize()


def test_a_query_that_is_cancelled_ends(
    connection: adbc.Connection, broker: Broker, eventually: Eventually
) -> None:
    said: list[Exception] = []
    with connection.cursor() as cursor:

        def run() -> None:
            try:
                cursor.execute(ENDLESS)
            except adbc_driver_manager.Error as error:
                said.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: running(broker) == 1)
        cursor.adbc_cancel()
        thread.join(30)

        assert said
        eventually(lambda: running(broker) == 0)


def test_a_query_ends_by_its_flight_info(
    client: flight.FlightClient, endpoint: FlightServer, broker: Broker, eventually: Eventually
) -> None:
    info = client.get_flight_info(of_query(ENDLESS))
    said: list[Exception] = []

    def run() -> None:
        try:
            client.do_get(info.endpoints[0].ticket).read_all()
        except flight.FlightCancelledError as error:
            said.append(error)

    def cancel(other: flight.FlightClient) -> Any:
        request = sql_messages.new(
            "CancelFlightInfoRequest", info=sql_messages.read("FlightInfo", info.serialize())
        )
        (answer,) = other.do_action(flight.Action("CancelFlightInfo", request.SerializeToString()))
        return sql_messages.read("CancelFlightInfoResult", answer.body.to_pybytes()).status

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: running(broker) == 1)
    with pytest.raises(pa.ArrowInvalid, match="is being used"):
        client.do_get(info.endpoints[0].ticket).read_all()
    with flight.connect(f"grpc://{endpoint.address}") as other:
        assert cancel(other) == 1
        thread.join(30)

        assert "cancelled by CancelFlightInfo" in str(said[0])
        eventually(lambda: running(broker) == 0)
        with pytest.raises(KeyError, match="not running"):
            cancel(other)


def test_a_query_that_is_stopped_for_the_broker_may_be_repeated(
    client: flight.FlightClient, broker: Broker, eventually: Eventually
) -> None:
    (end,) = client.get_flight_info(of_query(ENDLESS)).endpoints
    said: list[Exception] = []

    def run() -> None:
        try:
            client.do_get(end.ticket).read_all()
        except pa.ArrowInvalid as error:
            said.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: running(broker) == 1)
    broker._engine.database.stop_queries()
    thread.join(30)

    assert "needed its memory or a checkpoint. Wait and retry." in str(said[0])
    assert "RESOURCE_EXHAUSTED" in str(said[0])


def test_a_broker_that_stops_refuses_queries(broker: Broker) -> None:
    with FlightServer(broker) as server, flight.connect(f"grpc://{server.address}") as client:
        server.refuse()

        with pytest.raises(flight.FlightUnavailableError, match="is stopping"):
            client.get_flight_info(of_query("SELECT 1"))
