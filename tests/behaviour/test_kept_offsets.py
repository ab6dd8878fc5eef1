"""Readers that keep their own offsets: committed by compare-and-set, begun with, copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def name(endpoint: Endpoint, topic: Make, messages: Make) -> str:
    """Two queues with ten messages each."""
    made = str(topic(queues=2))
    endpoint.broker.send(made, messages(20))
    return made


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def lag(endpoint: Endpoint, name: str, readers: str) -> dict[int, int]:
    rows = endpoint.sql(
        f"SELECT * FROM progress WHERE topic = '{name}' AND consumer_group = '{readers}'"
    )
    return {row["queue_id"]: row["committed_offset"] for row in rows}


def test_an_offset_is_committed_where_the_group_is_where_the_reader_thinks(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    first = endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 3), 1: (-1, 0)})

    second = endpoint.broker.commit_offsets(readers, name, offsets={0: (3, 7), 1: (5, 9)})

    assert first == {0: 3, 1: 0}
    assert second == {0: 7, 1: 0}
    assert lag(endpoint, name, readers) == second


def test_a_reader_whose_group_was_reset_under_it_sees_so(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 8)})
    endpoint.broker.reset_offset(readers, name, to_offset=2)

    answer = endpoint.broker.commit_offsets(readers, name, offsets={0: (8, 10)})

    assert answer == {0: 2}
    assert lag(endpoint, name, readers)[0] == 2


def test_a_reset_to_where_the_group_is_holds_against_who_does_not_know_of_it(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 8), 1: (-1, 8)})
    before = endpoint.broker.committed_offsets(readers, name)
    endpoint.broker.reset_offset(readers, name, to_offset=8, queue_id=0)
    resets = {queue_id: count for queue_id, (_, count) in before.items()}

    for known in (8, -1):
        commit = {0: (known, 10), 1: (-1, 10)}
        answer = endpoint.broker.commit_offsets(readers, name, offsets=commit, resets=resets)
        assert answer == {0: 8, 1: 10}, "refused in the queue that was reset, not in the other"

    after = endpoint.broker.committed_offsets(readers, name)
    assert (before, after) == ({0: (8, 0), 1: (8, 0)}, {0: (8, 1), 1: (10, 0)})
    knows = {0: after[0][1]}
    answer = endpoint.broker.commit_offsets(readers, name, offsets={0: (8, 10)}, resets=knows)
    assert answer == {0: 10}


@pytest.mark.parametrize("from_the_log", [True, False])
def test_where_a_group_is_and_how_often_it_was_put_there_outlives_a_restart(
    from_the_log: bool, endpoint: Endpoint, name: str, readers: str
) -> None:
    nowhere = endpoint.broker.committed_offsets(readers, name)
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 8)})
    endpoint.broker.commit_offsets(readers, name, offsets={0: (8, 6)})
    for _ in range(2):
        endpoint.broker.reset_offset(readers, name, to_offset=6, queue_id=0)

    if from_the_log:
        reopened_from_the_log(endpoint)
    else:
        endpoint.reopen()

    assert nowhere == {0: (-1, 0), 1: (-1, 0)}
    assert endpoint.broker.committed_offsets(readers, name) == {0: (6, 2), 1: (-1, 0)}
    commit = {0: (6, 7)}
    old = endpoint.broker.commit_offsets(readers, name, offsets=commit, resets={0: 1})
    assert old == {0: 6}


def test_a_commit_may_go_back(endpoint: Endpoint, name: str, readers: str) -> None:
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 8), 1: (-1, 8)})

    assert endpoint.broker.commit_offsets(readers, name, offsets={0: (8, 5), 1: (-1, 4)}) == {
        0: 5,
        1: 4,
    }
    assert lag(endpoint, name, readers) == {0: 5, 1: 4}
    assert len(endpoint.drain(name, readers)) == 5 + 6


def test_the_same_commit_again_changes_nothing(endpoint: Endpoint, name: str, readers: str) -> None:
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 4)})
    commit = {0: (4, 6)}

    answers = [endpoint.broker.commit_offsets(readers, name, offsets=commit) for _ in range(2)]

    assert answers == [{0: 6}, {0: 6}]


def test_the_queue_of_another_client_is_not_committed(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    endpoint.broker.lock_queues(readers, name, queue_ids=[1], client_id="a")

    for client_id in ("b", ""):
        with pytest.raises(errors.QueueLockedError):
            endpoint.broker.commit_offsets(
                readers, name, offsets={0: (-1, 4), 1: (-1, 4)}, client_id=client_id
            )
    assert lag(endpoint, name, readers) == {}

    commit = {0: (-1, 4), 1: (-1, 4)}
    assert endpoint.broker.commit_offsets(readers, name, offsets=commit, client_id="a") == {
        0: 4,
        1: 4,
    }


def test_nothing_is_taken_out_of_the_hands_of_a_consumer(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    got = endpoint.broker.receive(readers, name, limit=2, queue_ids=[0])

    with pytest.raises(errors.InUseError, match="not settled"):
        endpoint.broker.commit_offsets(readers, name, offsets={1: (-1, 5), 0: (-1, 9)})

    assert lag(endpoint, name, readers) == {0: 0, 1: 0}
    endpoint.broker.ack(got)
    assert len(endpoint.drain(name, readers)) == 18


@pytest.mark.parametrize(
    "offsets",
    [
        {0: (-1, 11)},
        {2: (-1, 0)},
        {-1: (-1, 0)},
        {0: (-2, 0)},
        {0: (-1, -1)},
        {0: (0,)},
        {0: 5},
        {0: (0, True)},
        {"first": (0, 0)},
        {0: (-1, 5), 9: (-1, 5)},
    ],
)
def test_what_is_no_offset_of_the_topic_is_refused_as_a_whole(
    endpoint: Endpoint, name: str, readers: str, offsets: dict[Any, Any]
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.commit_offsets(readers, name, offsets=offsets)

    assert lag(endpoint, name, readers) == {}


@pytest.mark.parametrize(("where", "start"), [("first", 0), ("last", 10)])
def test_a_group_begins_where_it_says(
    endpoint: Endpoint, name: str, readers: str, where: Any, start: int
) -> None:
    assert endpoint.broker.start_offsets(readers, name, where=where) == {0: start, 1: start}
    assert lag(endpoint, name, readers) == {0: start, 1: start}
    assert len(endpoint.drain(name, readers)) == 2 * (10 - start)


def test_a_group_begins_at_a_moment(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    endpoint.advance(5)
    at_ms = endpoint.clock.now_ms()
    endpoint.broker.send(name, messages(2))

    assert endpoint.broker.start_offsets(readers, name, where=at_ms) == {0: 10, 1: 10}
    assert len(endpoint.drain(name, readers)) == 2


def test_what_a_group_has_begun_with_stays(endpoint: Endpoint, name: str, readers: str) -> None:
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 3)})

    first = endpoint.broker.start_offsets(readers, name, where="last")
    second = endpoint.broker.start_offsets(readers, name, where="first")

    assert first == second == {0: 3, 1: 0}


def test_a_queue_that_was_added_later_is_begun_with_its_first_message(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    endpoint.broker.start_offsets(readers, name, where="last")
    endpoint.broker.alter_topic(name, queues=3)
    endpoint.broker.send(name, messages(9))

    starts = endpoint.broker.start_offsets(readers, name, where="last")

    assert starts == {0: 10, 1: 10, 2: 0}
    assert len(endpoint.drain(name, readers)) == 9
    assert endpoint.stored(name) == 29


@pytest.mark.parametrize("where", ["end", None, 1.5, True, {}])
def test_a_start_is_last_first_or_a_moment(
    endpoint: Endpoint, name: str, readers: str, where: Any
) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.start_offsets(readers, name, where=where)


def test_a_group_is_put_where_another_one_is(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    other = group()
    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 4), 1: (-1, 9)})
    in_flight = endpoint.broker.receive(other, name, limit=100)

    cloned = endpoint.broker.clone_offsets(readers, other, topic=name)

    assert cloned == {0: 4, 1: 9}
    assert lag(endpoint, name, other) == cloned
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(in_flight)
    assert len(endpoint.drain(name, other)) == 6 + 1


def test_only_what_the_other_group_has_begun_with_is_copied(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    other = group()
    endpoint.broker.commit_offsets(readers, name, offsets={1: (-1, 9)})

    assert endpoint.broker.clone_offsets(readers, other, topic=name) == {1: 9}
    with pytest.raises(errors.RequestError, match="both the source and the target"):
        endpoint.broker.clone_offsets(readers, readers, topic=name)


@pytest.mark.parametrize("from_the_log", [False, True])
def test_they_are_known_after_a_restart(
    endpoint: Endpoint, name: str, readers: str, group: Make, from_the_log: bool
) -> None:
    other = group()
    endpoint.broker.start_offsets(readers, name, where="last")
    endpoint.broker.commit_offsets(readers, name, offsets={0: (10, 2), 1: (10, 6)})
    endpoint.broker.commit_offsets(readers, name, offsets={0: (2, 5)})
    endpoint.broker.clone_offsets(readers, other, topic=name)

    if from_the_log:
        reopened_from_the_log(endpoint)
    else:
        endpoint.reopen()

    expected = {0: 5, 1: 6}
    assert lag(endpoint, name, readers) == lag(endpoint, name, other) == expected
    assert endpoint.broker.start_offsets(other, name, where="first") == expected


def test_what_is_not_for_groups_is_refused(endpoint: Endpoint, readers: str) -> None:
    hidden = "SCHEDULE_TOPIC_XXXX"
    for call in (
        lambda: endpoint.broker.commit_offsets(readers, hidden, offsets={}),
        lambda: endpoint.broker.committed_offsets(readers, hidden),
        lambda: endpoint.broker.start_offsets(readers, hidden, where="last"),
        lambda: endpoint.broker.lock_queues(readers, hidden, queue_ids=[0], client_id="a"),
        lambda: endpoint.broker.clone_offsets(readers, readers, topic=hidden),
    ):
        with pytest.raises(errors.IllegalTopicError):
            call()
