"""Half messages without an outcome are exhausted after the last check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from tests.behaviour.halves import Producer, asked, ends, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"


@pytest.mark.every_endpoint
def test_after_15_checks_it_goes_to_the_topic_of_exhausted_halves(
    endpoint: Endpoint, orders: str, begin: Producer, group: Make
) -> None:
    halves = begin(2, properties=[[("p", "v")], None])
    endpoint.advance(6_000)
    for check in range(1, 16):
        assert sweep(endpoint) == {"checked": 2, "given_up": 0, "dropped": 0}, check
        assert {n for _, n in asked(endpoint)} == {check}
        endpoint.advance(30_000)

    report = sweep(endpoint)

    assert report == {"checked": 0, "given_up": 2, "dropped": 0}
    assert asked(endpoint) == []
    given_up = endpoint.broker.read(GIVEN_UP_TOPIC, 0, offset=0, limit=10)
    assert given_up["body"].to_pylist() == [b"0", b"1"]
    assert given_up["message_id"].to_pylist() == halves["message_id"].to_pylist()
    said = {"REAL_TOPIC": orders, "PGROUP": "producers", "TRANSACTION_CHECK_TIMES": "15"}
    assert [dict(p) for p in given_up["properties"].to_pylist()] == [{"p": "v", **said}, said]
    assert endpoint.drain(GIVEN_UP_TOPIC, group()) == [b"0", b"1"]
    assert endpoint.sql("FROM half") == []
    assert endpoint.stored(orders) == 0


@pytest.mark.parametrize("resolution", ["commit", "rollback"])
def test_an_exhausted_half_cannot_be_ended(
    endpoint: Endpoint, orders: str, begin: Producer, resolution: str
) -> None:
    halves = begin(1)
    for _ in range(17):
        endpoint.advance(30_000)
        sweep(endpoint)

    with pytest.raises(errors.TransactionEndedError, match="given_up"):
        endpoint.broker.end_transactions(ends(halves, resolution))

    assert endpoint.stored(orders) == 0
    assert endpoint.stored(GIVEN_UP_TOPIC) == 1
