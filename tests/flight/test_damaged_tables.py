"""Tables that are not what they say are refused at the endpoint, and nothing of them is kept."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from rmq_pipeline.verbs import VERBS
from tests.damaged_tables import DAMAGES, Damage
from tests.flight.exchange import refusal
from tests.verb_tables import BESIDE, TABLES

SMALL = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)
NO_OUTCOMES = pa.table(
    {"receipt_handle": pa.array([], pa.string()), "outcome": pa.array([], "str")}
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    home = tmp_path_factory.mktemp("damaged") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_topic("half", type="transaction", queues=1)
        broker.create_group("g")
        yield broker


@pytest.fixture(scope="module")
def endpoint(broker: Broker) -> Iterator[FlightServer]:
    server = FlightServer(broker)
    yield server
    server.shutdown()


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def test_a_column_whose_name_is_no_text_is_refused(endpoint: FlightServer) -> None:
    damaged = stream(pa.table({"body": [b"x"], "colour": [1]})).replace(b"colour", b"\xff\xfecol.")

    refused = refusal(
        endpoint.address, {"verb": "send", "args": {"topic": "t"}}, [("messages", damaged)]
    )

    assert isinstance(refused, errors.TableSchemaError)
    assert "The name of a column" in refused.message


def longer(column: pa.Array) -> pa.Array:
    """The same with two bytes more behind its offsets, or its views: half a number."""
    valid, numbers, *data = column.buffers()
    more = pa.py_buffer(numbers.to_pybytes() + b"\0\0")
    return pa.Array.from_buffers(column.type, len(column), [valid, more, *data])


@pytest.mark.parametrize("of_type", [pa.string(), pa.string_view()])
def test_a_buffer_may_end_with_part_of_a_number(broker: Broker, of_type: pa.DataType) -> None:
    broker.ensure_topic("longer", type="fifo", queues=2)
    texts = longer(pa.array([f"{n}" * 20 for n in range(30)], of_type))
    bodies = longer(pa.array([b"x"] * 30, pa.binary()))
    given = {"body": bodies, **dict.fromkeys(("tag", "message_group"), texts)}

    broker.send("longer", pa.table(given))

    got = broker.receive("g", "longer", limit=30)
    assert sorted(got["tag"].to_pylist()) == sorted(texts.to_pylist())
    handles = longer(got["receipt_handle"].combine_chunks().cast(of_type))
    broker.ack(pa.table({"receipt_handle": handles}))
    assert broker.sql("SELECT count(*) AS n FROM in_flight")["n"].to_pylist() == [0]


def test_every_table_has_a_case() -> None:
    taken = {(v.name, name) for v in VERBS.values() for name in (*v.tables, *v.table_maps)}

    assert {(verb, name.partition("/")[0]) for verb, name in TABLES} == taken


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_no_verb_takes_a_damaged_table(
    endpoint: FlightServer, broker: Broker, damage: Damage
) -> None:
    for (verb, name), (column, args) in TABLES.items():
        pieces = [(name, damage.stream(column, **BESIDE.get(name, {})))]
        if verb == "settle" and name != "outcomes":
            pieces.append(("outcomes", stream(NO_OUTCOMES)))

        refused = refusal(endpoint.address, {"verb": verb, "args": args}, pieces)

        assert isinstance(refused, errors.TableSchemaError), (verb, name, refused)
        assert f"Column {column} of " in refused.message
        assert " is damaged" in refused.message

    assert broker.read("t", 0, offset=0, limit=9).num_rows == 0
