"""Whoever answers checks may be slow: nothing is given up that was only waiting in line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import limits
from tests.behaviour.halves import Producer, asked, ends, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

CHECKS = limits.TRANSACTION_CHECKS
INTERVAL_MS = limits.TRANSACTION_CHECK_INTERVAL_MS
LIVE_MS = limits.PRODUCER_LIVE_MS
WINDOW = "upkeep/check_transactions"


@pytest.fixture
def orders(topic: Make) -> str:
    return str(topic(type="transaction", queues=1))


@pytest.fixture
def begin(door: Door, orders: str, messages: Make) -> Producer:
    return Producer(door, orders, messages)


def counted(door: Door) -> list[int]:
    """Checks of the open half messages, the most first."""
    rows = door.sql("SELECT checks FROM half ORDER BY checks DESC")
    return [int(row["checks"]) for row in rows]


def next_sweep(door: Door, *, after_ms: int = INTERVAL_MS) -> int:
    """The sweep after the next; how many it gave up."""
    door.advance(after_ms)
    return int(sweep(door)["given_up"])


@pytest.mark.every_endpoint
@pytest.mark.parametrize("who", ["producer", "anyone"])
def test_each_is_asked_about_fifteen_times_before_it_is_given_up(
    door: Door, orders: str, begin: Producer, who: str
) -> None:
    bodies = [b"%d" % i for i in range(17)]
    begin(len(bodies))
    asking: dict[str, Any] = (
        {"producer_group": "producers"} if who == "producer" else {"topics": [orders]}
    )
    asked(door, **asking)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    given_up = sweep(door)["given_up"]

    answers = []
    while not given_up:
        answers.extend(asked(door, limit=1, **asking))
        given_up = next_sweep(door)

    # In turn, from the oldest on; the first is given up when it was asked about for the last time.
    turns = [(body, check) for check in range(1, CHECKS + 1) for body in bodies]
    assert answers == turns[: len(answers)]
    assert len(answers) == (CHECKS - 1) * len(bodies) + 1
    assert given_up == 1


def test_what_is_answered_slowly_is_delivered_and_none_is_given_up(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(60)
    asked(door, topics=[orders])
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)

    given_up = 0
    while (checks := door.broker.fetch_checks(topics=[orders], limit=3)).num_rows:
        door.advance(INTERVAL_MS)
        door.broker.end_transactions(ends(checks, "commit"))
        given_up += sweep(door)["given_up"]

    assert given_up == 0
    assert door.stored(orders) == 60


def test_what_nobody_comes_for_any_more_is_counted_again_after_60_s(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(2)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)
    assert asked(door, topics=[orders], limit=1) == [(b"0", 1)]

    counts = []
    for _ in range(3):
        next_sweep(door)
        counts.append(counted(door))

    assert INTERVAL_MS < LIVE_MS <= 2 * INTERVAL_MS
    assert counts == [[2, 1], [3, 2], [4, 3]]


@pytest.mark.parametrize("asking", ["of another topic", "of another producer group"])
def test_it_counts_where_nobody_asks_who_would_get_it(
    door: Door, orders: str, begin: Producer, topic: Make, asking: str
) -> None:
    other = topic(type="transaction")
    who: dict[str, Any] = {"topics": [other]}
    if asking == "of another producer group":
        who = {"producer_group": "others", "topics": [orders]}
    begin(1)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)

    reports = []
    for _ in range(CHECKS + 1):
        asked(door, **who)
        reports.append(sweep(door))
        door.advance(INTERVAL_MS)

    assert [report["given_up"] for report in reports] == [0] * CHECKS + [1]


@pytest.mark.every_endpoint
def test_a_window_in_a_long_call_is_waited_for(door: Door, orders: str, begin: Producer) -> None:
    begin(3)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)
    epoch = door.broker.open_window(WINDOW, owner="a", duration_ms=LIVE_MS)["epoch"]
    asked(door, topics=[orders], window=(WINDOW, epoch), limit=1)

    for _ in range(5):
        next_sweep(door)
        door.broker.renew_window(WINDOW, epoch=epoch, duration_ms=LIVE_MS)
    during = counted(door)
    # The next window sweeps before it asks; it never does, nor does the one after it.
    after = []
    for owner in ("b", "c"):
        door.broker.open_window(WINDOW, owner=owner, duration_ms=LIVE_MS, takeover=True)
        next_sweep(door)
        after.append(counted(door))

    assert during == [2, 1, 1]
    assert after == [[2, 1, 1], [3, 2, 2]]


def test_a_window_whose_lease_has_ended_is_not_waited_for(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(2)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)
    epoch = door.broker.open_window(WINDOW, owner="a", duration_ms=LIVE_MS)["epoch"]
    asked(door, topics=[orders], window=(WINDOW, epoch), limit=1)

    for _ in range(2):
        next_sweep(door)

    assert counted(door) == [3, 2]


def test_every_producer_group_has_its_turn(door: Door, orders: str, begin: Producer) -> None:
    begin(10, producer_group="a")
    begin(2, start=10, producer_group="b")
    begin(1, start=12, producer_group="c")
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)

    turns = [asked(door, topics=[orders], limit=2) for _ in range(3)]

    found = [[int(body) for body, _ in turn] for turn in turns]
    assert found == [[0, 1], [10, 11], [12, 2]]


def test_a_restart_counts_once_and_then_it_waits_again(
    door: Door, orders: str, begin: Producer
) -> None:
    begin(3)
    door.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(door)
    asked(door, topics=[orders], limit=1)
    next_sweep(door)

    door.reopen()
    counts = []
    for _ in range(3):
        next_sweep(door)
        asked(door, topics=[orders], limit=1)
        counts.append(counted(door))

    # Who asks is known to the broker that was asked; what it counted is stored.
    assert counts == [[3, 2, 2], [4, 2, 2], [4, 3, 2]]
