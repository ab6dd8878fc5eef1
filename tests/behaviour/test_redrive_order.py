"""A redriven message comes in its place: before what follows it, after what is being handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from tests.behaviour.redrives import bodies, redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.mark.every_endpoint
def test_redriven_messages_keep_their_order_before_what_follows_them(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(4, groups=["a", "b"], more=4)

    redrive(endpoint, readers, 3, 1, 2, 0)
    got = endpoint.drain(name, readers)

    a, b = ([x for x in got if int(x) % 2 == i] for i in (0, 1))
    assert (a, b) == ([b"0", b"2", b"4", b"6"], [b"1", b"3", b"5", b"7"])


def test_a_redriven_message_waits_for_those_of_its_group_that_are_with_a_receiver(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1, groups=["a"], more=2)
    held = endpoint.broker.receive(readers, name, limit=1)
    redrive(endpoint, readers, 0)

    meanwhile = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(held)

    assert bodies(held) == [b"1"]
    assert meanwhile.num_rows == 0
    assert endpoint.drain(name, readers) == [b"0", b"2"]


def test_when_their_lease_ends_the_group_comes_again_from_the_redriven_message_on(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1, groups=["a"], more=3)
    held = endpoint.broker.receive(readers, name, limit=2, invisible_duration_ms=10_000)
    redrive(endpoint, readers, 0)
    endpoint.advance(9_999)
    early = endpoint.broker.receive(readers, name)
    endpoint.advance(1)

    got = endpoint.broker.receive(readers, name)

    assert bodies(held) == [b"1", b"2"]
    assert early.num_rows == 0
    assert bodies(got) == [b"0", b"1", b"2"]
    assert got["delivery_attempt"].to_pylist() == [1, 2, 1]
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(held)
    endpoint.broker.ack(got)
    assert endpoint.drain(name, readers) == [b"3"]


def test_revive_counts_a_lease_that_ended_behind_a_redriven_message(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1, groups=["a"], more=1)
    endpoint.broker.receive(readers, name, invisible_duration_ms=10_000)
    redrive(endpoint, readers, 0)
    endpoint.advance(10_000)

    endpoint.broker.revive()

    got = endpoint.broker.receive(readers, name)
    assert bodies(got) == [b"0", b"1"]
    assert got["delivery_attempt"].to_pylist() == [1, 2]


def test_a_failure_behind_a_redriven_message_lets_it_come_first(
    endpoint: Endpoint, dead: Make, fail: Make
) -> None:
    name, readers = dead(1, groups=["a"], more=2, backoff_ms=[60_000])
    held = endpoint.broker.receive(readers, name, limit=1)
    redrive(endpoint, readers, 0)
    fail(readers, held)

    first = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(first)
    waiting = endpoint.broker.receive(readers, name)
    endpoint.advance(60_000)

    assert (bodies(first), waiting.num_rows) == ([b"0"], 0)
    assert endpoint.drain(name, readers) == [b"1", b"2"]


def test_other_groups_go_on_while_a_redriven_message_is_with_a_receiver(
    endpoint: Endpoint, dead: Make, messages: Make
) -> None:
    name, readers = dead(1, groups=["a"])
    redrive(endpoint, readers, 0)
    endpoint.broker.receive(readers, name)
    endpoint.broker.send(name, messages(4, start=1, groups=["a", "b"]))

    assert bodies(endpoint.broker.receive(readers, name)) == [b"2", b"4"]


def test_a_redriven_message_that_waits_behind_its_blocked_group_comes_once(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(4, groups=["a"])
    endpoint.broker.reset_offset(readers, name, to_earliest=True)
    first = endpoint.broker.receive(readers, name, limit=1)
    endpoint.broker.receive(readers, name)

    redrive(endpoint, readers, 0, 1, 2, 3)
    endpoint.broker.ack(first)

    assert endpoint.drain(name, readers) == [b"1", b"2", b"3"]


def test_a_redriven_message_before_a_parked_one_comes_and_the_hold_stays(
    endpoint: Endpoint, dead: Make, fail: Make
) -> None:
    name, readers = dead(1, groups=["a"], more=3, max_attempts=1)
    endpoint.broker.alter_group(readers, on_failure="park")
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    redrive(endpoint, readers, 0)
    before = endpoint.drain(name, readers)
    endpoint.broker.unpark(readers)

    assert before == [b"0"]
    assert endpoint.drain(name, readers) == [b"1", b"2", b"3"]


def test_a_redriven_message_behind_a_parked_one_is_held_until_it_is_unparked(
    endpoint: Endpoint, dead: Make, fail: Make
) -> None:
    name, readers = dead(3, groups=["a"], more=1, max_attempts=1)
    endpoint.broker.alter_group(readers, on_failure="park")
    redrive(endpoint, readers, 1)
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    redrive(endpoint, readers, 2, 0)

    first = endpoint.drain(name, readers)
    [state] = endpoint.sql("SELECT outcome FROM redrives WHERE dead_letter_offset = 1")
    ready = endpoint.broker.due()["groups"][readers]["topics"][name]["ready"]
    endpoint.reopen()
    endpoint.broker.unpark(readers)

    assert (first, state["outcome"], ready) == ([b"0"], "parked", 0)
    assert endpoint.drain(name, readers) == [b"1", b"2", b"3"]


def test_dead_letters_of_a_message_group_that_was_quarantined_are_redriven_in_order(
    endpoint: Endpoint, dead: Make, fail: Make, messages: Make
) -> None:
    name, readers = dead(0, groups=["a"], more=3, max_attempts=1)
    endpoint.broker.alter_group(readers, on_failure="dead_letter_group")
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.drain(name, readers)

    redrive(endpoint, readers, 0, 1, 2)
    endpoint.broker.send(name, messages(1, start=3, groups=["a"]))
    came = endpoint.drain(name, readers)
    endpoint.broker.unpark(readers)
    redrive(endpoint, readers, 3)

    assert came == [b"0", b"1", b"2"]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0", b"1", b"2", b"3"]
    assert endpoint.drain(name, readers) == [b"3"]


def test_a_redriven_message_that_fails_again_gives_its_message_group_up_again(
    endpoint: Endpoint, dead: Make, fail: Make
) -> None:
    name, readers = dead(0, groups=["a"], more=3, max_attempts=1)
    endpoint.broker.alter_group(readers, on_failure="dead_letter_group")
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.drain(name, readers)

    redrive(endpoint, readers, 0, 1, 2)
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    assert endpoint.drain(name, readers) == []
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0", b"1", b"2"] * 2


def test_redriven_messages_of_the_older_queues_of_a_grown_topic_come_first(
    endpoint: Endpoint, dead: Make, messages: Make
) -> None:
    groups = [f"g{i}" for i in range(8)]
    name, readers = dead(16, groups=groups, more=8)
    endpoint.broker.alter_topic(name, queues=4)
    endpoint.broker.send(name, messages(8, start=24, groups=groups))

    redrive(endpoint, readers, *range(16))
    came = [int(body) for body in endpoint.drain(name, readers)]

    assert sorted(came) == list(range(32))
    for i in range(8):
        assert [n for n in came if n % 8 == i] == [i, i + 8, i + 16, i + 24]
