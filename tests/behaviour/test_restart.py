"""Closed and opened again, a broker goes on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000


@pytest.mark.every_endpoint
def test_messages_are_there_after_a_restart(door: Door, topic: Make, messages: Make) -> None:
    name = topic(queues=3)
    door.broker.send(name, messages(100, tag="t", properties=[[("p", "v")]] * 100))
    before = [door.broker.read(name, q, offset=0, limit=100) for q in range(3)]

    door.reopen()

    after = [door.broker.read(name, q, offset=0, limit=100) for q in range(3)]
    assert all(a.equals(b) for a, b in zip(before, after, strict=True))
    door.broker.send(name, messages(2))
    assert door.stored(name) == 102


def test_topics_and_groups_are_there_after_a_restart(door: Door, topic: Make, group: Make) -> None:
    name = topic(type="delay", queues=3, partition_time="born")
    backoff = {"initial_ms": 7, "max_ms": 8, "multiplier": 1.5}
    readers = group(
        order="message_group", max_attempts=4, backoff=backoff, on_failure="dead_letter_group"
    )
    before = door.broker.describe_topic(name), door.broker.describe_group(readers)

    door.reopen()

    assert (door.broker.describe_topic(name), door.broker.describe_group(readers)) == before


def test_the_id_of_a_deleted_topic_or_group_is_never_used_again(door: Door) -> None:
    gone = door.broker.create_topic("gone")["topic_id"]
    left = door.broker.create_group("left")["group_id"]
    door.broker.delete_group("left")
    door.broker.delete_topic("gone")

    door.reopen()

    assert door.broker.create_topic("new")["topic_id"] > gone
    assert door.broker.create_group("new")["group_id"] > left


def test_progress_is_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, others = topic(queues=2), group(), group()
    door.broker.send(name, messages(10))
    door.drain(name, readers, limit=6)
    door.broker.send(name, messages(4, start=10))
    door.broker.receive(others, name, limit=3)

    door.reopen()

    assert sorted(door.drain(name, readers)) == [b"10", b"11", b"12", b"13"]
    assert len(door.drain(name, others)) == 11


def test_a_receipt_is_good_across_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)

    door.reopen()

    door.broker.ack(got.slice(0, 1))
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got.slice(0, 1))
    door.advance(MINUTE)
    again = door.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"1"]
    assert again["delivery_attempt"].to_pylist() == [2]


def test_a_lease_is_not_extended_by_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name, invisible_duration_ms=10_000)
    door.advance(9_999)

    door.reopen()

    assert door.broker.receive(readers, name).num_rows == 0
    door.advance(1)
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got)
    assert door.broker.receive(readers, name).num_rows == 1


def test_a_backoff_goes_on_across_a_restart(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[5_000])
    door.broker.send(name, messages(1))
    fail(readers, door.broker.receive(readers, name))

    door.advance(4_999)
    door.reopen()

    assert door.broker.receive(readers, name).num_rows == 0
    door.advance(1)
    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_blocked_groups_and_their_backlog_are_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    door.broker.send(name, messages(300, groups=["a", "b", "c"]))
    held = {}
    for _ in range(2):
        got = door.broker.receive(readers, name, limit=1)
        held[got["message_group"][0].as_py()] = got
    door.drain(name, readers)

    door.reopen()

    assert door.broker.receive(readers, name).num_rows == 0
    for one, got in held.items():
        door.broker.ack(got)
        start = "abc".index(one)
        rest = [str(i).encode() for i in range(start + 3, 300, 3)]
        assert door.drain(name, readers) == rest


def test_an_order_inside_a_delivery_is_kept_across_a_restart(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", backoff_ms=[1_000])
    door.broker.send(name, messages(6, groups=["a"]))
    got = door.broker.receive(readers, name)
    door.broker.ack(got.take([0, 1, 4]))
    fail(readers, got.take([2]))

    door.reopen()
    door.advance(1_000)

    again = door.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"2", b"3", b"5"]
    assert again["delivery_attempt"].to_pylist() == [2, 1, 1]


def test_the_schedule_is_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="delay", queues=1), group()
    due = door.clock.now_ms() + 1_234
    door.broker.send(name, messages(3, delay_level=[1, 2, None], deliver_at_ms=[None, None, due]))
    door.advance(1_000)
    door.broker.deliver_scheduled()

    door.reopen()

    early = door.broker.deliver_scheduled()
    door.advance(234)
    report = door.broker.deliver_scheduled()
    assert (early["delivered"], early["next_due_ms"], report["delivered"]) == (0, due, 1)
    assert door.drain(name, readers) == [b"0", b"2"]


@pytest.mark.every_endpoint
def test_attempts_are_counted_across_restarts(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=4, backoff_ms=[0])
    door.broker.send(name, messages(1))

    for attempt in (1, 2, 3, 4):
        got = door.broker.receive(readers, name, invisible_duration_ms=1_000)
        assert got["delivery_attempt"].to_pylist() == [attempt]
        if attempt % 2:
            fail(readers, got)  # else nobody answers: its lease ends while the broker is away
        door.reopen()
        door.advance(1_000)
    door.broker.revive()

    assert door.stored(f"%DLQ%{readers}") == 1


def test_why_a_delivery_failed_is_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=2)
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)
    fail(readers, got, retry_after_ms=0, reason="no engine", error_type="EngineError")
    door.sql("FROM retrying")  # the tables have it, and the log is not needed for it

    door.reopen()

    door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)
    door.broker.revive()
    dead = door.sql("SELECT reason, error_type FROM dead_letters")
    assert dead == [{"reason": "no engine", "error_type": "EngineError"}] * 2


def test_dead_letters_are_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    got = door.broker.receive(readers, name)
    door.broker.forward_to_dead_letter_queue(got.slice(1), reason="why")

    door.reopen()

    assert door.bodies(f"%DLQ%{readers}") == [b"1"]
    door.broker.ack(got.slice(0, 1))


def test_windows_and_settle_ids_are_there_after_a_restart(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, onward, readers = topic(queues=1), topic(queues=1), group(name="readers")
    door.broker.send(name, messages(2))
    opened = door.broker.open_window("consumer/readers", owner="run-1", duration_ms=MINUTE)
    window = ("consumer/readers", opened["epoch"])
    got = door.broker.receive(readers, name, window=window)

    def settle() -> object:
        return door.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id="s-1",
            window=window,
            publish={onward: messages(3)},
        )

    first = settle()

    door.reopen()

    assert settle() == first
    assert door.stored(onward) == 3
    other = door.broker.open_window("consumer/readers", owner="run-2", duration_ms=MINUTE)
    assert other["yielded_to"] == "run-1"
    taken = door.broker.open_window(
        "consumer/readers", owner="run-2", duration_ms=MINUTE, takeover=True
    )
    assert taken["epoch"] > window[1]


def test_keyed_state_and_sink_files_are_there_after_a_restart(
    door: Door, topic: Make, group: Make
) -> None:
    name, readers = topic(type="fifo"), group(order="message_group")
    nothing = schema.OUTCOME.empty_table()
    files = pa.table([["x"], [1], [2], ["p"]], names=schema.SINK_FILE.names[:4])
    state = pa.table({"message_group": ["a", "b"], "total": [1, 2]})
    door.broker.settle(readers, nothing, sink_files=files, state=state, topic=name)
    listed = door.broker.sink_files(readers)

    door.reopen()

    found = door.broker.keyed_state(readers, name)
    assert found is not None
    assert sorted(r["total"] for r in found.to_pylist()) == [1, 2]
    assert door.broker.sink_files(readers).equals(listed)


def test_a_reset_holds_across_a_restart(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(5))
    door.broker.receive(readers, name)
    door.broker.reset_offset(readers, name, to_offset=3)

    door.reopen()

    again = door.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"3", b"4"]
    assert again["delivery_attempt"].to_pylist() == [1, 1]


def test_a_deleted_topic_stays_deleted(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(5))
    door.broker.receive(readers, name)
    door.broker.delete_topic(name, force=True)
    door.broker.create_topic(name, queues=1)
    door.broker.send(name, messages(1, start=9))

    door.reopen()

    assert door.drain(name, readers) == [b"9"]


def test_what_was_sealed_is_read_as_before(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    door.broker.send(name, messages(500, tag="t", properties=[[("p", "v")]] * 500))
    before = [door.broker.read(name, q, offset=0, limit=500) for q in range(2)]
    door.advance(3_600_000)
    report = door.broker.seal()

    sealed = [door.broker.read(name, q, offset=0, limit=500) for q in range(2)]
    door.reopen()
    after = [door.broker.read(name, q, offset=0, limit=500) for q in range(2)]

    assert report["rows"] >= 500
    for q in range(2):
        assert sealed[q].equals(before[q])
        assert after[q].equals(before[q])
    assert len(door.drain(name, readers)) == 500


def test_time_does_not_step_back(inside: Door, topic: Make, messages: Make) -> None:
    name = topic(queues=1)
    inside.advance(10_000)
    inside.broker.send(name, messages(1))
    inside.advance(-5_000)
    inside.reopen()

    inside.broker.send(name, messages(1))

    first, second = inside.broker.read(name, 0, offset=0, limit=2)["stored_at_ms"].to_pylist()
    assert second >= first


def test_opening_twenty_times_changes_nothing(
    inside: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    inside.broker.send(name, messages(40, groups=["a", "b", "c"]))
    seen = []

    for _ in range(20):
        got = inside.broker.receive(readers, name, limit=2)
        inside.broker.ack(got)
        seen += [int(b) for b in got["body"].to_pylist()]
        inside.reopen()

    assert sorted(seen) == list(range(40))
    for i in range(3):
        mine = [n for n in seen if n % 3 == i]
        assert mine == sorted(mine)
