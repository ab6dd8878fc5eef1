"""Keys of messages: blanks separate them, as in RocketMQ, where classic code joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


GIVEN = [["order-1 user-2"], None, [" a  b", "c"], [], ["d"]]
KEPT = [["order-1", "user-2"], None, ["a", "b", "c"], [], ["d"]]


def table(keys: list[list[str] | None]) -> pa.Table:
    bodies = [b"%d" % i for i in range(len(keys))]
    return pa.table({"body": bodies, "keys": pa.array(keys, schema.KEYS)})


@pytest.mark.parametrize("copies", [1, 20])
def test_a_key_with_blanks_is_as_many_keys(endpoint: Endpoint, topic: Make, copies: int) -> None:
    name = topic(queues=1)

    endpoint.broker.send(name, table(GIVEN * copies))

    read = endpoint.broker.read(name, 0, offset=0, limit=5 * copies)
    assert [keys or None for keys in read["keys"].to_pylist()] == [
        keys or None for keys in KEPT * copies
    ]
    for key in ("order-1", "user-2", "b", "c", "d"):
        assert endpoint.broker.find(name, key=key).num_rows == copies


def test_keys_of_a_slice_stay_with_their_rows(endpoint: Endpoint, topic: Make) -> None:
    name = topic(queues=1)

    endpoint.broker.send(name, table(GIVEN * 3).slice(1, 7))

    read = endpoint.broker.read(name, 0, offset=0, limit=7)
    assert [keys or None for keys in read["keys"].to_pylist()] == [
        keys or None for keys in (KEPT * 3)[1:8]
    ]


def test_a_half_message_has_its_keys_split(endpoint: Endpoint, topic: Make) -> None:
    name = topic(type="transaction", queues=1)
    halves = endpoint.broker.send_half(name, table([["a b"]]), producer_group="p")
    ends = pa.table({"transaction_id": halves["transaction_id"], "resolution": ["commit"]})
    endpoint.broker.end_transactions(ends)

    assert endpoint.broker.find(name, key="b")["keys"].to_pylist() == [["a", "b"]]


@pytest.mark.parametrize("key", ["", " ", "   ", "a\tb", "a\n"])
def test_a_key_that_is_blank_or_controls_is_refused(
    endpoint: Endpoint, topic: Make, key: str
) -> None:
    with pytest.raises(errors.IllegalMessageKeyError):
        endpoint.broker.send(topic(), table([["ok"], [key]]))
