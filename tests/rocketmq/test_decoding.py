"""Messages as columns: the fields of the protocol, and omitted fields."""

import gzip
from collections.abc import Callable
from typing import Any

import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.rocketmq.decoding import Batch, check_types
from rmq_pipeline.rocketmq.protocol import Encoding, MessageType
from tests.conformance import raw


def table(*messages: Any) -> Any:
    return Batch.of(messages).unpacked().table()


def test_all_fields_become_columns() -> None:
    first = raw.message(
        "t",
        b"one",
        message_id="id-1",
        tag="blue",
        keys=["a", "b"],
        message_group="g",
        delivery_timestamp_ms=1_700_000_000_123,
        born_timestamp_ms=1_600_000_000_001,
        priority=0,
        user={"colour": "red"},
    )
    second = raw.message("t", b"two", message_id="id-2", lite_topic="l")

    rows = table(first, second)

    assert rows.schema.names == [
        *("body", "message_id", "tag", "message_group", "lite_topic", "keys", "properties"),
        *("deliver_at_ms", "born_at_ms", "priority"),
    ]
    assert all(
        rows.schema.field(name).type == schema.SEND.field(name).type for name in rows.schema.names
    )
    assert rows.to_pylist() == [
        {
            "body": b"one",
            "message_id": "id-1",
            "tag": "blue",
            "message_group": "g",
            "lite_topic": None,
            "keys": ["a", "b"],
            "properties": [("colour", "red")],
            "deliver_at_ms": 1_700_000_000_123,
            "born_at_ms": 1_600_000_000_001,
            "priority": 0,
        },
        {
            **dict.fromkeys(("tag", "message_group", "keys", "properties", "deliver_at_ms")),
            "body": b"two",
            "message_id": "id-2",
            "lite_topic": "l",
            "born_at_ms": None,
            "priority": None,
        },
    ]


def test_columns_that_no_message_has_are_left_out() -> None:
    assert table(raw.message("t")).schema.names == ["body", "message_id"]


def test_a_moment_out_of_this_world_is_still_a_number() -> None:
    message = raw.message("t")
    message.system_properties.delivery_timestamp.seconds = 2**62

    assert table(message).column("deliver_at_ms")[0].as_py() > limits.DELAY_MAX_MS


def test_a_message_without_an_id_is_refused() -> None:
    message = raw.message("t")
    message.system_properties.message_id = ""

    with pytest.raises(errors.IllegalMessageIdError):
        table(message)


def packed(body: bytes) -> Any:
    return raw.message("t", body, body_encoding=Encoding.GZIP)


def test_bodies_in_gzip_are_stored_unpacked() -> None:
    rows = table(packed(gzip.compress(b"plain" * 100)), raw.message("t", b"as it is"))

    assert rows.column("body").to_pylist() == [b"plain" * 100, b"as it is"]


@pytest.mark.parametrize(
    ("made", "error"),
    [
        pytest.param(lambda: b"no gzip", errors.MessageCorruptedError, id="no gzip"),
        pytest.param(
            lambda: gzip.compress(b"cut" * 1000)[:-9], errors.MessageCorruptedError, id="cut"
        ),
        pytest.param(
            lambda: gzip.compress(bytes(limits.BODY_BYTES + 1)),
            errors.MessageBodyTooLargeError,
            id="a byte too much",
        ),
        pytest.param(
            lambda: gzip.compress(bytes(64 * limits.BODY_BYTES)),
            errors.MessageBodyTooLargeError,
            id="a bomb",
        ),
    ],
)
def test_gzip_that_does_not_unpack_is_refused(
    made: Callable[[], bytes], error: type[errors.RocketMQError]
) -> None:
    with pytest.raises(error):
        table(packed(made()))


def test_a_body_of_the_largest_size_unpacks() -> None:
    rows = table(packed(gzip.compress(bytes(limits.BODY_BYTES))))

    assert len(rows.column("body")[0].as_py()) == limits.BODY_BYTES


def test_a_topic_takes_messages_of_its_type() -> None:
    for name in ("normal", "fifo", "delay", "transaction", "lite", "priority"):
        own = getattr(MessageType, name.upper())
        check_types([own, MessageType.MESSAGE_TYPE_UNSPECIFIED], name, topic="t")
        for other in set(MessageType.values()) - {own, 0}:
            with pytest.raises(errors.MessageTypeError):
                check_types([own, other], name, topic="t")
    check_types([1, 2, 3, 4], "mixed", topic="t")
    with pytest.raises(errors.MessageTypeError, match="99"):
        check_types([99], "mixed", topic="t")


def test_a_request_of_many_packed_bodies_is_not_unpacked_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BATCH_BYTES", 3 * limits.MIB)
    body = gzip.compress(bytes(limits.MIB))
    one = raw.message("t", body, body_encoding=Encoding.GZIP)

    assert Batch.of([one] * 3).unpacked().size() == 3 * limits.MIB
    with pytest.raises(errors.MessageBodyTooLargeError, match="request"):
        Batch.of([one] * 4).unpacked()
