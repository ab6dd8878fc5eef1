"""Order by queue over a lease table, against a list that does the same, message by message."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import AHEAD, EXHAUSTED, FAR, PARKED, WAITING, LeaseTable
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.store.events import Kind

ROWS = 8
NOW = 1000
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """An unsettled message, as a lease table has it."""

    offset: int
    attempt: int
    visible_at: int
    delivery: int
    attempt_id_hash: int


#: In any state; what is parked, to be buried or acked ahead has no time of its own.
STATES = [
    *itertools.product((NOW - 1, NOW, NOW + 1, NOW + 7), (WAITING, 501, 502), (7, 8, 0)),
    *((FAR, AHEAD, 0),) * 6,
    *((FAR, PARKED, 0), (NOW, EXHAUSTED, 0)),
]
PLACES = st.none() | st.tuples(st.sampled_from(STATES), st.integers(0, MAX_ATTEMPTS + 1))
ROW_LISTS = st.lists(PLACES, max_size=ROWS).map(
    lambda places: [
        Row(offset, each[1], *each[0]) for offset, each in enumerate(places) if each is not None
    ]
)
SOME = st.sets(st.integers(0, ROWS - 1))


def table(rows: list[Row]) -> ByQueue:
    """The rows between others that are settled, whose places are still in the table."""
    consumption = ByQueue()
    known = {each.offset: each for each in rows}
    every = [known.get(offset, Row(offset, 1, NOW, 9, 0)) for offset in range(ROWS)]
    consumption.leases.upsert(
        np.arange(ROWS),
        attempt=np.array([each.attempt for each in every], np.int32),
        visible_at=np.array([each.visible_at for each in every]),
        delivery=np.array([each.delivery for each in every]),
        epoch=np.zeros(ROWS, np.int64),
        attempt_id_hash=np.array([each.attempt_id_hash for each in every]),
        group=np.zeros(ROWS, np.int64),
    )
    gone = [offset for offset in range(ROWS) if offset not in known]
    consumption.leases.remove(consumption.leases.find(np.array(gone, np.int64)))
    return consumption


def rows_of(leases: LeaseTable) -> list[Row]:
    columns = (
        *(leases.offset, leases.attempt, leases.visible_at, leases.delivery),
        leases.attempt_id_hash,
    )
    alive = [column[leases.alive].tolist() for column in columns]
    return [Row(*values) for values in zip(*alive, strict=True)]


def at(leases: LeaseTable, offsets: set[int]) -> np.ndarray:
    return leases.find(np.array(sorted(offsets), np.int64))


def apply(consumption: ByQueue, events: list[EventRows]) -> list[Row]:
    for each in events:
        consumption.apply(each)
    return rows_of(consumption.leases)


def open_rows(rows: list[Row]) -> list[Row]:
    return [each for each in rows if each.delivery != AHEAD]


@given(rows=ROW_LISTS)
def test_the_latest_of_what_is_unsettled_opens_the_queue(rows: list[Row]) -> None:
    consumption = table(rows)
    leases = consumption.leases
    unsettled = open_rows(rows)
    stuck = any(each.delivery < WAITING for each in unsettled)
    until = FAR if stuck else max((each.visible_at for each in unsettled), default=0)

    offsets = leases.offset[leases.unsettled()].tolist()

    assert offsets == [each.offset for each in unsettled]
    assert consumption.blocked_until() == until
    opens_itself = until if NOW < until < FAR else None
    assert consumption.next_after(NOW) == opens_itself


@given(rows=ROW_LISTS, said=SOME, otherwise=SOME)
def test_acks_leave_nothing_ahead_of_nothing(
    rows: list[Row], said: set[int], otherwise: set[int]
) -> None:
    consumption = table(rows)
    leases = consumption.leases
    unsettled = [each.offset for each in open_rows(rows)]
    done, settled = said & {*unsettled}, (otherwise - said) & {*unsettled}
    left = [offset for offset in unsettled if offset not in done | settled]
    gap = left[0] if left else ROWS
    expected = [
        replace(each, delivery=AHEAD, visible_at=FAR, attempt_id_hash=0)
        if each.offset in done
        else each
        for each in rows
        if each.offset not in settled and (each.offset > gap or each.offset in left)
    ]

    events = consumption.acks(at(leases, done), settled=at(leases, settled), now_ms=NOW)
    gone = EventRows(kind=Kind.ACK, at_ms=NOW, queue_offset=np.array(sorted(settled), np.int64))
    found = apply(consumption, [*events, *([gone] if settled else [])])

    assert found == expected
    assert consumption.leases.first_offset() == (left[0] if left else None)


@given(rows=ROW_LISTS, said=SOME)
def test_acks_wake_who_waits_only_where_the_queue_opens_earlier(
    rows: list[Row], said: set[int]
) -> None:
    consumption = table(rows)
    leases = consumption.leases
    consumption.acks_wake()
    before = consumption.blocked_until()
    done = said & {each.offset for each in open_rows(rows)}

    apply(consumption, consumption.acks(at(leases, done), now_ms=NOW))

    assert consumption.acks_wake() == (consumption.blocked_until() < before)
    assert not consumption.acks_wake()


@given(rows=ROW_LISTS, attempt=st.sampled_from((7, 8)))
def test_a_batch_is_given_again_only_where_nothing_else_blocks(
    rows: list[Row], attempt: int
) -> None:
    consumption = table(rows)
    leases = consumption.leases
    unsettled = open_rows(rows)
    mine = [
        each
        for each in unsettled
        if each.attempt_id_hash == attempt and each.delivery > WAITING and each.visible_at > NOW
    ]
    others_run = any(each.visible_at > NOW for each in unsettled[len(mine) :])
    blocks = bool(mine) and unsettled[: len(mine)] == mine and not others_run

    found = leases.offset[consumption.of_attempt(attempt, now_ms=NOW)].tolist()

    assert found == ([each.offset for each in mine] if blocks else [])


@given(rows=ROW_LISTS, beyond=st.integers(-1, ROWS))
def test_what_was_acked_behind_a_batch_waits_with_an_attempt_left(
    rows: list[Row], beyond: int
) -> None:
    consumption = table(rows)
    expected = [
        replace(each, delivery=WAITING, visible_at=NOW, attempt=min(each.attempt, MAX_ATTEMPTS - 1))
        if each.delivery == AHEAD and each.offset > beyond
        else each
        for each in rows
    ]

    events = consumption.reopened(beyond, max_attempts=MAX_ATTEMPTS, now_ms=NOW)

    assert apply(consumption, events) == expected


@given(rows=ROW_LISTS, failed=st.integers(0, ROWS - 1), told=SOME)
def test_what_lies_behind_a_failure_begins_again_and_keeps_all_else(
    rows: list[Row], failed: int, told: set[int]
) -> None:
    consumption = table(rows)
    leases = consumption.leases
    known = {each.offset for each in rows}
    spared = {
        each.offset
        for each in rows
        if each.offset > failed and each.offset not in told and each.delivery >= WAITING
    }
    expected = [
        replace(each, attempt=int(each.delivery > WAITING and each.visible_at > NOW))
        if failed in known and each.offset in spared
        else each
        for each in rows
    ]

    events = consumption.begun_again(
        at(leases, {failed} & known), settled=at(leases, told & known), now_ms=NOW
    )

    assert apply(consumption, events) == expected


@given(spent=st.lists(st.booleans(), max_size=8))
def test_only_the_first_that_is_spent_is_to_blame(spent: list[bool]) -> None:
    first = spent.index(True) if True in spent else len(spent)

    found = ByQueue().blameless(np.array(spent, np.bool_)).tolist()

    assert found == [place > first for place in range(len(spent))]
