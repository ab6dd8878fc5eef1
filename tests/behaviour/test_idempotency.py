"""An ack remembers the key of its effect, for the group and for a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.idempotency import acks, mark

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

DAY = 24 * 3600 * 1000


def seen(door: Door, group: str, *keys: str | None) -> list[int | None]:
    """When each of the keys was last remembered, in ms before now."""
    answer = door.broker.seen_before(group, pa.table([keys], schema=schema.IDEMPOTENCY_KEY))
    assert answer.schema.equals(schema.SEEN)
    assert answer["idempotency_key"].to_pylist() == list(keys)
    now = door.clock.now_ms()
    return [None if at is None else now - at for at in answer["seen_at_ms"].to_pylist()]


def settle(
    door: Door, group: str, got: pa.Table, outcomes: list[str], keys: list[str | None]
) -> None:
    columns = {
        "receipt_handle": got["receipt_handle"],
        "outcome": outcomes,
        "idempotency_key": pa.array(keys, pa.string()),
    }
    door.broker.settle(group, pa.table(columns))


@pytest.mark.every_endpoint
def test_an_ack_remembers_its_key_and_a_failure_does_not(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(4))
    got = door.broker.receive(readers, name)

    settle(door, readers, got, ["ack", "retry", "dead_letter", "ack"], ["a", "b", "c", None])
    door.advance(7)

    assert seen(door, readers, "a", "b", "c", "d", None, "a") == [7, None, None, None, None, 7]


def test_keys_belong_to_their_group(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers, others = topic(queues=1), group(), group()
    door.broker.send(name, messages(1))
    settle(door, readers, door.broker.receive(readers, name), ["ack"], ["a"])

    assert seen(door, others, "a") == [None]


def test_a_key_is_remembered_for_a_day_unless_the_group_says_otherwise(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, brief = topic(queues=1), group(), group(idempotency_window_ms=1_000)
    door.broker.send(name, messages(1))
    for each in (readers, brief):
        settle(door, each, door.broker.receive(each, name), ["ack"], ["a"])

    door.advance(999)
    assert (seen(door, readers, "a"), seen(door, brief, "a")) == ([999], [999])
    door.advance(1)
    assert (seen(door, readers, "a"), seen(door, brief, "a")) == ([1_000], [None])
    door.advance(DAY - 1_001)
    assert seen(door, readers, "a") == [DAY - 1]
    door.advance(1)
    assert seen(door, readers, "a") == [None]


def test_the_window_can_be_altered(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    settle(door, readers, door.broker.receive(readers, name), ["ack"], ["a"])
    door.advance(5_000)
    before = seen(door, readers, "a")

    altered = door.broker.alter_group(readers, idempotency_window_ms=5_000)
    shorter = seen(door, readers, "a")
    door.broker.alter_group(readers, idempotency_window_ms=5_001)

    assert altered["idempotency_window_ms"] == 5_000
    assert (before, shorter, seen(door, readers, "a")) == ([5_000], [None], [5_000])


@pytest.mark.parametrize("window_ms", [0, -1, "x", limits.IDEMPOTENCY_WINDOW_MAX_MS + 1])
def test_a_window_out_of_range_is_refused(door: Door, group: Make, window_ms: Any) -> None:
    with pytest.raises(errors.RequestError):
        group("wrong", idempotency_window_ms=window_ms)
    readers = group()
    with pytest.raises(errors.RequestError):
        door.broker.alter_group(readers, idempotency_window_ms=window_ms)


def test_keys_beyond_the_window_are_forgotten_on_disk_too(
    inside: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(idempotency_window_ms=1_000)
    for key in ("a", "b", "c"):
        inside.broker.send(name, messages(1))
        settle(inside, readers, inside.broker.receive(readers, name), ["ack"], [key])
        inside.inside.engine.dispatched()
        inside.advance(60_000)

    kept = inside.inside.engine.database._read(
        lambda cursor: cursor.sql("SELECT idempotency_key FROM store.effects").fetchall()
    )

    assert kept == [("c",)]


@pytest.mark.parametrize("dispatched", [True, False])
def test_keys_are_remembered_across_a_restart(
    door: Door, topic: Make, group: Make, messages: Make, dispatched: bool
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    settle(door, readers, door.broker.receive(readers, name), ["ack", "ack"], ["a", "b"])
    if dispatched:
        seen(door, readers, "a")

    door.reopen()

    assert seen(door, readers, "a", "b", "c") == [0, 0, None]


def test_a_refused_settle_remembers_nothing(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)
    door.broker.ack(got.slice(1))

    with pytest.raises(errors.ReceiptHandleError):
        settle(door, readers, got, ["ack", "ack"], ["a", "b"])

    assert seen(door, readers, "a", "b") == [None, None]


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_empty_or_too_long_is_refused(
    door: Door, topic: Make, group: Make, messages: Make, key: str
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    with pytest.raises(errors.RequestError, match="row 0"):
        settle(door, readers, got, ["ack"], [key])
    with pytest.raises(errors.RequestError):
        seen(door, readers, key)

    door.broker.ack(got)


def test_a_message_sent_twice_has_its_effect_once(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    effects: list[str] = []

    for _ in range(2):
        door.broker.send(name, messages(3, keys=[["a"], ["b"], ["a"]]))
        got = mark(door.broker, door.broker.receive(readers, name), group=readers, key="keys")
        fresh = got.filter([not known for known in got["seen_before"].to_pylist()])
        effects += [keys[0] for keys in fresh["keys"].to_pylist()]
        door.broker.settle(readers, acks(got))

    assert effects == ["a", "b"]


def test_a_redriven_message_whose_effect_was_carried_out_is_seen(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2, keys=[["order-1"]] * 2))
    first, second = (door.broker.receive(readers, name, limit=1) for _ in range(2))
    door.broker.settle(readers, acks(mark(door.broker, first, group=readers, key="keys")))
    door.broker.forward_to_dead_letter_queue(second)

    letter = pa.table([[0], [0]], schema=schema.DEAD_LETTER)
    door.broker.redrive(readers, letter, redrive_id="r")
    again = mark(door.broker, door.broker.receive(readers, name), group=readers, key="keys")

    assert again["seen_before"].to_pylist() == [True]
