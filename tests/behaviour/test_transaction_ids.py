"""A committed message says which transaction it was sent in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from tests.behaviour.halves import TRANSACTION_ID, Producer, ends

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


def test_a_consumer_reads_the_transaction_id_that_the_producer_was_given(
    endpoint: Endpoint, orders: str, group: Make, begin: Producer
) -> None:
    readers = group()
    halves = begin(2, properties=[[("p", "1"), (TRANSACTION_ID, "of another")], None])
    endpoint.broker.end_transactions(ends(halves, ["commit"] * 2), producer_group="producers")

    got = endpoint.broker.receive(readers, orders)

    read = [dict(of_row) for of_row in got["properties"].to_pylist()]
    ids = halves["transaction_id"].to_pylist()
    assert read == [{"p": "1", TRANSACTION_ID: ids[0]}, {TRANSACTION_ID: ids[1]}]
    assert len(got["properties"][0]) == 2
    again = endpoint.broker.end_transactions(
        pa.table(
            {
                "transaction_id": [of_row[TRANSACTION_ID] for of_row in read],
                "resolution": ["commit"] * 2,
            }
        )
    )
    assert again["resolution"].to_pylist() == ["commit"] * 2


def test_what_was_committed_may_be_sent_on_as_it_is(
    endpoint: Endpoint, orders: str, topic: Make, group: Make, begin: Producer
) -> None:
    readers, onward = group(), str(topic())
    halves = begin(1)
    endpoint.broker.end_transactions(ends(halves, ["commit"]), producer_group="producers")
    got = endpoint.broker.receive(readers, orders)

    endpoint.broker.send(onward, got.select(["body", "properties"]))

    (read,) = endpoint.broker.receive(readers, onward)["properties"].to_pylist()
    assert dict(read) == {TRANSACTION_ID: halves["transaction_id"][0].as_py()}
