"""Keys of messages: blanks separate them, as in RocketMQ, where classic code joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


GIVEN = [["order-1 user-2"], None, [" a  b", "c"], [], ["d"]]
KEPT = [["order-1", "user-2"], None, ["a", "b", "c"], [], ["d"]]


def table(keys: list[list[str] | None]) -> pa.Table:
    bodies = [b"%d" % i for i in range(len(keys))]
    return pa.table({"body": bodies, "keys": pa.array(keys, schema.KEYS)})


@pytest.mark.parametrize("copies", [1, 20])
def test_a_key_with_blanks_is_as_many_keys(door: Door, topic: Make, copies: int) -> None:
    name = topic(queues=1)

    door.broker.send(name, table(GIVEN * copies))

    read = door.broker.read(name, 0, offset=0, limit=5 * copies)
    assert [keys or None for keys in read["keys"].to_pylist()] == [
        keys or None for keys in KEPT * copies
    ]
    for key in ("order-1", "user-2", "b", "c", "d"):
        assert door.broker.find(name, key=key).num_rows == copies


def test_keys_of_a_slice_stay_with_their_rows(door: Door, topic: Make) -> None:
    name = topic(queues=1)

    door.broker.send(name, table(GIVEN * 3).slice(1, 7))

    read = door.broker.read(name, 0, offset=0, limit=7)
    assert [keys or None for keys in read["keys"].to_pylist()] == [
        keys or None for keys in (KEPT * 3)[1:8]
    ]


def test_a_half_message_has_its_keys_split(door: Door, topic: Make) -> None:
    name = topic(type="transaction", queues=1)
    halves = door.broker.send_half(name, table([["a b"]]), producer_group="p")
    ends = pa.table({"transaction_id": halves["transaction_id"], "resolution": ["commit"]})
    door.broker.end_transactions(ends)

    assert door.broker.find(name, key="b")["keys"].to_pylist() == [["a", "b"]]


@pytest.mark.parametrize("key", ["", " ", "   ", "a\tb", "a\n"])
def test_a_key_that_is_blank_or_controls_is_refused(door: Door, topic: Make, key: str) -> None:
    with pytest.raises(errors.IllegalMessageKeyError):
        door.broker.send(topic(), table([["ok"], [key]]))
