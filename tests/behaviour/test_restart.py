"""Closed and opened again, a broker goes on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.mark.every_endpoint
def test_messages_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=3)
    endpoint.broker.send(name, messages(100, tag="t", properties=[[("p", "v")]] * 100))
    before = [endpoint.broker.read(name, q, offset=0, limit=100) for q in range(3)]

    endpoint.reopen()

    after = [endpoint.broker.read(name, q, offset=0, limit=100) for q in range(3)]
    assert all(a.equals(b) for a, b in zip(before, after, strict=True))
    endpoint.broker.send(name, messages(2))
    assert endpoint.stored(name) == 102


def test_topics_and_groups_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name = topic(type="delay", queues=3, partition_time="born")
    backoff = {"initial_ms": 7, "max_ms": 8, "multiplier": 1.5}
    readers = group(
        order="message_group", max_attempts=4, backoff=backoff, on_failure="dead_letter_group"
    )
    before = endpoint.broker.describe_topic(name), endpoint.broker.describe_group(readers)

    endpoint.reopen()

    assert (endpoint.broker.describe_topic(name), endpoint.broker.describe_group(readers)) == before


def test_the_id_of_a_deleted_topic_or_group_is_never_used_again(endpoint: Endpoint) -> None:
    gone = endpoint.broker.create_topic("gone")["topic_id"]
    left = endpoint.broker.create_group("left")["group_id"]
    endpoint.broker.delete_group("left")
    endpoint.broker.delete_topic("gone")

    endpoint.reopen()

    assert endpoint.broker.create_topic("new")["topic_id"] > gone
    assert endpoint.broker.create_group("new")["group_id"] > left


def test_progress_is_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers, others = topic(queues=2), group(), group()
    endpoint.broker.send(name, messages(10))
    endpoint.drain(name, readers, limit=6)
    endpoint.broker.send(name, messages(4, start=10))
    endpoint.broker.receive(others, name, limit=3)

    endpoint.reopen()

    assert sorted(endpoint.drain(name, readers)) == [b"10", b"11", b"12", b"13"]
    assert len(endpoint.drain(name, others)) == 11


@pytest.mark.every_endpoint
def test_each_redelivered_message_has_its_own_body_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    sent = messages(4)
    endpoint.broker.send(name, sent)
    assert endpoint.broker.receive(readers, name, limit=4).num_rows == 4
    endpoint.reopen()
    endpoint.advance(MINUTE)

    again = [endpoint.broker.receive(readers, name, limit=1) for _ in range(4)]

    assert [one["body"].to_pylist() for one in again] == [[body.as_py()] for body in sent["body"]]
    assert [one["delivery_attempt"].to_pylist() for one in again] == [[2]] * 4


@pytest.mark.every_endpoint
def test_each_waiting_message_of_a_group_has_its_own_body_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    endpoint.broker.receive(readers, name, limit=1)
    endpoint.broker.send(name, messages(1, start=4, groups=["b"]))
    endpoint.broker.ack(endpoint.broker.receive(readers, name, limit=1))  # beyond those that wait
    endpoint.reopen()
    endpoint.advance(MINUTE)

    found = []
    for _ in range(4):
        received = endpoint.broker.receive(readers, name, limit=1)
        found += received["body"].to_pylist()
        endpoint.broker.ack(received)

    assert found == [b"0", b"1", b"2", b"3"]


@pytest.mark.every_endpoint
def test_waiting_messages_around_the_cursor_are_delivered_once_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    for first, of_group in enumerate(["d", "a", "a", "a", "b", "e", "a", "a"]):
        endpoint.broker.send(name, messages(1, start=first, groups=[of_group]))
    before = [endpoint.broker.receive(readers, name, limit=1) for _ in range(3)]
    endpoint.broker.ack(before[1])
    endpoint.broker.ack(before[2])
    endpoint.reopen()  # 2 and 3 wait, and the cursor is at 5
    endpoint.broker.send(name, messages(1, start=8, groups=["c"]))
    endpoint.advance(MINUTE)

    endpoint.broker.ack(endpoint.broker.receive(readers, name, limit=1))  # 0 again
    after = [endpoint.broker.receive(readers, name, limit=1) for _ in range(3)]
    for got in after:
        endpoint.broker.ack(got)
    rest = endpoint.broker.receive(readers, name)

    assert [one["body"].to_pylist() for one in before] == [[b"0"], [b"1"], [b"4"]]
    assert [one["body"].to_pylist() for one in after] == [[b"2"], [b"5"], [b"8"]]
    assert rest["body"].to_pylist() == [b"3", b"6", b"7"]


def test_a_receipt_is_good_across_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)

    endpoint.reopen()

    endpoint.broker.ack(got.slice(0, 1))
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got.slice(0, 1))
    endpoint.advance(MINUTE)
    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"1"]
    assert again["delivery_attempt"].to_pylist() == [2]


def test_a_lease_is_not_extended_by_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name, invisible_duration_ms=10_000)
    endpoint.advance(9_999)

    endpoint.reopen()

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.advance(1)
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)
    assert endpoint.broker.receive(readers, name).num_rows == 1


def test_a_backoff_goes_on_across_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[5_000])
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name))

    endpoint.advance(4_999)
    endpoint.reopen()

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.advance(1)
    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_blocked_groups_and_their_backlog_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(300, groups=["a", "b", "c"]))
    held = {}
    for _ in range(2):
        got = endpoint.broker.receive(readers, name, limit=1)
        held[got["message_group"][0].as_py()] = got
    endpoint.drain(name, readers)

    endpoint.reopen()

    assert endpoint.broker.receive(readers, name).num_rows == 0
    for one, got in held.items():
        endpoint.broker.ack(got)
        start = "abc".index(one)
        rest = [str(i).encode() for i in range(start + 3, 300, 3)]
        assert endpoint.drain(name, readers) == rest


def test_an_order_inside_a_delivery_is_kept_across_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", backoff_ms=[1_000])
    endpoint.broker.send(name, messages(6, groups=["a"]))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got.take([0, 1, 4]))
    fail(readers, got.take([2]))

    endpoint.reopen()
    endpoint.advance(1_000)

    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"2", b"3", b"5"]
    assert again["delivery_attempt"].to_pylist() == [2, 1, 1]


def test_the_schedule_is_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="delay", queues=1), group()
    due = endpoint.clock.now_ms() + 1_234
    endpoint.broker.send(
        name, messages(3, delay_level=[1, 2, None], deliver_at_ms=[None, None, due])
    )
    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()

    endpoint.reopen()

    early = endpoint.broker.deliver_scheduled()
    endpoint.advance(234)
    report = endpoint.broker.deliver_scheduled()
    assert (early["delivered"], early["next_due_ms"], report["delivered"]) == (0, due, 1)
    assert endpoint.drain(name, readers) == [b"0", b"2"]


@pytest.mark.every_endpoint
def test_attempts_are_counted_across_restarts(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=4, backoff_ms=[0])
    endpoint.broker.send(name, messages(1))

    for attempt in (1, 2, 3, 4):
        got = endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
        assert got["delivery_attempt"].to_pylist() == [attempt]
        if attempt % 2:
            fail(readers, got)  # else nobody answers: its lease ends while the broker is away
        endpoint.reopen()
        endpoint.advance(1_000)
    endpoint.broker.revive()

    assert endpoint.stored(f"%DLQ%{readers}") == 1


def test_why_a_delivery_failed_is_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=2)
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)
    fail(readers, got, retry_after_ms=0, reason="no engine", error_type="EngineError")
    endpoint.sql("FROM retrying")  # the tables have it, and the log is not needed for it

    endpoint.reopen()

    endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)
    endpoint.broker.revive()
    dead = endpoint.sql("SELECT reason, error_type FROM dead_letters")
    assert dead == [{"reason": "no engine", "error_type": "EngineError"}] * 2


def test_dead_letters_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.forward_to_dead_letter_queue(got.slice(1), reason="why")

    endpoint.reopen()

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"1"]
    endpoint.broker.ack(got.slice(0, 1))


def test_windows_and_settle_ids_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, onward, readers = topic(queues=1), topic(queues=1), group(name="readers")
    endpoint.broker.send(name, messages(2))
    opened = endpoint.broker.open_window("consumer/readers", owner="run-1", duration_ms=MINUTE)
    window = ("consumer/readers", opened["epoch"])
    got = endpoint.broker.receive(readers, name, window=window)

    def settle() -> object:
        return endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id="s-1",
            window=window,
            publish={onward: messages(3)},
        )

    first = settle()

    endpoint.reopen()

    assert settle() == first
    assert endpoint.stored(onward) == 3
    other = endpoint.broker.open_window("consumer/readers", owner="run-2", duration_ms=MINUTE)
    assert other["yielded_to"] == "run-1"
    taken = endpoint.broker.open_window(
        "consumer/readers", owner="run-2", duration_ms=MINUTE, takeover=True
    )
    assert taken["epoch"] > window[1]


def test_keyed_state_and_sink_files_are_there_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(type="fifo"), group(order="message_group")
    nothing = schema.OUTCOME.empty_table()
    files = pa.table([["x"], [1], [2], ["p"]], names=schema.SINK_FILE.names[:4])
    state = pa.table({"message_group": ["a", "b"], "total": [1, 2]})
    endpoint.broker.settle(readers, nothing, sink_files=files, state=state, topic=name)
    listed = endpoint.broker.sink_files(readers)

    endpoint.reopen()

    found = endpoint.broker.keyed_state(readers, name)
    assert found is not None
    assert sorted(r["total"] for r in found.to_pylist()) == [1, 2]
    assert endpoint.broker.sink_files(readers).equals(listed)


def test_a_reset_holds_across_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(5))
    endpoint.broker.receive(readers, name)
    endpoint.broker.reset_offset(readers, name, to_offset=3)

    endpoint.reopen()

    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"3", b"4"]
    assert again["delivery_attempt"].to_pylist() == [1, 1]


def test_a_deleted_topic_stays_deleted(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(5))
    endpoint.broker.receive(readers, name)
    endpoint.broker.delete_topic(name, force=True)
    endpoint.broker.create_topic(name, queues=1)
    endpoint.broker.send(name, messages(1, start=9))

    endpoint.reopen()

    assert endpoint.drain(name, readers) == [b"9"]


def test_what_was_sealed_is_read_as_before(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    endpoint.broker.send(name, messages(500, tag="t", properties=[[("p", "v")]] * 500))
    before = [endpoint.broker.read(name, q, offset=0, limit=500) for q in range(2)]
    endpoint.advance(3_600_000)
    report = endpoint.broker.seal()

    sealed = [endpoint.broker.read(name, q, offset=0, limit=500) for q in range(2)]
    endpoint.reopen()
    after = [endpoint.broker.read(name, q, offset=0, limit=500) for q in range(2)]

    assert report["rows"] >= 500
    for q in range(2):
        assert sealed[q].equals(before[q])
        assert after[q].equals(before[q])
    assert len(endpoint.drain(name, readers)) == 500


def test_time_does_not_step_back(inside: Endpoint, topic: Make, messages: Make) -> None:
    name = topic(queues=1)
    inside.advance(10_000)
    inside.broker.send(name, messages(1))
    inside.advance(-5_000)
    inside.reopen()

    inside.broker.send(name, messages(1))

    first, second = inside.broker.read(name, 0, offset=0, limit=2)["stored_at_ms"].to_pylist()
    assert second >= first


def test_opening_twenty_times_changes_nothing(
    inside: Endpoint, topic: Make, group: Make, messages: Make
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
