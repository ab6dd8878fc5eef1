"""Messages of several queues are read by offset, without a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from rmq_pipeline.verb import PullResult
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def name(endpoint: Endpoint, topic: Make, messages: Make) -> str:
    """Four queues with ten messages each."""
    made = str(topic(queues=4))
    endpoint.broker.send(made, messages(40, tag=[f"t{i % 3}" for i in range(40)]))
    return made


def places(pulled: PullResult) -> list[tuple[int, int]]:
    columns = pulled.messages.select(["queue_id", "queue_offset"]).to_pydict()
    return list(zip(*columns.values(), strict=True))


@pytest.mark.every_endpoint
def test_messages_come_by_queue_and_offset_and_it_says_where_to_go_on(
    endpoint: Endpoint, name: str
) -> None:
    pulled = endpoint.broker.pull(name, {0: 8, 2: 3, 3: 10}, limit=100)

    assert places(pulled) == [(0, 8), (0, 9), *((2, offset) for offset in range(3, 10))]
    assert pulled.next_offsets == {0: 10, 2: 10, 3: 10}
    assert pulled.messages.schema == schema.READ
    stored = endpoint.broker.read(name, 2, offset=3, limit=7)
    assert pulled.messages.slice(2).to_pylist() == stored.to_pylist()


def test_nothing_is_leased_and_it_may_be_read_again(
    endpoint: Endpoint, name: str, group: Make
) -> None:
    first = endpoint.broker.pull(name, {0: 0}, limit=10)

    assert endpoint.broker.pull(name, {0: 0}, limit=10).messages.equals(first.messages)
    assert len(endpoint.drain(name, group())) == 40


@pytest.mark.parametrize("limit", [1, 3, 7, 32, 40, 41])
def test_no_more_than_the_limit_comes_and_all_of_it_by_and_by(
    endpoint: Endpoint, name: str, limit: int
) -> None:
    positions, seen = dict.fromkeys(range(4), 0), []
    while (pulled := endpoint.broker.pull(name, positions, limit=limit)).messages.num_rows:
        assert pulled.messages.num_rows <= limit
        seen += places(pulled)
        positions = dict(pulled.next_offsets)

    assert sorted(seen) == [(queue, offset) for queue in range(4) for offset in range(10)]


def test_the_limit_is_used_where_only_one_queue_has_messages(endpoint: Endpoint, name: str) -> None:
    pulled = endpoint.broker.pull(name, {0: 10, 1: 10, 2: 10, 3: 0}, limit=9)

    assert places(pulled) == [(3, offset) for offset in range(9)]


def test_no_more_bytes_come_than_asked_for_but_one_message_always(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)
    sizes = [100, 300, 50, 5000, 10, 10]
    table = messages(6).set_column(0, schema.SEND.field("body"), [[b"x" * n for n in sizes]])
    endpoint.broker.send(name, table)

    found, at = [], 0
    while (pulled := endpoint.broker.pull(name, {0: at}, max_bytes=400)).messages.num_rows:
        found.append([len(body) for body in pulled.messages["body"].to_pylist()])
        at = pulled.next_offsets[0]

    assert found == [[100, 300], [50], [5000], [10, 10]]


def test_no_queue_is_kept_waiting_by_the_others(endpoint: Endpoint, name: str) -> None:
    served: set[int] = set()
    for _ in range(200):
        pulled = endpoint.broker.pull(name, dict.fromkeys(range(4), 0), limit=1)
        served.update(queue for queue, _ in places(pulled))
        if len(served) == 4:
            return
    raise AssertionError(served)


@pytest.mark.parametrize(
    ("filter", "filter_type", "wanted"),
    [("t1 || t2", "tag", {"t1", "t2"}), ("TAGS = 't0'", "sql92", {"t0"}), ("none", "tag", set())],
)
def test_what_the_filter_does_not_want_is_passed_over(
    endpoint: Endpoint, name: str, filter: str, filter_type: str, wanted: set[str]
) -> None:
    positions = dict.fromkeys(range(4), 0)
    seen: list[str] = []
    while min(positions.values()) < 10:
        pulled = endpoint.broker.pull(
            name, positions, limit=5, filter=filter, filter_type=filter_type
        )
        seen += pulled.messages["tag"].to_pylist()
        assert positions != pulled.next_offsets
        positions = dict(pulled.next_offsets)

    assert sorted(seen) == sorted(t for t in (f"t{i % 3}" for i in range(40)) if t in wanted)


@pytest.mark.every_endpoint
def test_a_position_behind_the_end_is_refused_and_both_are_named(
    endpoint: Endpoint, name: str
) -> None:
    with pytest.raises(errors.IllegalOffsetError) as refused:
        endpoint.broker.pull(name, {0: 10, 2: 11})

    assert all(word in refused.value.message for word in ("Queue 2", name, "10", "11"))


@pytest.mark.every_endpoint
def test_a_position_that_has_expired_is_moved_to_what_is_kept(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    endpoint.reopen(seal_after_ms=0)
    name = topic(queues=1, retention_ms=10_000)
    endpoint.broker.send(name, messages(5))
    endpoint.broker.seal()
    endpoint.advance(20_000)
    endpoint.broker.send(name, messages(5, start=5))
    endpoint.broker.seal()
    endpoint.broker.expire()
    low = endpoint.broker.describe_topic(name)["offsets"][0]["min_offset"]
    assert low == 5

    pulled = endpoint.broker.pull(name, {0: 1}, limit=3)

    assert places(pulled) == [(0, 5), (0, 6), (0, 7)]
    assert endpoint.broker.pull(name, {0: 0}, filter="none").next_offsets == {0: 10}


@pytest.mark.parametrize("positions", [{4: 0}, {-1: 0}, {0: -1}, {0: True}, {"first": 0}])
def test_what_is_no_place_of_the_topic_is_refused(
    endpoint: Endpoint, name: str, positions: dict[int, int]
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.pull(name, positions)


@pytest.mark.parametrize("how", [{"limit": 0}, {"max_bytes": 0}, {"wait_ms": -1}])
def test_what_is_out_of_range_is_refused(
    endpoint: Endpoint, name: str, how: dict[str, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.pull(name, {0: 0}, **how)


def test_what_is_not_for_readers_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(errors.IllegalTopicError):
        endpoint.broker.pull("SCHEDULE_TOPIC_XXXX", {0: 0})
    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.pull("nowhere", {0: 0})


@pytest.mark.every_endpoint
@pytest.mark.parametrize("wait_ms", [900, 30_000])
def test_a_waiting_pull_is_woken_by_what_arrives_in_any_of_its_queues(
    endpoint: Endpoint, name: str, messages: Make, wait_ms: int
) -> None:
    ends = dict.fromkeys(range(4), 10)
    waiting = endpoint.begin(lambda: endpoint.broker.pull(name, ends, wait_ms=wait_ms))
    assert not waiting.done()

    endpoint.broker.send(name, messages(1, start=99))

    pulled = waiting.result(60)
    assert pulled.messages["body"].to_pylist() == [b"99"]
    assert sum(pulled.next_offsets.values()) == 41


def test_a_waiting_pull_goes_past_what_it_does_not_want(endpoint: Endpoint, name: str) -> None:
    start = dict.fromkeys(range(4), 0)
    waiting = endpoint.begin(lambda: endpoint.broker.pull(name, start, filter="late", wait_ms=900))

    endpoint.advance(900)

    pulled = waiting.result(60)
    assert pulled.messages.num_rows == 0
    assert pulled.next_offsets == dict.fromkeys(range(4), 10)


def test_sealed_messages_are_read_too(endpoint: Endpoint, name: str, messages: Make) -> None:
    endpoint.reopen(seal_after_ms=0)
    assert endpoint.broker.seal()["rows"] == 40
    endpoint.broker.send(name, messages(4, start=40))

    pulled = endpoint.broker.pull(name, dict.fromkeys(range(4), 0), limit=100)

    assert sorted(pulled.messages["body"].to_pylist(), key=int) == [
        str(i).encode() for i in range(44)
    ]
