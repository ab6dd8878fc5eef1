"""A receive that acks the batch before: one call, one commit, and nothing half done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def in_flight(endpoint: Endpoint, group: str) -> int:
    query = f"SELECT count(*) AS n FROM in_flight WHERE consumer_group = '{group}'"
    return int(endpoint.sql(query)[0]["n"])


def test_a_message_group_goes_on_with_the_receive_that_acks_it(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(3, groups=["a"]))

    bodies, batch = [], None
    while (batch := endpoint.broker.receive(readers, name, limit=1, ack=batch)).num_rows:
        bodies += batch["body"].to_pylist()
    endpoint.advance(MINUTE)

    assert bodies == [b"0", b"1", b"2"]
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_what_a_receive_acks_is_settled_if_no_message_comes(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    batch = endpoint.broker.receive(readers, name)

    nothing = endpoint.broker.receive(readers, name, ack=batch["receipt_handle"].to_pylist())
    endpoint.advance(MINUTE)

    assert nothing.num_rows == 0
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_what_a_receive_acks_is_settled_before_it_waits(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    batch = endpoint.broker.receive(readers, name)

    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000, ack=batch))
    waiting = in_flight(endpoint, readers)
    endpoint.broker.send(name, messages(1, start=1))

    assert waiting == 0
    assert poll.result(60)["body"].to_pylist() == [b"1"]


def test_a_receive_whose_ack_is_refused_changes_nothing(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    ended = endpoint.broker.receive(readers, name, limit=1)
    valid = endpoint.broker.receive(readers, name, limit=1)
    endpoint.broker.ack(ended)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.receive(readers, name, wait_ms=30_000, ack=pa.concat_tables([valid, ended]))

    assert in_flight(endpoint, readers) == 1
    endpoint.broker.ack(valid)
    rest = endpoint.broker.receive(readers, name)
    assert (rest["body"].to_pylist(), rest["delivery_attempt"].to_pylist()) == ([b"2"], [1])


@pytest.mark.parametrize("wrong", [["no receipt"], pa.table({"message_id": ["x"]}), [7]])
def test_receipts_that_are_none_are_refused_with_nothing_leased(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, wrong: object
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))

    with pytest.raises((errors.ReceiptHandleError, errors.TableSchemaError)):
        endpoint.broker.receive(readers, name, ack=wrong)

    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [1]


def test_no_receipts_are_no_ack(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))

    batch = endpoint.broker.receive(readers, name, limit=1, ack=[])

    assert batch["body"].to_pylist() == [b"0"]


def test_a_receive_may_ack_deliveries_of_other_topics_and_groups(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, other, readers, others = topic(queues=1), topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(1))
    endpoint.broker.send(other, messages(1))
    batch = endpoint.broker.receive(others, other)

    got = endpoint.broker.receive(readers, name, ack=batch)
    endpoint.advance(MINUTE)

    assert got.num_rows == 1
    assert endpoint.broker.receive(others, other).num_rows == 0


def test_a_broker_that_is_closing_acks_what_a_receive_brings(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(1))
    batch = inside.broker.receive(readers, name)
    inside.inside.wind_down()

    nothing = inside.broker.receive(readers, name, wait_ms=30_000, ack=batch)

    assert nothing.num_rows == 0
    assert in_flight(inside, readers) == 0


def test_a_receive_that_is_refused_by_a_lock_has_acked(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, other, readers, others = topic(queues=1), topic(queues=1), group(), group()
    endpoint.broker.send(other, messages(1))
    batch = endpoint.broker.receive(others, other)
    endpoint.broker.lock_queues(readers, name, client_id="another", queue_ids=[0])

    with pytest.raises(errors.QueueLockedError):
        endpoint.broker.receive(readers, name, client_id="me", queue_ids=[0], ack=batch)

    assert in_flight(endpoint, others) == 0


def test_a_leader_that_is_fenced_while_a_receive_waits_does_not_deny_its_ack(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    """A client repeats a call that a fenced broker has refused; these receipts have ended."""
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(2))
    batch = inside.broker.receive(readers, name, limit=1)
    inside.broker.receive(readers, name, limit=1, invisible_duration_ms=10_000)
    poll = inside.begin(lambda: inside.broker.receive(readers, name, wait_ms=30_000, ack=batch))
    fenced = errors.LogFencedError("Another broker leads.")

    inside.inside.engine.repair.why = fenced
    inside.advance(10_000)  # it looks again

    assert poll.result(60).num_rows == 0
    with pytest.raises(errors.LogFencedError):
        inside.broker.receive(readers, name, ack=batch)
