"""An ack remembers the key of its effect, for the group and for a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.idempotency import acks, mark

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

DAY = 24 * 3600 * 1000


def seen(endpoint: Endpoint, group: str, *keys: str | None) -> list[int | None]:
    """When each of the keys was last remembered, in ms before now."""
    answer = endpoint.broker.seen_before(group, pa.table([keys], schema=schema.IDEMPOTENCY_KEY))
    assert answer.schema.equals(schema.SEEN)
    assert answer["idempotency_key"].to_pylist() == list(keys)
    now = endpoint.clock.now_ms()
    return [None if at is None else now - at for at in answer["seen_at_ms"].to_pylist()]


def settle(
    endpoint: Endpoint, group: str, got: pa.Table, outcomes: list[str], keys: list[str | None]
) -> None:
    columns = {
        "receipt_handle": got["receipt_handle"],
        "outcome": outcomes,
        "idempotency_key": pa.array(keys, pa.string()),
    }
    endpoint.broker.settle(group, pa.table(columns))


@pytest.mark.every_endpoint
def test_an_ack_remembers_its_key_and_a_failure_does_not(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(4))
    got = endpoint.broker.receive(readers, name)

    settle(endpoint, readers, got, ["ack", "retry", "dead_letter", "ack"], ["a", "b", "c", None])
    endpoint.advance(7)

    assert seen(endpoint, readers, "a", "b", "c", "d", None, "a") == [7, None, None, None, None, 7]


def test_keys_belong_to_their_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, others = topic(queues=1), group(), group()
    endpoint.broker.send(name, messages(1))
    settle(endpoint, readers, endpoint.broker.receive(readers, name), ["ack"], ["a"])

    assert seen(endpoint, others, "a") == [None]


def test_a_key_is_remembered_for_a_day_unless_the_group_says_otherwise(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, brief = topic(queues=1), group(), group(idempotency_window_ms=1_000)
    endpoint.broker.send(name, messages(1))
    for each in (readers, brief):
        settle(endpoint, each, endpoint.broker.receive(each, name), ["ack"], ["a"])

    endpoint.advance(999)
    assert (seen(endpoint, readers, "a"), seen(endpoint, brief, "a")) == ([999], [999])
    endpoint.advance(1)
    assert (seen(endpoint, readers, "a"), seen(endpoint, brief, "a")) == ([1_000], [None])
    endpoint.advance(DAY - 1_001)
    assert seen(endpoint, readers, "a") == [DAY - 1]
    endpoint.advance(1)
    assert seen(endpoint, readers, "a") == [None]


def test_the_window_can_be_altered(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    settle(endpoint, readers, endpoint.broker.receive(readers, name), ["ack"], ["a"])
    endpoint.advance(5_000)
    before = seen(endpoint, readers, "a")

    altered = endpoint.broker.alter_group(readers, idempotency_window_ms=5_000)
    shorter = seen(endpoint, readers, "a")
    endpoint.broker.alter_group(readers, idempotency_window_ms=5_001)

    assert altered["idempotency_window_ms"] == 5_000
    assert (before, shorter, seen(endpoint, readers, "a")) == ([5_000], [None], [5_000])


@pytest.mark.parametrize("window_ms", [0, -1, "x", limits.IDEMPOTENCY_WINDOW_MAX_MS + 1])
def test_a_window_out_of_range_is_refused(endpoint: Endpoint, group: Make, window_ms: Any) -> None:
    with pytest.raises(errors.RequestError):
        group("wrong", idempotency_window_ms=window_ms)
    readers = group()
    with pytest.raises(errors.RequestError):
        endpoint.broker.alter_group(readers, idempotency_window_ms=window_ms)


def test_keys_beyond_the_window_are_forgotten_on_disk_too(
    inside: Endpoint, topic: Make, group: Make, messages: Make
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
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, dispatched: bool
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    settle(endpoint, readers, endpoint.broker.receive(readers, name), ["ack", "ack"], ["a", "b"])
    if dispatched:
        seen(endpoint, readers, "a")

    endpoint.reopen()

    assert seen(endpoint, readers, "a", "b", "c") == [0, 0, None]


def test_a_refused_settle_remembers_nothing(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got.slice(1))

    with pytest.raises(errors.ReceiptHandleError):
        settle(endpoint, readers, got, ["ack", "ack"], ["a", "b"])

    assert seen(endpoint, readers, "a", "b") == [None, None]


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_empty_or_too_long_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, key: str
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.RequestError, match="row 0"):
        settle(endpoint, readers, got, ["ack"], [key])
    with pytest.raises(errors.RequestError):
        seen(endpoint, readers, key)

    endpoint.broker.ack(got)


def test_a_message_sent_twice_has_its_effect_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    effects: list[str] = []

    for _ in range(2):
        endpoint.broker.send(name, messages(3, keys=[["a"], ["b"], ["a"]]))
        got = mark(
            endpoint.broker, endpoint.broker.receive(readers, name), group=readers, key="keys"
        )
        fresh = got.filter([not known for known in got["seen_before"].to_pylist()])
        effects += [keys[0] for keys in fresh["keys"].to_pylist()]
        endpoint.broker.settle(readers, acks(got))

    assert effects == ["a", "b"]


def test_a_redriven_message_whose_effect_was_carried_out_is_seen(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2, keys=[["order-1"]] * 2))
    first, second = (endpoint.broker.receive(readers, name, limit=1) for _ in range(2))
    endpoint.broker.settle(readers, acks(mark(endpoint.broker, first, group=readers, key="keys")))
    endpoint.broker.forward_to_dead_letter_queue(second)

    letter = pa.table([[0], [0]], schema=schema.DEAD_LETTER)
    endpoint.broker.redrive(readers, letter, redrive_id="r")
    again = mark(endpoint.broker, endpoint.broker.receive(readers, name), group=readers, key="keys")

    assert again["seen_before"].to_pylist() == [True]
