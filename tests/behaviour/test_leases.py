"""A delivered message is invisible for a while, and its receipt is good for as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_message_returns_after_its_invisible_duration(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    door.broker.receive(readers, name, invisible_duration_ms=10_000)

    door.advance(9_999)
    early = door.broker.receive(readers, name)
    door.advance(1)
    back = door.broker.receive(readers, name)

    assert early.num_rows == 0
    assert back["body"].to_pylist() == [b"0"]


def test_every_ended_lease_counts_an_attempt(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))

    attempts = []
    for _ in range(5):
        got = door.broker.receive(readers, name, invisible_duration_ms=1_000)
        attempts += got["delivery_attempt"].to_pylist()
        door.advance(1_000)

    assert attempts == [1, 2, 3, 4, 5]


def test_an_acknowledged_message_never_returns(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(3))
    got = door.broker.receive(readers, name)

    door.broker.ack(got)
    door.advance(limits.INVISIBLE_MAX_MS)

    assert door.broker.receive(readers, name).num_rows == 0


def test_only_what_was_not_acknowledged_returns(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(6))
    got = door.broker.receive(readers, name)

    door.broker.ack(got.take([0, 2, 3, 5]))
    door.advance(MINUTE)

    assert door.broker.receive(readers, name)["body"].to_pylist() == [b"1", b"4"]


def test_receipts_may_be_a_list_of_texts(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(3))
    got = door.broker.receive(readers, name)

    door.broker.ack(got["receipt_handle"].to_pylist())
    door.advance(MINUTE)

    assert door.broker.receive(readers, name).num_rows == 0


def test_one_acknowledgement_may_span_topics_and_groups(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    names, readers = [topic(), topic()], [group(), group()]
    for name in names:
        door.broker.send(name, messages(3))
    got = [door.broker.receive(r, n) for n in names for r in readers]

    door.broker.ack(pa.concat_tables(got))
    door.advance(MINUTE)

    assert sum(door.broker.receive(r, n).num_rows for n in names for r in readers) == 0


def test_acknowledging_nothing_is_nothing(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    door.broker.receive(readers, name)

    door.broker.ack([])

    query = f"SELECT count(*) AS n FROM in_flight WHERE consumer_group = '{readers}'"
    assert door.sql(query) == [{"n": 1}]


# -------------------------------------------------------------------------------- ended receipts


def test_a_late_receipt_is_refused(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    late = door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(late)

    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_receipt_is_good_until_the_last_millisecond(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(999)

    door.broker.ack(got)
    door.advance(MINUTE)

    assert door.broker.receive(readers, name).num_rows == 0


def test_a_receipt_of_an_older_delivery_is_refused(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    old = door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)
    new = door.broker.receive(readers, name)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(old)

    door.broker.ack(new)
    door.advance(MINUTE)
    assert door.broker.receive(readers, name).num_rows == 0


def test_a_receipt_settles_once(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)
    door.broker.ack(got)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got)


def test_one_ended_receipt_refuses_the_whole_acknowledgement(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(3))
    short = door.broker.receive(readers, name, limit=1, invisible_duration_ms=1_000)
    long = door.broker.receive(readers, name, invisible_duration_ms=MINUTE)
    door.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(pa.concat_tables([long, short]))

    door.advance(MINUTE - 1_000)
    back = door.broker.receive(readers, name).to_pylist()
    assert [row["body"] for row in back] == [b"0", b"1", b"2"]


# ------------------------------------------------------------------------------ foreign receipts


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3 4 5 6 7 8", "{}", "é", "A" * 300])
def test_a_receipt_the_broker_never_gave_is_refused(
    door: Door, topic: Make, group: Make, messages: Make, text: str
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack([got["receipt_handle"][0].as_py(), text])

    door.broker.ack(got)


def test_a_receipt_with_a_changed_character_is_refused(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)
    text = got["receipt_handle"][0].as_py()

    for place in range(0, len(text), 3):
        other = "7" if text[place] != "7" else "3"
        with pytest.raises(errors.ReceiptHandleError):
            door.broker.ack([text[:place] + other + text[place + 1 :]])

    door.broker.ack(got)


def test_a_group_does_not_settle_the_deliveries_of_another(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, mine, theirs = topic(queues=1), group(), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(theirs, name)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.settle(mine, outcomes(got, "ack"))

    door.broker.ack(got)


# --------------------------------------------------------------------- change invisible duration


def test_a_changed_lease_ends_at_its_new_time(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name, invisible_duration_ms=10_000)
    door.advance(9_000)

    door.broker.change_invisible_duration(got, 30_000)

    door.advance(29_999)
    assert door.broker.receive(readers, name).num_rows == 0
    door.advance(1)
    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_lease_may_be_cut_short(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name, invisible_duration_ms=MINUTE)

    door.broker.change_invisible_duration(got, 5)
    door.advance(5)

    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_a_changed_lease_has_a_new_receipt_and_the_old_one_is_void(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    old = door.broker.receive(readers, name)
    new = door.broker.change_invisible_duration(old, 30_000)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(old)

    door.broker.ack(new)
    door.advance(MINUTE)
    assert door.broker.receive(readers, name).num_rows == 0


def test_new_receipts_come_in_the_order_of_the_old_ones(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    door.broker.send(name, messages(9))
    old = door.broker.receive(readers, name).take([4, 0, 8, 2, 6])

    new = door.broker.change_invisible_duration(old, 30_000)
    door.broker.ack(new.slice(1))
    door.advance(30_000)

    [back] = door.broker.receive(readers, name, limit=1).to_pylist()
    first = old.slice(0, 1).to_pylist()[0]
    assert new.num_rows == 5
    assert back["body"] == first["body"]


@pytest.mark.parametrize("duration_ms", [-1, limits.INVISIBLE_MAX_MS + 1])
def test_a_change_out_of_range_is_refused_and_the_lease_stays(
    door: Door, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    with pytest.raises(errors.InvisibleDurationError):
        door.broker.change_invisible_duration(got, duration_ms)

    door.broker.ack(got)


def test_one_ended_receipt_refuses_the_whole_change(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    short = door.broker.receive(readers, name, limit=1, invisible_duration_ms=1_000)
    long = door.broker.receive(readers, name)
    door.advance(1_000)

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.change_invisible_duration(pa.concat_tables([long, short]), 30_000)

    door.broker.ack(long)
