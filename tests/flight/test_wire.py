"""What crosses the wire, behind a real socket: every kind of table, value and error."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import get_args

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs.declaration import declarations
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.client import Client
from tests.flight.echo import Echo


def rows(table: pa.Table) -> pa.Table:
    return table.combine_chunks()


TABLES: Mapping[str, pa.Table] = {
    "empty": schema.SEND.empty_table(),
    "no columns": pa.table({}),
    "every type": pa.table(
        {
            "body": pa.array([b"a", b"\0\xff", b"c" * 70_000], pa.binary()),
            "tag": ["x", None, "ü"],
            "keys": pa.array([["k1", "k2"], [], None], schema.KEYS),
            "delay_level": pa.array([1, None, 18], pa.int32()),
            "properties": pa.array([[("a", "b")], [], None], schema.PROPERTIES),
            "at": pa.array([1, 2, None], pa.timestamp("ms", "UTC")),
            "score": [0.5, None, float("inf")],
        }
    ),
    "dictionary": pa.table({"tag": pa.array(["a", "b", "a"]).dictionary_encode()}),
    "large": pa.table({"body": pa.array([b"a", b"b"], pa.large_binary())}),
    "view": pa.table({"body": pa.array([b"a" * 40, b"b"], pa.binary_view())}),
    "chunked": pa.table({"n": pa.chunked_array([[1], [], [2, 3]])}),
    "a slice": pa.table({"n": range(1000), "s": ["x"] * 1000}).slice(990, 7),
    "metadata": pa.table({"n": [1]}).replace_schema_metadata({b"group_id": b"7"}),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_table_comes_back_as_it_was_sent(client: Client, table: pa.Table) -> None:
    back = client.send("t", table)

    assert rows(back).equals(rows(table), check_metadata=True)


def test_table_of_many_pieces_comes_back_whole(client: Client) -> None:
    body = pa.array([bytes([n % 256]) * 1024 for n in range(100_000)], pa.binary())
    table = pa.table({"n": range(100_000), "body": body})
    assert table.nbytes > 3 * wire.PIECE_BYTES

    assert rows(client.send("t", table)).equals(table)


def test_numbers_arrive_at_aligned_addresses(client: Client) -> None:
    back = client.send("t", pa.table({"s": ["abc"], "n": [1], "m": pa.array([2], pa.int32())}))

    assert [back[name].chunk(0).buffers()[1].address % 4 for name in ("n", "m")] == [0, 0]


def test_several_tables_and_values_cross_in_one_call(client: Client, echo: Echo) -> None:
    tables = {name: pa.table({"n": [number]}) for number, name in enumerate("abcde")}

    answer = client.settle(
        "g",
        tables["a"],
        settle_id="s-1",
        window=("consumer/g", 3),
        publish={"late%_|-x": tables["b"], "hourly": tables["c"]},
        sink_files=tables["d"],
        state=tables["e"],
        topic="t",
    )

    assert answer == {"acked": 1}
    group, given = echo.calls[0]
    assert (group, given["settle_id"], given["topic"]) == ("g", "s-1", "t")
    assert given["window"] == ("consumer/g", 3)
    assert given["outcomes"].equals(tables["a"])
    assert given["publish"] == {"late%_|-x": tables["b"], "hourly": tables["c"]}
    assert (given["sink_files"], given["state"]) == (tables["d"], tables["e"])


def test_tables_left_out_stay_out(client: Client, echo: Echo) -> None:
    client.settle("g", pa.table({"n": [1]}))

    assert {"publish", "sink_files", "state"}.isdisjoint(echo.calls[0][1])


def test_receipts_may_be_handles_or_a_table(client: Client, echo: Echo) -> None:
    client.ack(["a", "b"])
    client.ack(pa.table({"receipt_handle": ["a", "b"], "more": [1, 2]}))

    assert [call[1]["receipts"]["receipt_handle"].to_pylist() for call in echo.calls] == [
        ["a", "b"],
        ["a", "b"],
    ]


def test_values_that_are_no_table_come_back(client: Client) -> None:
    assert client.offset_at("topic", 2, at_ms=1000) == 1007
    assert client.keyed_state("g", "t") is None
    assert client.create_group("g", backoff_ms=(1, 2))["backoff_ms"] == [1, 2]


@pytest.mark.parametrize(
    "error", [kind for kind in vars(errors).values() if isinstance(kind, type)]
)
def test_every_error_comes_back_as_itself(error: type[errors.RocketMQError]) -> None:
    raised = error("What happened.")

    for read in (
        lambda: wire.read_answer([pa.py_buffer(wire.refusal(raised))]),
        lambda: wire.check_status(f"Flight said: {wire.refusal_status(raised)}. Context: …"),
    ):
        with pytest.raises(error) as caught:
            read()

        assert type(caught.value) is error
        assert caught.value.message == "What happened."


def test_refusal_reaches_the_caller(client: Client) -> None:
    with pytest.raises(errors.TopicNotFoundError, match=r"No topic refused\. Create it"):
        client.send("refused", pa.table({"n": [1]}))


def test_refusal_of_a_large_table_reaches_the_caller(client: Client) -> None:
    with pytest.raises(errors.TopicNotFoundError):
        client.send("refused", pa.table({"body": [b"x" * 1024] * 50_000}))


def test_long_error_text_comes_whole(client: Client) -> None:
    query = "SELECT " + "x, " * 20_000

    with pytest.raises(errors.QueryError) as caught:
        client.sql(query)

    assert query in caught.value.message


def test_bug_in_the_broker_names_the_verb(client: Client) -> None:
    with pytest.raises(errors.RocketMQError, match="send failed: ZeroDivisionError: a bug"):
        client.send("broken", pa.table({"n": [1]}))


def test_wrong_arguments_are_refused(client: Client) -> None:
    with pytest.raises(errors.RequestError, match="missing a required argument"):
        client._connection.call("offset_at", {"topic": "t"})
    with pytest.raises(errors.RequestError, match="no verb 'close'"):
        client._connection.call("close", {})
    with pytest.raises(errors.TableSchemaError, match=r"messages is a dict, not a pyarrow\.Table"):
        client.send("t", {"body": [b"x"]})
    for order in (object(), b"none"):
        with pytest.raises(errors.RequestError, match="not JSON serializable"):
            client.create_group("g", order=order)  # type: ignore[arg-type]


def test_settle_of_a_window_with_an_id_may_be_repeated() -> None:
    settle = wire.find("settle")

    assert settle.may_repeat({"settle_id": "s", "window": ["w", 1]})
    assert not settle.may_repeat({"settle_id": "", "window": ["w", 1]})
    # The broker would not recognize it: it would be carried out twice.
    assert not settle.may_repeat({"settle_id": "s", "window": None})
    assert not settle.may_repeat({"settle_id": "s"})
    assert not wire.find("send").may_repeat({})


def test_limits_of_a_piece_leave_room_for_the_largest_body() -> None:
    assert wire.PIECE_BYTES > limits.BODY_BYTES


def test_receipts_travel_without_the_messages_they_are_of() -> None:
    """Every argument that the broker declares as receipts."""
    received = pa.table({"receipt_handle": ["r"], "body": [b"x" * 1000]})
    declared = [
        (name, argument)
        for name, declaration in declarations(Broker).items()
        for argument, parameter in signature(getattr(Broker, name)).parameters.items()
        if argument in declaration.verb.tables and pa.Table in get_args(parameter.annotation)
        if Sequence[str] in get_args(parameter.annotation)
    ]

    assert ("receive", "ack") in declared
    for name, argument in declared:
        sent = wire.request(name, {argument: received}).tables[argument]
        assert sent.column_names == ["receipt_handle"], name
