"""Order by queue, RocketMQ's own rule: one batch of a queue at a time, again from its first gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def line(topic: Make) -> str:
    """A topic of one queue."""
    return str(topic(type="mixed", queues=1))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="queue"))


@pytest.fixture
def batch(endpoint: Endpoint, line: str, readers: str, messages: Make) -> pa.Table:
    """The first three of six messages of two message groups, with a receiver for a minute."""
    endpoint.broker.send(line, messages(6, groups=["a", "b"]))
    got = endpoint.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
    assert (bodies(got), attempts(got)) == ([b"0", b"1", b"2"], [1, 1, 1])
    return got


def committed(endpoint: Endpoint, group: str) -> int:
    """The smallest offset that is not settled."""
    query = f"SELECT committed_offset AS c FROM progress WHERE consumer_group = '{group}'"
    return int(endpoint.sql(query)[0]["c"])


def test_a_batch_blocks_its_queue_whatever_the_message_groups(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([0, 2]))
    blocked = endpoint.broker.receive(readers, line)

    endpoint.broker.ack(batch.take([1]))
    free = endpoint.broker.receive(readers, line)

    assert blocked.num_rows == 0
    assert (bodies(free), attempts(free)) == ([b"3", b"4", b"5"], [1, 1, 1])


def test_the_other_queues_of_the_topic_go_on(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(queues=2)
    endpoint.broker.send(name, messages(8))

    first = endpoint.broker.receive(readers, name, limit=2)
    second = endpoint.broker.receive(readers, name, limit=2)
    third = endpoint.broker.receive(readers, name, limit=2)

    taken = [set(got["queue_id"].to_pylist()) for got in (first, second, third)]
    assert sorted(taken[0] | taken[1]) == [0, 1]
    assert taken[2] == set()


def test_other_consumer_groups_do_not_wait(
    endpoint: Endpoint, line: str, group: Make, batch: pa.Table
) -> None:
    assert batch.num_rows
    other = group(order="queue")

    assert endpoint.drain(line, other) == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_the_committed_offset_is_the_first_gap(
    endpoint: Endpoint, readers: str, batch: pa.Table
) -> None:
    steps = []
    for row in (2, 0, 1):
        endpoint.broker.ack(batch.take([row]))
        steps.append(committed(endpoint, readers))

    assert steps == [0, 1, 3]


def test_all_comes_again_from_the_first_gap_on_with_what_was_acked_behind_it(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([0, 2]))
    endpoint.advance(MINUTE)

    again = endpoint.broker.receive(readers, line, limit=3)

    assert (bodies(again), attempts(again)) == ([b"1", b"2", b"3"], [2, 2, 1])
    endpoint.broker.ack(again)
    assert endpoint.drain(line, readers) == [b"4", b"5"]


def test_a_shorter_batch_leaves_the_rest_for_the_next_one(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([2]))
    endpoint.advance(MINUTE)

    first = endpoint.broker.receive(readers, line, limit=1)
    blocked = endpoint.broker.receive(readers, line)
    endpoint.broker.ack(first)
    rest = endpoint.broker.receive(readers, line)

    assert (bodies(first), attempts(first)) == ([b"0"], [2])
    assert blocked.num_rows == 0
    assert bodies(rest) == [b"1", b"2", b"3", b"4", b"5"]
    assert attempts(rest) == [2, 2, 1, 1, 1]


def test_the_receipts_of_an_earlier_batch_are_refused(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([1]))
    endpoint.advance(MINUTE)
    again = endpoint.broker.receive(readers, line, limit=3)

    for old in range(3):
        with pytest.raises(errors.ReceiptHandleError):
            endpoint.broker.ack(batch.take([old]))
    endpoint.broker.ack(again)

    assert committed(endpoint, readers) == 3


def test_a_message_is_acked_once_though_it_lies_behind_a_gap(
    endpoint: Endpoint, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([2]))

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(batch.take([2]))
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.change_invisible_duration(batch.take([2]), MINUTE)


def test_each_message_has_its_own_end_and_the_last_one_opens_the_queue(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.change_invisible_duration(batch.take([0]), 1_000)
    longest = endpoint.broker.change_invisible_duration(batch.take([1]), 2 * MINUTE)
    endpoint.advance(MINUTE)
    ended = endpoint.broker.receive(readers, line)
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(batch.take([2]))

    endpoint.broker.ack(longest)
    free = endpoint.broker.receive(readers, line, limit=3)

    assert ended.num_rows == 0
    assert (bodies(free), attempts(free)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_the_lease_of_an_acked_message_delays_no_message(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    longest = endpoint.broker.change_invisible_duration(batch.take([2]), 10 * MINUTE)
    endpoint.broker.ack(longest)
    endpoint.advance(MINUTE)

    again = endpoint.broker.receive(readers, line, limit=3)

    assert (bodies(again), attempts(again)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_a_waiting_receive_wakes_when_the_batch_is_settled(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    waiting = endpoint.begin(lambda: endpoint.broker.receive(readers, line, wait_ms=20_000))
    endpoint.broker.ack(batch.take([2]))
    endpoint.broker.ack(batch.take([0]))
    assert not waiting.done()

    endpoint.broker.ack(batch.take([1]))

    assert bodies(waiting.result(30)) == [b"3", b"4", b"5"]


def test_a_waiting_receive_wakes_when_the_last_lease_of_the_batch_ends(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.change_invisible_duration(batch.take([0]), 11_000)
    endpoint.broker.change_invisible_duration(batch.take([1]), 13_000)
    endpoint.broker.change_invisible_duration(batch.take([2]), 12_000)
    waiting = endpoint.begin(
        lambda: endpoint.broker.receive(readers, line, limit=3, wait_ms=20_000)
    )
    endpoint.advance(12_999)
    assert not waiting.done()

    endpoint.advance(1)

    assert bodies(waiting.result(30)) == [b"0", b"1", b"2"]


def test_a_waiting_receive_wakes_earlier_when_what_blocks_longest_is_acked(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.change_invisible_duration(batch.take([0]), 11_000)
    endpoint.broker.change_invisible_duration(batch.take([1]), 12_000)
    waiting = endpoint.begin(
        lambda: endpoint.broker.receive(readers, line, limit=3, wait_ms=20_000)
    )
    endpoint.broker.ack(batch.take([2]))

    endpoint.advance(12_000)

    assert bodies(waiting.result(30)) == [b"0", b"1", b"2"]


def test_what_a_filter_leaves_out_blocks_nothing(
    endpoint: Endpoint, line: str, readers: str, messages: Make
) -> None:
    tags = ["x", "y", "x", "y", "y", "x"]
    endpoint.broker.send(line, messages(6, groups=["a"], tag=tags))
    got = endpoint.broker.receive(readers, line, limit=2, filter="x")
    endpoint.broker.ack(got)

    rest = endpoint.broker.receive(readers, line, filter="x")
    endpoint.broker.ack(rest)

    assert (bodies(got), bodies(rest)) == ([b"0", b"2"], [b"5"])
    assert committed(endpoint, readers) == 6


def test_a_repeated_attempt_is_given_its_batch_again(
    endpoint: Endpoint, line: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(line, messages(5))
    lost = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")

    other = endpoint.broker.receive(readers, line, limit=3, attempt_id="two")
    without = endpoint.broker.receive(readers, line, limit=3)
    again = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")

    assert (other.num_rows, without.num_rows) == (0, 0)
    assert (bodies(again), attempts(again)) == (bodies(lost), [1, 1, 1])
    endpoint.broker.ack(again)
    next_one = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")
    assert bodies(next_one) == [b"3", b"4"]


def test_a_repeated_attempt_is_not_given_what_it_has_settled(
    endpoint: Endpoint, line: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(line, messages(4))
    got = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")
    endpoint.broker.ack(got.take([0]))

    again = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")

    assert (bodies(again), attempts(again)) == ([b"1", b"2"], [1, 1])


def test_an_attempt_that_is_no_text_or_of_a_window_is_refused(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    opened = endpoint.broker.open_window(f"consumer/{readers}", owner="run", duration_ms=MINUTE)
    window = (f"consumer/{readers}", opened["epoch"])

    with pytest.raises(errors.RequestError, match="attempt_id"):
        endpoint.broker.receive(readers, line, attempt_id="one", window=window)


def test_a_reset_opens_the_queue(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    endpoint.broker.ack(batch.take([1]))
    endpoint.broker.reset_offset(readers, line, to_offset=1)

    got = endpoint.broker.receive(readers, line, limit=3)

    assert (bodies(got), attempts(got)) == ([b"1", b"2", b"3"], [1, 1, 1])
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(batch.take([0]))


def test_a_newer_window_has_the_batch_at_once_and_no_attempt_counted(
    endpoint: Endpoint, line: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(line, messages(4))
    name = f"consumer/{readers}"
    old = endpoint.broker.open_window(name, owner="run-1", duration_ms=MINUTE)["epoch"]
    got = endpoint.broker.receive(readers, line, limit=3, window=(name, old))
    endpoint.broker.ack(got.take([1]))

    new = endpoint.broker.open_window(name, owner="run-2", duration_ms=MINUTE, takeover=True)[
        "epoch"
    ]
    again = endpoint.broker.receive(readers, line, limit=3, window=(name, new))

    assert bodies(again) == [b"0", b"1", b"2"]
    assert attempts(again) == [1, 2, 1]


def test_nothing_is_ready_while_a_queue_is_blocked(
    endpoint: Endpoint, line: str, readers: str, batch: pa.Table
) -> None:
    def facts() -> tuple[int, int, int | None]:
        told = endpoint.broker.due()
        found = told["groups"][readers]["topics"][line]
        soonest = found["next_visible_ms"]
        return found["ready"], found["unsettled"], soonest and soonest - told["now_ms"]

    blocked = facts()
    endpoint.broker.ack(batch.take([2]))
    ahead = facts()
    endpoint.advance(MINUTE)
    free = facts()

    assert blocked == (0, 3, MINUTE)
    assert ahead == (0, 2, MINUTE)
    assert free == (6, 2, None)


def test_what_is_acked_behind_a_gap_is_no_lag(
    endpoint: Endpoint, readers: str, batch: pa.Table
) -> None:
    query = f"""
        SELECT p.in_flight, p.retrying, p.parked, l.lag FROM progress AS p
        JOIN lag AS l USING (consumer_group, topic, queue_id) WHERE consumer_group = '{readers}'
    """
    endpoint.broker.ack(batch.take([1, 2]))

    assert endpoint.sql(query) == [{"in_flight": 1, "retrying": 0, "parked": 0, "lag": 4}]


def test_lite_topics_keep_their_own_order(endpoint: Endpoint, topic: Make, readers: str) -> None:
    name = topic(type="lite", queues=1)
    rows = {"body": [b"0", b"1", b"2"], "lite_topic": ["a", "b", "a"]}
    endpoint.broker.send(name, pa.table(rows))
    endpoint.broker.sync_lite_subscription(
        readers, name, client_id="me", action="add", lite_topics=["a", "b"]
    )

    first = endpoint.broker.receive(readers, name, limit=1, client_id="me")
    second = endpoint.broker.receive(readers, name, limit=1, client_id="me")

    assert sorted(bodies(first) + bodies(second)) == [b"0", b"1"]


def test_a_group_keeps_its_order_and_gives_no_message_group_up(
    endpoint: Endpoint, group: Make, readers: str
) -> None:
    assert endpoint.broker.describe_group(readers)["order"] == "queue"
    assert endpoint.broker.ensure_group(readers, order="queue")["order"] == "queue"
    for order in ("none", "message_group"):
        with pytest.raises(errors.RequestError, match="cannot be altered"):
            endpoint.broker.alter_group(readers, order=order)
        with pytest.raises(errors.AlreadyExistsError):
            endpoint.broker.ensure_group(readers, order=order)
    with pytest.raises(errors.RequestError, match="dead_letter_group"):
        endpoint.broker.alter_group(readers, on_failure="dead_letter_group")
    with pytest.raises(errors.RequestError, match="dead_letter_group"):
        group(order="queue", on_failure="dead_letter_group")
