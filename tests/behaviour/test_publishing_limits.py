"""What send takes and refuses, on both sides of every limit; a batch whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

PROPERTY_ROOM = limits.PROPERTY_BYTES - 1

#: Just within a limit.
TAKEN: dict[str, dict[str, Any]] = {
    "a body of one byte": {"body": [b"x"]},
    "a body of 4 MiB": {"body": [b"x" * limits.BODY_BYTES]},
    "128 properties": {"properties": [[(f"p{i}", "v") for i in range(128)]]},
    "properties of 16 KiB": {"properties": [[("p", "v" * PROPERTY_ROOM)]]},
    "properties, tag and keys of 16 KiB": {
        "properties": [[("p", "v" * (PROPERTY_ROOM - 7))]],
        "tag": ["tag"],
        "keys": [["keys"]],
    },
    "a tag with a blank inside": {"tag": ["a b"]},
    "no tag": {"tag": [None]},
    "no keys": {"keys": [None]},
    "an empty list of keys": {"keys": [[]]},
    "an empty property value": {"properties": [[("p", "")]]},
}

#: Just beyond it, and the error.
REFUSED: dict[str, tuple[dict[str, Any], type[errors.RocketMQError]]] = {
    "an empty body": ({"body": [b""]}, errors.MessageBodyEmptyError),
    "a body over 4 MiB": (
        {"body": [b"x" * (limits.BODY_BYTES + 1)]},
        errors.MessageBodyTooLargeError,
    ),
    "129 properties": (
        {"properties": [[(f"p{i}", "v") for i in range(129)]]},
        errors.MessagePropertiesTooLargeError,
    ),
    "properties over 16 KiB": (
        {"properties": [[("p", "v" * (PROPERTY_ROOM + 1))]]},
        errors.MessagePropertiesTooLargeError,
    ),
    "properties, tag and keys over 16 KiB": (
        {
            "properties": [[("p", "v" * (PROPERTY_ROOM - 6))]],
            "tag": ["tag"],
            "keys": [["keys"]],
        },
        errors.MessagePropertiesTooLargeError,
    ),
    "bytes count, not characters": (
        {"properties": [[("p", "é" * (PROPERTY_ROOM // 2 + 1))]]},
        errors.MessagePropertiesTooLargeError,
    ),
    "a reserved property": (
        {"properties": [[("__SHARDINGKEY", "a")]]},
        errors.IllegalMessagePropertyError,
    ),
    "another reserved property": (
        {"properties": [[("TIMER_DELIVER_MS", "1")]]},
        errors.IllegalMessagePropertyError,
    ),
    "a blank property name": ({"properties": [[(" ", "v")]]}, errors.IllegalMessagePropertyError),
    "a control character in a property name": (
        {"properties": [[("a\x01b", "v")]]},
        errors.IllegalMessagePropertyError,
    ),
    "a control character in a property value": (
        {"properties": [[("p", "v\x02")]]},
        errors.IllegalMessagePropertyError,
    ),
    "a blank tag": ({"tag": ["  "]}, errors.IllegalMessageTagError),
    "a tag with a bar": ({"tag": ["a|b"]}, errors.IllegalMessageTagError),
    "a tag with a control character": ({"tag": ["a\n"]}, errors.IllegalMessageTagError),
    "C1 in a tag": ({"tag": ["a\x85"]}, errors.IllegalMessageTagError),
    "C1 in a key": ({"keys": [["a\x80"]]}, errors.IllegalMessageKeyError),
    "C1 in a property name": (
        {"properties": [[("\x9f", "v")]]},
        errors.IllegalMessagePropertyError,
    ),
    "C1 in a property value": (
        {"properties": [[("a", "é\x9f")]]},
        errors.IllegalMessagePropertyError,
    ),
    "a blank key": ({"keys": [["ok", " "]]}, errors.IllegalMessageKeyError),
    "a key with a control character": ({"keys": [["a\x7f"]]}, errors.IllegalMessageKeyError),
    "a blank message id": ({"message_id": [" "]}, errors.IllegalMessageIdError),
    "a body of null": ({"body": [None]}, errors.RequestError),
}


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def row_of(columns: dict[str, Any]) -> pa.Table:
    columns = {"body": [b"x"], **columns}
    fields = [schema.SEND.field(n).with_nullable(True) for n in columns]
    return pa.table(columns, schema=pa.schema(fields))


@pytest.mark.parametrize("case", TAKEN)
def test_a_message_within_its_limits_is_taken(endpoint: Endpoint, topic: Make, case: str) -> None:
    name = topic(queues=1)
    table = row_of(TAKEN[case])

    endpoint.broker.send(name, table)

    [found] = endpoint.broker.read(name, 0, offset=0, limit=1).to_pylist()
    assert found["body"] == table["body"][0].as_py()
    assert (found["properties"] or []) == (TAKEN[case].get("properties", [[]])[0] or [])


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_beyond_a_limit_is_refused(endpoint: Endpoint, topic: Make, case: str) -> None:
    name = topic(queues=1)
    columns, error = REFUSED[case]

    with pytest.raises(error):
        endpoint.broker.send(name, row_of(columns))

    assert endpoint.stored(name) == 0


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_with_one_bad_row_is_refused_whole(
    endpoint: Endpoint, topic: Make, messages: Make, case: str
) -> None:
    name = topic(queues=2)
    endpoint.broker.send(name, messages(2))
    columns, error = REFUSED[case]
    good = row_of({n: [None] for n in columns if n != "body"})
    batch = pa.concat_tables([good, good, row_of(columns), good], promote_options="default")

    with pytest.raises(error):
        endpoint.broker.send(name, batch)

    assert endpoint.max_offsets(name) == [1, 1]


@pytest.mark.parametrize("text", ["x" * 63, "é" * 31, "a b", "|%"])
def test_a_message_group_under_64_bytes_is_taken(
    endpoint: Endpoint, topic: Make, messages: Make, text: str
) -> None:
    name = topic(type="fifo", queues=1)

    endpoint.broker.send(name, messages(1, groups=[text]))

    found = endpoint.broker.read(name, 0, offset=0, limit=1)
    assert found["message_group"].to_pylist() == [text]


@pytest.mark.parametrize("text", ["x" * 64, "é" * 32, " ", "a\tb", "a\x9b", None])
def test_a_message_group_that_breaks_the_rules_is_refused(
    endpoint: Endpoint, topic: Make, messages: Make, text: str | None
) -> None:
    name = topic(type="fifo", queues=1)

    with pytest.raises(errors.IllegalMessageGroupError):
        endpoint.broker.send(name, messages(3, message_group=["fine", text, "fine"]))

    assert endpoint.stored(name) == 0


def test_a_batch_of_too_many_rows_is_refused(endpoint: Endpoint, topic: Make) -> None:
    name = topic()
    n = limits.BATCH_ROWS + 1
    table = pa.table({"body": pa.repeat(pa.scalar(b"x"), n)})

    with pytest.raises(errors.MessageBodyTooLargeError):
        endpoint.broker.send(name, table)

    assert endpoint.stored(name) == 0


def test_a_batch_of_too_many_bytes_is_refused(inside: Endpoint, topic: Make) -> None:
    name = topic()
    n = limits.BATCH_BYTES // limits.BODY_BYTES + 1
    table = pa.table({"body": pa.repeat(pa.scalar(b"x" * limits.BODY_BYTES), n)})

    with pytest.raises(errors.MessageBodyTooLargeError):
        inside.broker.send(name, table)

    assert inside.stored(name) == 0


# -------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("normal", {"delay_level": 1}),
        ("normal", {"deliver_at_ms": 1_800_000_000_000}),
        ("fifo", {"message_group": "a", "delay_level": 1}),
        ("fifo", {"message_group": "a", "deliver_at_ms": 1_700_000_100_000}),
        ("delay", {}),
    ],
)
def test_a_topic_refuses_messages_of_another_type(
    endpoint: Endpoint, topic: Make, messages: Make, kind: str, columns: dict[str, Any]
) -> None:
    name = topic(type=kind)

    with pytest.raises(errors.MessageTypeError):
        endpoint.broker.send(name, messages(1, **columns))

    assert endpoint.stored(name) == 0


def test_a_normal_topic_refuses_a_message_group(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic()

    with pytest.raises((errors.MessageTypeError, errors.IllegalMessageGroupError)):
        endpoint.broker.send(name, messages(1, groups=["a"]))

    assert endpoint.stored(name) == 0


def test_no_caller_sends_to_the_schedule_itself(endpoint: Endpoint, messages: Make) -> None:
    with pytest.raises((errors.RequestError, errors.NotFoundError)):
        endpoint.broker.send("SCHEDULE_TOPIC_XXXX", messages(1))
