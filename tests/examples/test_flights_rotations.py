"""The consumers' handlers over real departures, however batches are cut."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.examples.flights import dataset, operations, rotations, summary, verify
from rmq_pipeline.handling.group_walk import Rules, group_starts, walk
from rmq_pipeline.handling.handler import Outcome

MAX_ATTEMPTS = 3
QUEUES = 8
RULES = Rules(
    handler=rotations.handler,
    state_schema=rotations.STATE,
    sink_schema=rotations.ROTATION,
    partition_time="scheduled_departure_ms",
    publishes={rotations.LATE_TOPIC: "delay"},
)


@dataclass
class Run:
    """Results of a whole run: the tables of every outcome, and the exhausted messages."""

    rows: list[pa.Table] = field(default_factory=list)
    late: list[pa.Table] = field(default_factory=list)
    dead_letters: list[pa.Table] = field(default_factory=list)
    deliveries: int = 0

    def keep(self, outcome: Outcome) -> None:
        assert outcome.rows is not None
        self.rows.append(outcome.rows)
        self.late += (outcome.publish or {}).values()

    @cached_property
    def sink(self) -> pa.Table:
        return pa.concat_tables([rotations.ROTATION.empty_table(), *self.rows]).combine_chunks()

    @cached_property
    def late_messages(self) -> pa.Table:
        return pa.concat_tables([rotations.LATE.empty_table(), *self.late]).combine_chunks()


def placed(departures: pa.Table) -> pa.Table:
    """The departures on their queues, those of one aircraft side by side, in offset order."""
    groups = departures["message_group"].combine_chunks().dictionary_encode().indices
    queue_id = groups.to_numpy() % QUEUES
    offset = np.zeros(len(queue_id), np.int64)
    for queue in range(QUEUES):
        here = queue_id == queue
        offset[here] = np.arange(here.sum())
    table = departures.append_column("queue_id", pa.array(queue_id.astype(np.int32)))
    table = table.append_column("queue_offset", pa.array(offset))
    return table.take(np.argsort(groups.to_numpy(), kind="stable")).combine_chunks()


def aircraft(table: pa.Table) -> Iterator[pa.Table]:
    starts = [*group_starts(table["message_group"]).tolist(), table.num_rows]
    for start, end in pairwise(starts):
        yield table.slice(start, end - start)


def consume(table: pa.Table, cut: Callable[[], int]) -> Run:
    """Give every aircraft its departures as the broker does, `cut()` of them at a time."""
    run = Run()
    for departures in aircraft(table):
        consume_group(departures, cut, run)
    return run


def consume_group(departures: pa.Table, cut: Callable[[], int], run: Run) -> None:
    state = rotations.STATE.empty_table()
    position, attempt = 0, 1
    while position < departures.num_rows:
        run.deliveries += 1
        done, failed, state = deliver(departures.slice(position, cut()), state, run)
        attempt = attempt + 1 if failed and done == 0 else 1 + failed
        position += done
        if attempt > MAX_ATTEMPTS:
            run.dead_letters.append(departures.slice(position, 1))
            position, attempt = position + 1, 1


def deliver(batch: pa.Table, state: pa.Table, run: Run) -> tuple[int, bool, pa.Table]:
    """Handle a batch; when that raises, one by one up to the first that raises."""
    try:
        outcome = rotations.handler(batch, state)
    except ValueError:
        if batch.num_rows == 1:
            return 0, True, state
    else:
        run.keep(outcome)
        assert outcome.state is not None
        return batch.num_rows, False, outcome.state
    for done in range(batch.num_rows):
        good, failed, state = deliver(batch.slice(done, 1), state, run)
        if failed:
            return done, True, state
        assert good == 1
    raise AssertionError("a batch raised, its messages did not")


def consume_in_batches(table: pa.Table, cut: Callable[[], int]) -> Run:
    """The same with the walk of Spark's workers: many aircraft a batch, the state of all."""
    run, state, attempts = Run(), None, Counter[int]()
    starts = [*group_starts(table["message_group"]).tolist(), table.num_rows]
    waiting = dict(pairwise(starts))
    while waiting:
        given = [range(start, min(start + cut(), end)) for start, end in waiting.items()]
        rows = np.concatenate(given)
        walked = walk(table.take(rows), state, rules=RULES)
        run.rows += [walked.rows] if walked.rows is not None else []
        run.late += walked.publish.values()
        state = merged(state, walked.state)
        undone = {int(rows[row]) for row in walked.exceptions["row"].to_pylist()}
        retried = walked.exceptions.filter(pc.equal(walked.exceptions["outcome"], "retry"))["row"]
        attempts.update(int(rows[row]) for row in retried.to_pylist())
        dead = {row for row in undone if attempts[row] == MAX_ATTEMPTS}
        run.dead_letters += [table.slice(row, 1) for row in dead]
        done = [sum(row not in undone or row in dead for row in of_one) for of_one in given]
        waiting = {
            start + count: end
            for (start, end), count in zip(waiting.items(), done, strict=True)
            if start + count < end
        }
    return run


def merged(state: pa.Table | None, changed: pa.Table | None) -> pa.Table | None:
    if state is None or changed is None:
        return state if changed is None else changed
    kept = pc.is_in(state["message_group"], changed["message_group"].combine_chunks())
    return pa.concat_tables([state.filter(pc.invert(kept)), changed])


def assert_right(run: Run, expected: verify.Expected) -> None:
    assert verify.compare(expected, run.sink) == []
    assert verify.order_violations(run.sink) == []
    assert verify.compare_late(expected, run.late_messages) == []
    assert verify.compare_dead_letters(expected, pa.concat_tables(run.dead_letters)) == []


def random_cut(seed: int, largest: int) -> Callable[[], int]:
    random = Random(seed)
    return lambda: random.randint(1, largest)


@pytest.fixture(scope="module")
def week() -> pa.Table:
    return placed(dataset.departures(7))


@pytest.fixture(scope="module")
def week_facts() -> verify.Expected:
    return verify.expected(7)


@pytest.fixture(scope="module")
def month() -> pa.Table:
    return placed(dataset.departures(31))


@pytest.fixture(scope="module")
def month_facts() -> verify.Expected:
    return verify.expected(31)


@pytest.fixture(scope="module")
def year_facts() -> verify.Expected:
    return verify.expected()


@pytest.mark.parametrize("size", [1, 2, 10_000])
def test_week_is_right_in_batches_of_one_size(
    size: int, week: pa.Table, week_facts: verify.Expected
) -> None:
    run = consume(week, lambda: size)

    assert_right(run, week_facts)


@pytest.mark.parametrize("seed", range(5))
def test_week_is_right_however_batches_are_cut(
    seed: int, week: pa.Table, week_facts: verify.Expected
) -> None:
    run = consume(week, random_cut(seed, largest=2 + 2 * seed))

    assert_right(run, week_facts)


@pytest.mark.parametrize("largest", [1, 5, 10_000])
def test_week_is_right_in_batches_of_many_aircraft(
    largest: int, week: pa.Table, week_facts: verify.Expected
) -> None:
    run = consume_in_batches(week, random_cut(largest, largest))

    assert_right(run, week_facts)


@pytest.mark.parametrize("largest", [20, 600])
def test_month_is_right_in_batches_of_many_aircraft(
    largest: int, month: pa.Table, month_facts: verify.Expected
) -> None:
    run = consume_in_batches(month, random_cut(largest, largest))

    assert_right(run, month_facts)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("consumed", "largest"),
    [(consume, 6), (consume_in_batches, 20), (consume_in_batches, 600)],
)
def test_year_is_right_however_batches_are_cut(
    consumed: Callable[[pa.Table, Callable[[], int]], Run],
    largest: int,
    year_facts: verify.Expected,
) -> None:
    year = placed(dataset.departures())

    run = consumed(year, random_cut(largest, largest))

    assert_right(run, year_facts)


def test_outcome_has_the_declared_columns(week: pa.Table) -> None:
    run = consume(week, lambda: 10)

    assert all(rows.schema.equals(rotations.ROTATION) for rows in run.rows)
    assert all(late.schema.equals(rotations.LATE) for late in run.late)
    outcome = rotations.handler(week.slice(0, 1), rotations.STATE.empty_table())
    assert outcome.state is not None
    assert outcome.state.schema.equals(rotations.STATE)
    assert outcome.results is None


def departure(day: int, **fields: Any) -> dict[str, Any]:
    usual = {
        "carrier": "B6",
        "flight": 1,
        "origin": "JFK",
        "dest": "BOS",
        "dep_time": 1200,
        "dep_delay": 0,
        "arr_delay": 0,
        "air_time": 60,
        "minute": 0,
        "time_hour": f"2013-01-{day:02}T12:00:00Z",
    }
    return usual | fields


def fly(*departures: dict[str, Any]) -> Outcome:
    count = len(departures)
    messages = pa.table(
        {
            "message_group": ["N1"] * count,
            "body": pa.array([json.dumps(one).encode() for one in departures]),
            "queue_id": pa.array([0] * count, pa.int32()),
            "queue_offset": list(range(count)),
            "born_at_ms": [0] * count,
        }
    )
    return rotations.handler(messages, rotations.STATE.empty_table())


def legs(*departures: dict[str, Any]) -> pa.Table:
    rows = fly(*departures).rows
    assert rows is not None
    return rows


def test_first_leg_has_nothing_before_it() -> None:
    (leg,) = legs(departure(1, dep_delay=30)).to_pylist()

    assert leg["leg"] == 1
    assert leg["previous_dest"] is None
    assert leg["turnaround_minutes"] is None
    assert leg["carried_delay_minutes"] == 0


def test_turnaround_is_from_landing_to_the_next_scheduled_departure() -> None:
    second = departure(1, time_hour="2013-01-01T15:00:00Z", minute=5)
    rows = legs(departure(1, dep_delay=10, arr_delay=20), second)

    # Down at 12:00 + 10 late + 60 in the air = 13:10; due out at 15:05.
    assert rows["turnaround_minutes"].to_pylist() == [None, 115]
    assert rows["previous_dest"].to_pylist() == [None, "BOS"]


@pytest.mark.parametrize(
    ("arrived_late", "left_late", "hour", "carried"),
    [
        (40, 100, 15, 40),  # all of what was brought, the rest is new
        (40, 25, 15, 25),  # some was made up for
        (40, -5, 15, 0),
        (-9, 25, 15, 0),
        (None, 25, 15, 0),
    ],
)
def test_carried_delay_is_what_the_leg_before_explains(
    arrived_late: int | None, left_late: int, hour: int, carried: int
) -> None:
    second = departure(1, time_hour=f"2013-01-01T{hour}:00:00Z", dep_delay=left_late)
    rows = legs(departure(1, arr_delay=arrived_late), second)

    assert rows["carried_delay_minutes"].to_pylist() == [0, carried]


def test_a_delay_is_not_carried_for_longer_than_a_day() -> None:
    first = departure(1, arr_delay=40)
    due = {"time_hour": "2013-01-02T13:00:00Z", "dep_delay": 50}

    in_time = legs(first, departure(2, **due, minute=0))
    too_late = legs(first, departure(2, **due, minute=1))

    assert in_time["carried_delay_minutes"].to_pylist() == [0, 40]
    assert too_late["carried_delay_minutes"].to_pylist() == [0, 0]


def test_a_diverted_leg_leaves_turnaround_unknown() -> None:
    rows = legs(departure(1, air_time=None, arr_delay=None), departure(2))

    assert rows["turnaround_minutes"].to_pylist() == [None, None]
    assert rows["leg"].to_pylist() == [1, 2]


def test_a_cancelled_departure_raises_and_says_which() -> None:
    with pytest.raises(ValueError, match="B62 of 2013-01-03T12:00:00Z has no departure time"):
        fly(departure(2), departure(3, flight=2, dep_time=None, dep_delay=None))


def test_an_accepted_cancellation_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_FLIGHTS", str(tmp_path))
    operations.accept_cancellations()
    cancelled = departure(3, dep_time=None, dep_delay=None)
    flown = [departure(2, arr_delay=30), departure(4, dep_delay=90)]

    with_one = fly(flown[0], cancelled, flown[1])
    without = fly(*flown)

    assert fly(cancelled) == Outcome()
    assert with_one.state == without.state
    assert with_one.publish == without.publish
    assert with_one.rows is not None
    assert without.rows is not None
    place = ["queue_offset"]
    assert with_one.rows.drop_columns(place) == without.rows.drop_columns(place)


@pytest.mark.parametrize(("delay", "level"), [(61, 3), (120, 3), (121, 2), (241, 1)])
def test_more_than_an_hour_late_is_published_with_a_delay(delay: int, level: int) -> None:
    outcome = fly(departure(1, dep_delay=60), departure(2, dep_delay=delay))

    assert outcome.publish is not None
    (late,) = outcome.publish["late_aircraft"].to_pylist()
    assert late["delay_level"] == level
    assert late["tag"] == "B6"
    assert late["keys"] == ["N1", "B61"]
    assert json.loads(late["body"])["dep_delay_minutes"] == delay
    assert json.loads(late["body"])["leg"] == 2


def test_in_time_nothing_is_published() -> None:
    assert fly(departure(1, dep_delay=60)).publish is None


@pytest.mark.parametrize("seed", range(3))
def test_increments_sum_to_the_hourly_summary(seed: int, year_facts: verify.Expected) -> None:
    bodies = [json.dumps(late).encode() for late in year_facts.late_rows.to_dict("records")]
    random = np.random.default_rng(seed)
    random.shuffle(bodies)
    late = pa.table({"body": bodies})
    ends = [*sorted(random.integers(0, late.num_rows, 10**seed).tolist()), late.num_rows]

    outcomes = [
        summary.handler(late.slice(start, end - start), None)
        for start, end in zip([0, *ends], ends, strict=False)
    ]

    sink = pa.concat_tables([outcome.rows for outcome in outcomes if outcome.rows is not None])
    assert sink.schema.equals(summary.INCREMENT)
    assert verify.compare_summary(year_facts, sink) == []
