"""Wrong arguments are refused with the argument, its value, and what it must be."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.verbs import signature
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from rmq_pipeline.verbs import VERBS
from tests.flight.exchange import refusal

SMALL = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)
NAMES = sorted(set(VERBS) - {"ping"})
#: Each is wrong for most arguments.
VALUES: tuple[Any, ...] = (None, True, 2**70, [[1]], {"name": {}})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    home = tmp_path_factory.mktemp("signature") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        yield broker


@pytest.fixture(scope="module")
def endpoint(broker: Broker) -> Iterator[FlightServer]:
    server = FlightServer(broker)
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def client(endpoint: FlightServer) -> Iterator[Client]:
    with Client(endpoint.address, retry_s=0) as client:
        yield client


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        ("describe_group", {"name": {}}, "describe_group: name must be text, not {}"),
        (
            "reset_offset",
            {"group": "g", "topic": "t", "to_offset": [1]},
            r"to_offset must be a whole number or null, not \(1,\)",
        ),
        ("subscribe", {"group": 1, "topic": "t"}, "group must be text, not 1"),
        ("offset_at", {"topic": "t", "queue_id": True, "at_ms": 1}, "whole number, not True"),
        ("open_window", {"name": "w", "owner": "o", "duration_ms": 0.5}, "whole number, not 0.5"),
        ("list_topics", {"colour": 1}, "list_topics has no argument 'colour'"),
        ("describe_group", {}, "missing a required argument: name, text"),
        (
            "keyed_state_history",
            {"group": "g", "topic": "t", "places": 1},
            "places must be a table",
        ),
        (
            "receive",
            {"topic": "t", "group": "g", "window": ["w"]},
            "window must be a list of text and",
        ),
        (
            "update_offsets",
            {"group": "g", "topic": "t", "offsets": {"a": 1}},
            "offsets must be an obj",
        ),
        ("sql", {"query": ["x"]}, "query must be text"),
    ],
)
def test_a_wrong_argument_is_told(
    endpoint: FlightServer, verb: str, args: dict[str, Any], said: str
) -> None:
    refused = refusal(endpoint.address, {"verb": verb, "args": args})

    with pytest.raises(errors.RequestError, match=said):
        raise refused or AssertionError("it was carried out")


@pytest.mark.parametrize("verb", NAMES)
def test_no_value_of_an_argument_is_a_fault_of_the_broker(client: Client, verb: str) -> None:
    hints = signature._of(getattr(Broker, verb))[1]
    plain = {name: value for name, value in (("topic", "t"), ("group", "g")) if name in hints}
    refused: list[errors.RocketMQError] = []

    for name in set(hints) - {"return", "wait_ms"}:
        for value in VALUES:
            try:
                client._connection.call(verb, {**plain, name: value})
            except errors.RocketMQError as error:
                refused.append(error)

    # Of the class itself are only faults that nobody foresaw.
    assert [error for error in refused if type(error) is errors.RocketMQError] == []
    assert refused or set(hints) <= {"return"}


@pytest.mark.parametrize(
    "command",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"verb": ["x"], "args": {}}',
        b'{"verb": {}, "args": {}}',
        b'{"verb": "ping", "args": []}',
        b'{"verb": "ping", "args": null}',
        b'{"verb": "ping"}',
        b'{"verb": "' + b"x" * 100_000 + b'", "args": {}}',
        b"1" * 10_000,
    ],
    ids=range(12),
)
def test_what_is_no_command_is_refused(endpoint: FlightServer, command: bytes) -> None:
    refused = refusal(endpoint.address, command)

    assert isinstance(refused, errors.RequestError)
    assert len(refused.message) < 500
    assert "Traceback" not in refused.message


def test_receipts_that_are_none_are_refused_in_process(broker: Broker) -> None:
    wrong: Any
    for wrong in (None, 7, [None], [1], object()):
        with pytest.raises(errors.TableSchemaError, match="receipts are a table with the column"):
            broker.ack(wrong)
    broker.ack(pa.table({"receipt_handle": pa.array([], pa.string())}))
