"""Checks in line: their places, and that none stays for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.state.halves import HALF, Rows
from rmq_pipeline.broker.state.state import Window
from rmq_pipeline.broker.work.check_offers import Offers
from rmq_pipeline.clock import ManualClock
from tests.broker.sealed_home import messages, open_broker

NOW_MS = 1_000_000
TOPIC_ID = 7


def checks(*offsets: int, due_ms: int = NOW_MS + 1, count: int = 1) -> Rows:
    rows = np.zeros(len(offsets), HALF)
    rows["queue_offset"], rows["due_ms"], rows["checks"] = offsets, due_ms, count
    rows["target_topic_id"] = TOPIC_ID
    return rows


def taken(offers: Offers, limit: int = 100, *, now_ms: int = NOW_MS) -> list[int]:
    found = offers.take(now_ms, producer_group=None, topic_ids=None, limit=limit)
    return [offset for rows in found.values() for offset in rows["queue_offset"].tolist()]


def waiting(offers: Offers, *, now_ms: int = NOW_MS) -> list[int]:
    return sorted(offers.waiting(now_ms, windows={}).tolist())


def test_what_is_offered_again_keeps_its_place_and_what_is_new_comes_last() -> None:
    offers = Offers()
    offers.offer("p", checks(5, 3, 9), now_ms=NOW_MS)

    offers.offer("p", checks(1, 9, 3, 4, count=2), now_ms=NOW_MS)

    found = offers.take(NOW_MS, producer_group="p", topic_ids=None, limit=100)["p"]
    assert found["queue_offset"].tolist() == [5, 3, 9, 1, 4]
    assert found["checks"].tolist() == [1, 2, 2, 2, 2]


def test_what_was_taken_and_not_given_is_the_first_again() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2, 3, 4), now_ms=NOW_MS)
    found = offers.take(NOW_MS, producer_group="p", topic_ids=None, limit=3)["p"]

    offers.put_back("p", found[1:])

    assert taken(offers) == []  # a live producer of the group asks for them
    found = offers.take(NOW_MS, producer_group="p", topic_ids=None, limit=100)["p"]
    assert found["queue_offset"].tolist() == [2, 3, 4]


def test_what_was_offered_again_meanwhile_is_not_put_back() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2), now_ms=NOW_MS)
    found = offers.take(NOW_MS, producer_group=None, topic_ids=None, limit=2)["p"]

    offers.offer("p", checks(1, count=2), now_ms=NOW_MS)
    offers.put_back("p", found)

    rows = offers.take(NOW_MS, producer_group=None, topic_ids=None, limit=2)["p"]
    assert (rows["queue_offset"].tolist(), rows["checks"].tolist()) == ([2, 1], [1, 2])


def given(offers: Offers, holder: str, *, now_ms: int = NOW_MS) -> list[int]:
    found = offers.take(now_ms, producer_group=None, topic_ids=None, limit=100, holder=holder)
    return [offset for rows in found.values() for offset in rows["queue_offset"].tolist()]


def kept(offers: Offers, holder: str, *offsets: int, now_ms: int = NOW_MS) -> int:
    return offers.keep(holder, now_ms, offsets=np.array(offsets, dtype=np.int64))


def test_checks_are_held_from_the_moment_they_are_given() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2), now_ms=NOW_MS)

    assert given(offers, "one") == [1, 2]

    assert waiting(offers, now_ms=NOW_MS + 4_999) == [1, 2]
    assert waiting(offers, now_ms=NOW_MS + 5_000) == []


def test_a_holder_that_was_silent_too_long_is_told_and_may_hold_them_again() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2), now_ms=NOW_MS)
    given(offers, "one")
    offers.keep("one", NOW_MS)
    later_ms = NOW_MS + 2 * limits.PRODUCER_LIVE_MS

    assert offers.keep("one", later_ms) == 0
    assert kept(offers, "one", 1, 2, now_ms=later_ms) == 2
    assert waiting(offers, now_ms=later_ms + limits.PRODUCER_LIVE_MS - 1) == [1, 2]


def test_a_holder_is_told_of_checks_that_another_has_meanwhile() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2, 3), now_ms=NOW_MS)
    kept(offers, "another", 2)

    assert kept(offers, "one", 1, 2, 3) == 2

    assert taken(offers) == []
    assert kept(offers, "one") == 0
    assert waiting(offers) == [2]


def test_what_has_fallen_due_waits_and_is_not_given_before_it_is_offered_again() -> None:
    offers = Offers()
    offers.offer("p", checks(1, 2), now_ms=NOW_MS)
    assert taken(offers, 1) == [1]

    later_ms = NOW_MS + 1
    assert taken(offers, now_ms=later_ms) == []
    assert waiting(offers, now_ms=later_ms) == [2]

    offers.offer("p", checks(2, due_ms=later_ms + 1), now_ms=NOW_MS)
    assert taken(offers, now_ms=later_ms) == [2]
    assert waiting(offers, now_ms=later_ms) == []


@pytest.mark.parametrize(("asked", "waits"), [([TOPIC_ID], True), (None, True), ([8], False)])
def test_it_waits_for_those_who_ask_about_its_topic(asked: list[int] | None, waits: bool) -> None:
    offers = Offers()
    offers.take(NOW_MS, producer_group=None, topic_ids=asked, limit=1)
    offers.offer("p", checks(1, due_ms=NOW_MS + 1_000_000), now_ms=NOW_MS)

    last_ms = NOW_MS + limits.PRODUCER_LIVE_MS - 1

    assert waiting(offers, now_ms=last_ms) == ([1] if waits else [])
    assert waiting(offers, now_ms=last_ms + 1) == []


def test_who_asked_long_ago_is_forgotten_when_there_are_many() -> None:
    offers = Offers()
    offers.offer("p0", checks(1, due_ms=NOW_MS + 1_000_000), now_ms=NOW_MS)
    for i in range(1_000):
        offers.take(NOW_MS, producer_group=f"p{i}", topic_ids=[TOPIC_ID], limit=0)
    offers.take(NOW_MS, producer_group=None, topic_ids=range(100, 1_100), limit=0)

    later_ms = NOW_MS + limits.PRODUCER_LIVE_MS
    offers.take(later_ms, producer_group="new", topic_ids=[TOPIC_ID], limit=0)
    offers.take(later_ms, producer_group=None, topic_ids=[TOPIC_ID], limit=0)

    assert set(offers._askers._asked) == {None, "new"}
    assert set(offers._askers._asked[None]) == {(TOPIC_ID, None)}
    assert waiting(offers, now_ms=later_ms) == [1]


@pytest.mark.parametrize("other", [None, ("upkeep/another", 1)])
def test_a_window_at_work_is_not_forgotten_when_another_asks(other: tuple[str, int] | None) -> None:
    offers = Offers()
    later_ms = NOW_MS + 2 * limits.PRODUCER_LIVE_MS
    offers.offer("p", checks(1, due_ms=later_ms), now_ms=NOW_MS)
    name = "upkeep/check_transactions"
    for window in ((name, 3), other):
        offers.take(NOW_MS, producer_group=None, topic_ids=[TOPIC_ID], limit=0, window=window)

    at_work = {name: Window(name, "a run", 3, expires_at_ms=later_ms + 1)}

    assert offers.waiting(later_ms, windows=at_work).tolist() == [1]
    assert offers.waiting(later_ms + 1, windows=at_work).tolist() == []


@pytest.mark.parametrize("end", ["commit", "delete"])
def test_checks_of_half_messages_that_have_ended_leave_the_line(tmp_path: Path, end: str) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        halves = broker.send_half("orders", messages(10), producer_group="p")
        clock.advance(limits.TRANSACTION_IMMUNITY_MS)
        broker.check_transactions()
        broker.fetch_checks(topics=["orders"], limit=1)
        in_line = [len(broker.engine.offers)]

        _end(broker, halves.slice(0, 8), end=end)
        clock.advance(limits.TRANSACTION_CHECK_INTERVAL_MS)
        broker.check_transactions()
        in_line.append(len(broker.engine.offers))

        assert in_line == ([9, 2] if end == "commit" else [9, 0])


def _end(broker: Broker, halves: pa.Table, *, end: str) -> None:
    if end == "delete":
        broker.delete_topic("orders", force=True)
        return
    said = pa.array([end] * halves.num_rows)
    broker.end_transactions(pa.table([halves["transaction_id"], said], schema=schema.RESOLUTION))
