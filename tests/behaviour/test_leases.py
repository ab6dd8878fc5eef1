"""A delivered message is invisible for a while, and its receipt is good for as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_message_returns_after_its_invisible_duration(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    endpoint.broker.receive(readers, name, invisible_duration_ms=10_000)

    endpoint.advance(9_999)
    early = endpoint.broker.receive(readers, name)
    endpoint.advance(1)
    back = endpoint.broker.receive(readers, name)

    assert early.num_rows == 0
    assert back["body"].to_pylist() == [b"0"]


def test_every_ended_lease_counts_an_attempt(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))

    attempts = []
    for _ in range(5):
        got = endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
        attempts += got["delivery_attempt"].to_pylist()
        endpoint.advance(1_000)

    assert attempts == [1, 2, 3, 4, 5]


def test_an_acknowledged_message_never_returns(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.ack(got)
    endpoint.advance(limits.INVISIBLE_MAX_MS)

    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_only_what_was_not_acknowledged_returns(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(6))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.ack(got.take([0, 2, 3, 5]))
    endpoint.advance(MINUTE)

    assert endpoint.broker.receive(readers, name)["body"].to_pylist() == [b"1", b"4"]


def test_receipts_may_be_a_list_of_texts(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    got = endpoint.broker.receive(readers, name)

    endpoint.broker.ack(got["receipt_handle"].to_pylist())
    endpoint.advance(MINUTE)

    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_one_acknowledgement_may_span_topics_and_groups(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    names, readers = [topic(), topic()], [group(), group()]
    for name in names:
        endpoint.broker.send(name, messages(3))
    got = [endpoint.broker.receive(r, n) for n in names for r in readers]

    endpoint.broker.ack(pa.concat_tables(got))
    endpoint.advance(MINUTE)

    assert sum(endpoint.broker.receive(r, n).num_rows for n in names for r in readers) == 0


def test_acknowledging_nothing_is_nothing(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    endpoint.broker.receive(readers, name)

    endpoint.broker.ack([])

    query = f"SELECT count(*) AS n FROM in_flight WHERE consumer_group = '{readers}'"
    assert endpoint.sql(query) == [{"n": 1}]


# -------------------------------------------------------------------------------- ended receipts


def test_a_late_receipt_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    late = endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(late)

    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_receipt_is_good_until_the_last_millisecond(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(999)

    endpoint.broker.ack(got)
    endpoint.advance(MINUTE)

    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_a_receipt_of_an_older_delivery_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    old = endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)
    new = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(old)

    endpoint.broker.ack(new)
    endpoint.advance(MINUTE)
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_a_receipt_settles_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)


def test_one_ended_receipt_refuses_the_whole_acknowledgement(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    short = endpoint.broker.receive(readers, name, limit=1, invisible_duration_ms=1_000)
    long = endpoint.broker.receive(readers, name, invisible_duration_ms=MINUTE)
    endpoint.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(pa.concat_tables([long, short]))

    endpoint.advance(MINUTE - 1_000)
    back = endpoint.broker.receive(readers, name).to_pylist()
    assert [row["body"] for row in back] == [b"0", b"1", b"2"]


# ------------------------------------------------------------------------------ foreign receipts


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3 4 5 6 7 8", "{}", "é", "A" * 300])
def test_a_receipt_the_broker_never_gave_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, text: str
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack([got["receipt_handle"][0].as_py(), text])

    endpoint.broker.ack(got)


def test_a_receipt_with_a_changed_character_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)
    text = got["receipt_handle"][0].as_py()

    for place in range(0, len(text), 3):
        other = "7" if text[place] != "7" else "3"
        with pytest.raises(errors.ReceiptHandleError):
            endpoint.broker.ack([text[:place] + other + text[place + 1 :]])

    endpoint.broker.ack(got)


def test_a_group_does_not_settle_the_deliveries_of_another(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, mine, theirs = topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(theirs, name)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.settle(mine, outcomes(got, "ack"))

    endpoint.broker.ack(got)


# --------------------------------------------------------------------- change invisible duration


def test_a_changed_lease_ends_at_its_new_time(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name, invisible_duration_ms=10_000)
    endpoint.advance(9_000)

    endpoint.broker.change_invisible_duration(got, 30_000)

    endpoint.advance(29_999)
    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.advance(1)
    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_lease_may_be_cut_short(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name, invisible_duration_ms=MINUTE)

    endpoint.broker.change_invisible_duration(got, 5)
    endpoint.advance(5)

    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_changed_lease_has_a_new_receipt_and_the_old_one_is_void(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    old = endpoint.broker.receive(readers, name)
    new = endpoint.broker.change_invisible_duration(old, 30_000)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(old)

    endpoint.broker.ack(new)
    endpoint.advance(MINUTE)
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_new_receipts_come_in_the_order_of_the_old_ones(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    endpoint.broker.send(name, messages(9))
    old = endpoint.broker.receive(readers, name).take([4, 0, 8, 2, 6])

    new = endpoint.broker.change_invisible_duration(old, 30_000)
    endpoint.broker.ack(new.slice(1))
    endpoint.advance(30_000)

    [back] = endpoint.broker.receive(readers, name, limit=1).to_pylist()
    first = old.slice(0, 1).to_pylist()[0]
    assert new.num_rows == 5
    assert back["body"] == first["body"]


@pytest.mark.parametrize("duration_ms", [-1, limits.INVISIBLE_MAX_MS + 1])
def test_a_change_out_of_range_is_refused_and_the_lease_stays(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.InvisibleDurationError):
        endpoint.broker.change_invisible_duration(got, duration_ms)

    endpoint.broker.ack(got)


def test_one_ended_receipt_refuses_the_whole_change(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    short = endpoint.broker.receive(readers, name, limit=1, invisible_duration_ms=1_000)
    long = endpoint.broker.receive(readers, name)
    endpoint.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.change_invisible_duration(pa.concat_tables([long, short]), 30_000)

    endpoint.broker.ack(long)
