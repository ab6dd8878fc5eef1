"""How much is held before nothing more is pulled (semantics §6.6)."""

from __future__ import annotations

from typing import Any

import pytest

from rmq_pipeline.consumer.process_queue import FIRST_PULL, Sizes, Thresholds, room
from rmq_pipeline.errors import RequestError
from tests.consumer.pieces import held_queue, received


def free(count: int, *, span: int = 0, size: int = 1, **how: Any) -> int:
    """The room of a queue of which so much is held."""
    queue = held_queue()
    offsets = [*range(count - 1), max(span, count - 1)] if count else []
    queue.put(received(queue, offsets, body=[b"x" * size] * count))
    given: dict[str, Any] = {"spans": True, "starving": False, "pull": 1000, **how}
    return room(queue, given.pop("thresholds", Thresholds()), **given)


def test_an_empty_queue_has_room_for_a_pull() -> None:
    assert free(0) == 1000
    assert free(0, pull=100) == 100


def test_a_thousand_messages_are_enough() -> None:
    assert free(500) == 500
    assert free(501) == 0
    assert free(1000) == 0


def test_small_pulls_are_made_as_soon_as_half_of_one_fits() -> None:
    assert free(990, pull=20) == 10
    assert free(991, pull=20) == 0


def test_one_message_may_be_the_most() -> None:
    assert free(0, thresholds=Thresholds(messages=1)) == 1
    assert free(1, thresholds=Thresholds(messages=1)) == 0


def test_bytes_are_enough_at_a_hundred_mebibytes() -> None:
    assert free(2, size=50, thresholds=Thresholds(bytes=100)) == 0
    assert free(2, size=49, thresholds=Thresholds(bytes=100)) == 998
    assert Thresholds().bytes == 100 << 20


def test_offsets_may_be_two_thousand_apart_where_that_counts() -> None:
    assert free(2, span=2000) == 998
    assert free(2, span=2001) == 0
    assert free(2, span=2001, spans=False) == 998


def test_more_is_pulled_while_workers_starve_up_to_ten_times_as_much() -> None:
    assert free(1000, starving=True) == 4000
    assert free(7000, starving=True, spans=False) == 3000
    assert free(9_400, starving=True, spans=False) == 600
    assert free(9_501, starving=True, spans=False) == 0
    assert free(20, thresholds=Thresholds(messages=2), starving=True) == 0
    assert free(19, thresholds=Thresholds(messages=2), starving=True) == 1


def test_thresholds_of_a_topic_are_shared_by_its_queues() -> None:
    thresholds = Thresholds(topic_messages=100, topic_bytes=1000)

    assert thresholds.of_queue(8) == Thresholds(messages=12, bytes=125)
    assert thresholds.of_queue(0) == Thresholds(messages=100, bytes=1000)
    assert thresholds.of_queue(1000) == Thresholds(messages=1, bytes=1)
    assert Thresholds().of_queue(8) == Thresholds()


@pytest.mark.parametrize("name", ["messages", "bytes", "span", "topic_messages", "topic_bytes"])
def test_a_threshold_below_one_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"Threshold {name} is at least 1, not 0"):
        Thresholds(**{name: 0})


def test_a_threshold_of_minus_one_is_unset() -> None:
    assert Thresholds(-1, -1, -1, -1, -1) == Thresholds()
    assert Thresholds(messages=5, topic_messages=-1).of_queue(3).messages == 5


def test_a_pull_asks_for_no_more_than_fits() -> None:
    sizes = Sizes()
    assert sizes.fit(1) == FIRST_PULL

    sizes.saw(10, 1000)
    assert sizes.fit(1000) == 10
    assert sizes.fit(1) == 1
    sizes.saw(1, 1000)
    assert sizes.fit(1000) == 1
    sizes.saw(1, 0)
    assert sizes.fit(1000) == 2
    sizes.saw(0, 0)
    assert sizes.fit(1000) == 2
