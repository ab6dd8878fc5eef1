"""Whoever answers checks may be slow: nothing is given up that was only waiting in line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import limits
from tests.behaviour.halves import Producer, asked, ends, sweep

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

CHECKS = limits.TRANSACTION_CHECKS
INTERVAL_MS = limits.TRANSACTION_CHECK_INTERVAL_MS
LIVE_MS = limits.PRODUCER_LIVE_MS
WINDOW = "upkeep/check_transactions"


def counted(endpoint: Endpoint) -> list[int]:
    """Checks of the open half messages, the most first."""
    rows = endpoint.sql("SELECT checks FROM half ORDER BY checks DESC")
    return [int(row["checks"]) for row in rows]


def next_sweep(endpoint: Endpoint, *, after_ms: int = INTERVAL_MS) -> int:
    """The sweep after the next; how many it gave up."""
    endpoint.advance(after_ms)
    return int(sweep(endpoint)["given_up"])


@pytest.mark.every_endpoint
@pytest.mark.parametrize("who", ["producer", "anyone"])
def test_each_half_is_checked_fifteen_times_before_it_is_exhausted(
    endpoint: Endpoint, orders: str, begin: Producer, who: str
) -> None:
    bodies = [b"%d" % i for i in range(17)]
    begin(len(bodies))
    asking: dict[str, Any] = (
        {"producer_group": "producers"} if who == "producer" else {"topics": [orders]}
    )
    asked(endpoint, **asking)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    given_up = sweep(endpoint)["given_up"]

    answers = []
    while not given_up:
        answers.extend(asked(endpoint, limit=1, **asking))
        given_up = next_sweep(endpoint)

    # In turn, from the oldest on; the first is given up when it was asked about for the last time.
    turns = [(body, check) for check in range(1, CHECKS + 1) for body in bodies]
    assert answers == turns[: len(answers)]
    assert len(answers) == (CHECKS - 1) * len(bodies) + 1
    assert given_up == 1


def test_slow_answers_are_delivered_and_no_half_is_exhausted(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(60)
    asked(endpoint, topics=[orders])
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)

    given_up = 0
    while (checks := endpoint.broker.fetch_checks(topics=[orders], limit=3)).num_rows:
        endpoint.advance(INTERVAL_MS)
        endpoint.broker.end_transactions(ends(checks, "commit"))
        given_up += sweep(endpoint)["given_up"]

    assert given_up == 0
    assert endpoint.stored(orders) == 60


def test_checks_that_no_client_fetches_are_counted_again_after_60_s(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(2)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)
    assert asked(endpoint, topics=[orders], limit=1) == [(b"0", 1)]

    counts = []
    for _ in range(3):
        next_sweep(endpoint)
        counts.append(counted(endpoint))

    assert INTERVAL_MS < LIVE_MS <= 2 * INTERVAL_MS
    assert counts == [[2, 1], [3, 2], [4, 3]]


@pytest.mark.parametrize("asking", ["of another topic", "of another producer group"])
def test_a_check_counts_if_only_other_clients_ask(
    endpoint: Endpoint, orders: str, begin: Producer, topic: Make, asking: str
) -> None:
    other = topic(type="transaction")
    who: dict[str, Any] = {"topics": [other]}
    if asking == "of another producer group":
        who = {"producer_group": "others", "topics": [orders]}
    begin(1)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)

    reports = []
    for _ in range(CHECKS + 1):
        asked(endpoint, **who)
        reports.append(sweep(endpoint))
        endpoint.advance(INTERVAL_MS)

    assert [report["given_up"] for report in reports] == [0] * CHECKS + [1]


@pytest.mark.every_endpoint
def test_a_window_in_a_long_call_is_waited_for(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(3)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)
    epoch = endpoint.broker.open_window(WINDOW, owner="a", duration_ms=LIVE_MS)["epoch"]
    asked(endpoint, topics=[orders], window=(WINDOW, epoch), limit=1)

    for _ in range(5):
        next_sweep(endpoint)
        endpoint.broker.renew_window(WINDOW, epoch=epoch, duration_ms=LIVE_MS)
    during = counted(endpoint)
    # The next window sweeps before it asks; it never does, nor does the one after it.
    after = []
    for owner in ("b", "c"):
        endpoint.broker.open_window(WINDOW, owner=owner, duration_ms=LIVE_MS, takeover=True)
        next_sweep(endpoint)
        after.append(counted(endpoint))

    assert during == [2, 1, 1]
    assert after == [[2, 1, 1], [3, 2, 2]]


def test_a_window_whose_lease_has_ended_is_not_waited_for(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(2)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)
    epoch = endpoint.broker.open_window(WINDOW, owner="a", duration_ms=LIVE_MS)["epoch"]
    asked(endpoint, topics=[orders], window=(WINDOW, epoch), limit=1)

    for _ in range(2):
        next_sweep(endpoint)

    assert counted(endpoint) == [3, 2]


def test_every_producer_group_has_its_turn(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(10, producer_group="a")
    begin(2, start=10, producer_group="b")
    begin(1, start=12, producer_group="c")
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)

    turns = [asked(endpoint, topics=[orders], limit=2) for _ in range(3)]

    found = [[int(body) for body, _ in turn] for turn in turns]
    assert found == [[0, 1], [10, 11], [12, 2]]


def test_a_restart_counts_once_and_then_it_waits_again(
    endpoint: Endpoint, orders: str, begin: Producer
) -> None:
    begin(3)
    endpoint.advance(limits.TRANSACTION_IMMUNITY_MS)
    sweep(endpoint)
    asked(endpoint, topics=[orders], limit=1)
    next_sweep(endpoint)

    endpoint.reopen()
    counts = []
    for _ in range(3):
        next_sweep(endpoint)
        asked(endpoint, topics=[orders], limit=1)
        counts.append(counted(endpoint))

    # Who asks is known to the broker that was asked; what it counted is stored.
    assert counts == [[3, 2, 2], [4, 2, 2], [4, 3, 2]]
