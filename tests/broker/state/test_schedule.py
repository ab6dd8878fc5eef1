"""The schedule against a model that sorts a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_pipeline.broker.state.schedule import Schedule, Scheduled, keys_of

Row = tuple[int, int, int]  # due, queue, offset


def rows_of(rows: list[Row]) -> Scheduled:
    due, queue, offset = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Scheduled(
        due,
        queue.astype(np.int32),
        offset,
        offset * 8,
        offset.astype(np.int32),
        np.full(len(rows), 5, dtype=np.int32),
    )


def listed(rows: Scheduled) -> list[Row]:
    return list(
        zip(
            rows.deliver_at.tolist(),
            rows.queue_id.tolist(),
            rows.queue_offset.tolist(),
            strict=True,
        )
    )


class Model:
    """Open rows in a list, and the next offset of each queue."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.next = [0, 0, 0]

    def arrive(self, dues: list[tuple[int, int]]) -> list[Row]:
        rows = []
        for due, queue in dues:
            rows.append((due, queue, self.next[queue]))
            self.next[queue] += 1
        self.rows += rows
        return rows

    def due(self, now: int, limit: int) -> list[int]:
        return sorted(due for due, _, _ in self.rows if due <= now)[:limit]


arrivals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=40)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), arrivals),
        st.tuples(st.just("due"), st.tuples(st.integers(0, 31), st.integers(1, 50))),
        st.tuples(st.just("drop"), st.integers(0, 1 << 30)),
    ),
    max_size=40,
)


def keys(rows: list[Row]) -> np.ndarray:
    return np.concatenate([keys_of(q, np.array([o], np.int64)) for _, q, o in rows])


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_schedule_is_a_sorted_list(history: list[tuple[str, Any]]) -> None:
    schedule, model = Schedule(), Model()
    for what, said in history:
        if what == "arrive":
            schedule.add(rows_of(model.arrive(said)))
        elif what == "due":
            now, limit = said
            got = listed(schedule.due(now, limit))
            assert [due for due, _, _ in got] == model.due(now, limit)
            for queue in range(3):  # a queue's rows of one moment keep their order
                mine = [(due, offset) for due, q, offset in got if q == queue]
                assert mine == sorted(mine)
            assert schedule.count_due(now) == len(model.due(now, 1 << 30))
            if got:
                assert schedule.open(keys(got)).all()
                schedule.remove(keys(got))
                assert not schedule.open(keys(got)).any()
                model.rows = [row for row in model.rows if row not in set(got)]
        elif model.rows:
            row = model.rows.pop(said % len(model.rows))
            found, which = schedule.find(keys([row]))
            assert (listed(found), which.tolist()) == ([row], [True])
            schedule.remove(keys([row]))
        assert len(schedule) == len(model.rows) == schedule.waiting_for(5)
        assert schedule.next_due_ms() == min((due for due, _, _ in model.rows), default=None)


@pytest.mark.parametrize("order", ["as_sent", "backwards", "random"])
def test_a_large_schedule_comes_out_in_order_whatever_the_order_it_came_in(order: str) -> None:
    n = 100_000
    due = np.arange(n)
    if order == "backwards":
        due = due[::-1].copy()
    elif order == "random":
        due = np.random.default_rng(1).permutation(n)
    offset = np.arange(n, dtype=np.int64)
    whole = Scheduled(
        due, np.zeros(n, np.int32), offset, offset, offset.astype(np.int32), np.ones(n, np.int32)
    )
    schedule = Schedule()
    for start in range(0, n, 7_000):
        schedule.add(whole.take(slice(start, start + 7_000)))
        schedule.count_due(-1)

    seen = 0
    while len(rows := schedule.due(n, 9_000)):
        assert rows.deliver_at.tolist() == list(range(seen, seen + len(rows)))
        schedule.remove(rows.keys())
        seen += len(rows)

    assert seen == n
    assert len(schedule) == 0


def test_places_that_hold_nothing_are_not_found() -> None:
    schedule = Schedule()
    assert schedule.open(keys([(0, 0, 0)])).tolist() == [False]
    schedule.add(rows_of([(5, 1, 3)]))

    found, which = schedule.find(keys([(0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 1, 4)]))

    assert listed(found) == [(5, 1, 3)]
    assert which.tolist() == [False, True, False, False]
