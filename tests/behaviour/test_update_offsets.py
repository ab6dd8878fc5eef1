"""A reader that keeps its own offsets tells the broker how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic(queues=2))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def lag(endpoint: Endpoint, name: str, readers: str, at: str = "") -> dict[int, int]:
    rows = endpoint.sql(
        f"SELECT * FROM progress{at} WHERE topic = '{name}' AND consumer_group = '{readers}'"
    )
    return {row["queue_id"]: row["cursor"] for row in rows}


def fill(endpoint: Endpoint, name: str, messages: Make) -> None:
    """Ten messages in each of its two queues."""
    endpoint.broker.send(name, messages(20))
    assert [q["max_offset"] for q in endpoint.broker.describe_topic(name)["offsets"]] == [10, 10]


def test_progress_is_where_the_reader_says(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    fill(endpoint, name, messages)

    answer = endpoint.broker.update_offsets(readers, name, offsets={0: 7, 1: 10})

    assert answer.to_pylist() == [
        {"queue_id": 0, "queue_offset": 7},
        {"queue_id": 1, "queue_offset": 10},
    ]
    assert lag(endpoint, name, readers) == {0: 7, 1: 10}
    assert len(endpoint.drain(name, readers)) == 3


def test_progress_never_goes_back(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    fill(endpoint, name, messages)
    endpoint.broker.update_offsets(readers, name, offsets={0: 7})

    answer = endpoint.broker.update_offsets(readers, name, offsets={0: 3, 1: 0})

    assert answer["queue_offset"].to_pylist() == [7, 0]
    assert lag(endpoint, name, readers) == {0: 7, 1: 0}


def test_after_a_reset_it_goes_on_from_there(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    fill(endpoint, name, messages)
    endpoint.broker.update_offsets(readers, name, offsets={0: 7, 1: 7})

    endpoint.broker.reset_offset(readers, name, to_offset=2)
    endpoint.broker.update_offsets(readers, name, offsets={0: 3})

    assert lag(endpoint, name, readers) == {0: 3, 1: 2}


def test_nothing_is_taken_out_of_the_hands_of_a_consumer(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    fill(endpoint, name, messages)
    got = endpoint.broker.receive(readers, name, limit=4)
    queue = got["queue_id"][0].as_py()

    with pytest.raises(errors.InUseError, match="not settled"):
        endpoint.broker.update_offsets(readers, name, offsets={1 - queue: 5, queue: 9})

    assert lag(endpoint, name, readers)[queue] == 4
    endpoint.broker.ack(got)
    assert len(endpoint.drain(name, readers)) == 16


def test_message_groups_that_wait_behind_the_cursor_are_not_passed_over(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(6, message_group=["a", "a", "b", "b", "a", "b"]))
    endpoint.broker.receive(readers, name, limit=1)

    with pytest.raises(errors.InUseError):
        endpoint.broker.update_offsets(readers, name, offsets={0: 6})


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ({0: 11}, errors.IllegalOffsetError),
        ({2: 0}, errors.IllegalOffsetError),
        ({-1: 0}, errors.IllegalOffsetError),
        ({0: -1}, errors.RequestError),
        ({0: True}, errors.RequestError),
        ({"first": 0}, errors.RequestError),
        ({0: 5, 9: 5}, errors.IllegalOffsetError),
    ],
)
def test_what_is_no_offset_of_the_topic_is_refused_as_a_whole(
    endpoint: Endpoint,
    name: str,
    readers: str,
    messages: Make,
    offsets: dict[Any, Any],
    error: type[errors.RocketMQError],
) -> None:
    fill(endpoint, name, messages)

    with pytest.raises(error):
        endpoint.broker.update_offsets(readers, name, offsets=offsets)

    assert not any(lag(endpoint, name, readers).values())


def test_it_is_known_after_a_restart_and_at_any_moment(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    fill(endpoint, name, messages)
    endpoint.broker.update_offsets(readers, name, offsets={0: 2, 1: 2})
    before_ms = endpoint.clock.now_ms()
    endpoint.advance(10)
    endpoint.broker.update_offsets(readers, name, offsets={0: 8})

    endpoint.reopen()

    assert lag(endpoint, name, readers) == {0: 8, 1: 2}
    assert lag(endpoint, name, readers, f"_at({before_ms})") == {0: 2, 1: 2}
    assert len(endpoint.drain(name, readers)) == 2 + 8
