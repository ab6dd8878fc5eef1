"""Where keys come from, and which messages count as seen."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline import schema
from rmq_pipeline.idempotency import Key, acks, keys_of, mark


class Remembered:
    """What a group remembers."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        assert group == "billing"
        found = [1 if key in self.keys else None for key in keys["idempotency_key"].to_pylist()]
        return pa.table([keys["idempotency_key"], found], schema=schema.SEEN)


def messages(*keys: str | None) -> pa.Table:
    columns = {
        "message_id": [f"m-{i}" for i in range(len(keys))],
        "message_group": [None] * len(keys),
        "keys": [None if key is None else [key, "other"] for key in keys],
        "properties": [[] if key is None else [("order", key)] for key in keys],
        "body": [(key or "").encode() for key in keys],
        "receipt_handle": [f"r-{i}" for i in range(len(keys))],
    }
    fields = [schema.RECEIVED.field(name) for name in columns]
    return pa.table(columns, schema=pa.schema(fields))


def body(given: pa.Table) -> pa.ChunkedArray:
    """The body as the key; refuses one that is bad."""
    if b"bad" in given["body"].to_pylist():
        raise ValueError("bad")
    return given["body"].cast(pa.string())


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("message_id", ["m-0", "m-1", "m-2"]),
        ("message_group", [None, None, None]),
        ("keys", ["a", None, "c"]),
        ("order", ["a", None, "c"]),
        ("no_such_property", [None, None, None]),
        (body, ["a", None, "c"]),
        (lambda given: pc.binary_length(given["body"]), ["1", "0", "1"]),
    ],
)
def test_a_key_comes_from_a_column_a_property_or_a_function(
    key: Key, found: list[str | None]
) -> None:
    given = messages("a", None, "c")

    assert keys_of(given, key).to_pylist() == found
    assert keys_of(given.slice(0, 0), key).to_pylist() == []
    chunked = pa.concat_tables([given.slice(0, 1), given.slice(1)])
    assert keys_of(chunked, key).to_pylist() == found


def test_a_long_key_is_replaced_by_its_digest() -> None:
    found = keys_of(messages("x" * 256, "y" * 255), "order").to_pylist()

    assert found[0].startswith("sha256:")
    assert found[0] == keys_of(messages("x" * 256), "order")[0].as_py()
    assert found[1] == "y" * 255


def test_a_message_whose_key_function_raises_has_none_and_stops_no_other() -> None:
    assert keys_of(messages("a", "bad", "c"), body).to_pylist() == ["a", None, "c"]


@pytest.mark.parametrize("gives", [["a"], pa.array(["a"])])
def test_a_key_function_that_gives_no_column_is_refused(gives: object) -> None:
    with pytest.raises(TypeError):
        keys_of(messages("a", "b"), lambda _: gives)


def test_a_message_was_seen_when_its_key_is_remembered() -> None:
    got = mark(Remembered("a"), messages("a", "b", None), group="billing", key="order")

    assert got["seen_before"].to_pylist() == [True, False, False]
    assert got["idempotency_key"].to_pylist() == ["a", "b", None]


def test_of_messages_with_one_key_the_first_has_the_effect_and_alone_is_remembered() -> None:
    got = mark(
        Remembered("c"), messages("a", "a", "c", "c", "b", None, None), group="billing", key="order"
    )

    assert got["seen_before"].to_pylist() == [False, True, True, True, False, False, False]
    assert got["idempotency_key"].to_pylist() == ["a", None, "c", "c", "b", None, None]


def test_a_key_that_is_in_other_hands_counts_as_seen_and_is_left_to_them() -> None:
    got = mark(
        Remembered(),
        messages("a", "b", None),
        group="billing",
        key="order",
        held=pa.array(["b", None]),
    )

    assert got["seen_before"].to_pylist() == [False, True, False]
    assert got["idempotency_key"].to_pylist() == ["a", None, None]


def test_acks_of_marked_messages_carry_their_keys() -> None:
    got = mark(Remembered(), messages("a", "a"), group="billing", key="order")

    assert acks(got).to_pylist() == [
        {"receipt_handle": "r-0", "outcome": "ack", "idempotency_key": "a"},
        {"receipt_handle": "r-1", "outcome": "ack", "idempotency_key": None},
    ]
