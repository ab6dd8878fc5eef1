"""A committed message says which transaction it was sent in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from tests.behaviour.halves import TRANSACTION_ID, Producer, ends

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def orders(topic: Make) -> str:
    return str(topic(type="transaction", queues=1))


@pytest.fixture
def begin(door: Door, orders: str, messages: Make) -> Producer:
    return Producer(door, orders, messages)


def test_a_consumer_reads_the_transaction_id_that_the_producer_was_given(
    door: Door, orders: str, group: Make, begin: Producer
) -> None:
    readers = group()
    halves = begin(2, properties=[[("p", "1"), (TRANSACTION_ID, "of another")], None])
    door.broker.end_transactions(ends(halves, ["commit"] * 2), producer_group="producers")

    got = door.broker.receive(readers, orders)

    read = [dict(of_row) for of_row in got["properties"].to_pylist()]
    ids = halves["transaction_id"].to_pylist()
    assert read == [{"p": "1", TRANSACTION_ID: ids[0]}, {TRANSACTION_ID: ids[1]}]
    assert len(got["properties"][0]) == 2
    again = door.broker.end_transactions(
        pa.table(
            {
                "transaction_id": [of_row[TRANSACTION_ID] for of_row in read],
                "resolution": ["commit"] * 2,
            }
        )
    )
    assert again["resolution"].to_pylist() == ["commit"] * 2


def test_what_was_committed_may_be_sent_on_as_it_is(
    door: Door, orders: str, topic: Make, group: Make, begin: Producer
) -> None:
    readers, onward = group(), str(topic())
    halves = begin(1)
    door.broker.end_transactions(ends(halves, ["commit"]), producer_group="producers")
    got = door.broker.receive(readers, orders)

    door.broker.send(onward, got.select(["body", "properties"]))

    (read,) = door.broker.receive(readers, onward)["properties"].to_pylist()
    assert dict(read) == {TRANSACTION_ID: halves["transaction_id"][0].as_py()}
