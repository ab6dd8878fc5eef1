"""Messages are views of the rows that were pulled."""

from __future__ import annotations

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.consumer.received_message import messages_of
from tests.consumer.pieces import held_queue, received, rows


def test_a_message_shows_every_column_of_its_row() -> None:
    queue = held_queue()
    columns = {
        "tag": ["paid", None],
        "keys": [["a", "b"], None],
        "message_group": ["g", None],
        "properties": [[("p", "1")], None],
        "delivery_attempt": [3, 1],
    }

    one, two = received(queue, [5, 6], **columns)

    assert (one.topic, one.queue_id, one.queue_offset) == ("flights", 0, 5)
    assert (one.message_id, one.body, one.tag, one.keys) == ("m-5", b"5", "paid", ["a", "b"])
    assert (one.message_group, one.properties) == ("g", {"p": "1"})
    assert (one.born_at_ms, one.stored_at_ms, one.receipt_handle) == (1, 2, "r-5")
    assert (one.delivery_attempt, one.reconsume_times) == (3, 2)
    assert (two.tag, two.keys, two.message_group, two.properties) == (None, [], None, {})
    assert repr(one) == "<message flights/0/5>"


def test_failures_here_count_as_attempts() -> None:
    (message,) = received(held_queue(), [1])

    message.failures = 2

    assert message.delivery_attempt == 3


def test_what_was_read_by_offset_has_no_receipt_and_one_attempt() -> None:
    queue = held_queue()
    table = rows([1]).select([field.name for field in schema.READ])

    (message,) = messages_of(table, "flights", queues={0: queue})[0]

    assert (message.receipt_handle, message.delivery_attempt) == ("", 1)


def test_messages_are_given_by_queue() -> None:
    queues = {0: held_queue(), 1: held_queue()}
    table = pa.concat_tables([rows([1, 2]), rows([7], queue_id=1)])

    found = messages_of(table, "flights", queues=queues)

    offsets = {queue_id: [m.queue_offset for m in of] for queue_id, of in found.items()}
    assert offsets == {0: [1, 2], 1: [7]}
    assert messages_of(table.slice(0, 0), "flights", queues=queues) == {}


def test_long_bodies_are_not_kept_twice() -> None:
    first, second = b"a" * 200_000, b"b" * 200_000

    one, two = received(held_queue(), [1, 2], body=[first, second])

    assert (one.body, two.body, two.size) == (first, second, 200_000)
    assert "body" not in one._rows._columns
