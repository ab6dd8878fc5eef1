"""The verification finds the known facts, and every kind of wrong row."""

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.examples.flights import crews, dataset, verify
from rmq_pipeline.examples.flights.aircraft_checks import CHECKED
from rmq_pipeline.examples.flights.rotations import ROTATION
from rmq_pipeline.examples.flights.summary import INCREMENT


@pytest.fixture(scope="module")
def week() -> verify.Expected:
    return verify.expected(7)


@pytest.fixture(scope="module")
def sink(week: verify.Expected) -> pa.Table:
    """A sink that is right, in no particular order."""
    frame = week.rotations.assign(queue_id=0, queue_offset=range(len(week.rotations)))
    table = pa.Table.from_pandas(frame[ROTATION.names], schema=ROTATION, preserve_index=False)
    return table.sort_by([("carrier", "descending"), ("flight", "ascending")])


def changed(sink: pa.Table, *, row: int, **values: object) -> pa.Table:
    rows = sink.to_pylist()
    rows[row] |= values
    return pa.Table.from_pylist(rows, schema=sink.schema)


@pytest.mark.parametrize(
    ("days", "published", "dead_letters", "late"),
    [(7, 6_099, 35, 328), (365, 336_776, 8_255, 26_581)],
)
def test_known_facts(days: int, published: int, dead_letters: int, late: int) -> None:
    facts = verify.expected(days)

    assert (facts.published, facts.dead_letters, facts.late) == (published, dead_letters, late)
    assert len(facts.rotations) == published - dead_letters
    assert len(facts.dead_letter_rows) == dead_letters
    assert len(facts.late_rows) == late
    assert facts.late_summary["late_departures"].sum() == late
    assert not facts.rotations.duplicated(["tail", "leg"]).any()
    assert len(facts.checks) == published
    changes = facts.crews_confirmed.assign(state="confirmed"), facts.crews_cancelled
    assert not pd.concat(changes).duplicated(["tail", "scheduled_departure_ms"]).any()


def test_a_leg_by_hand(week: verify.Expected) -> None:
    # In the file: UA1601 to MIA was due out at 9:06, left 6 minutes late, flew 159 minutes and
    # came 7 minutes early; UA1663 to SJU, of the same aircraft, was due out at 11:59.
    second = week.rotations.set_index(["tail", "leg"]).loc[("N38403", 2)]

    assert second["flight"] == "UA1663"
    assert second["previous_dest"] == "MIA"
    assert second["scheduled_departure_ms"] == 1357059540000
    assert second["turnaround_minutes"] == (11 * 60 + 59) - (9 * 60 + 6 + 6 + 159)
    assert second["carried_delay_minutes"] == 0


def test_a_carried_delay_by_hand(week: verify.Expected) -> None:
    # EV4181 was due out at 14:45, left 64 minutes late, flew 234 and came 136 late, when its
    # aircraft should long have left again: EV4321 was due out at 17:24 and left 379 late.
    second = week.rotations.set_index(["tail", "leg"]).loc[("N21197", 2)]

    assert second["turnaround_minutes"] == (17 * 60 + 24) - (14 * 60 + 45 + 64 + 234)
    assert second["carried_delay_minutes"] == 136


def test_a_right_sink_has_no_differences(week: verify.Expected, sink: pa.Table) -> None:
    assert verify.compare(week, sink) == []
    assert verify.order_violations(sink) == []


def test_columns_of_a_partition_are_not_compared(week: verify.Expected, sink: pa.Table) -> None:
    hours = pa.array(["2013-01-01"] * sink.num_rows)

    assert verify.compare(week, sink.append_column("hour", hours)) == []


def test_a_missing_row_is_found(week: verify.Expected, sink: pa.Table) -> None:
    gone = sink.slice(0, 1).to_pylist()[0]

    (line,) = verify.compare(week, sink.slice(1))

    assert line.startswith("row missing: 1, such as")
    assert gone["tail"] in line


def test_a_row_twice_is_found(week: verify.Expected, sink: pa.Table) -> None:
    (line,) = verify.compare(week, pa.concat_tables([sink, sink.slice(5, 1)]))

    assert line.startswith("row twice or more: 1, such as")


def test_a_row_too_many_is_found(week: verify.Expected, sink: pa.Table) -> None:
    extra = changed(sink.slice(0, 1), row=0, leg=1000)

    (line,) = verify.compare(week, pa.concat_tables([sink, extra]))

    assert line.startswith("row that should not be: 1, such as")
    assert "1000" in line


@pytest.mark.parametrize(
    "name", [name for name in ROTATION.names if name not in {"tail", "leg", *verify.PLACE}]
)
def test_a_wrong_value_is_found_in_every_column(
    name: str, week: verify.Expected, sink: pa.Table
) -> None:
    row = pc.index(pc.greater(sink["leg"], 1), True).as_py()
    value = sink[name][row].as_py()
    wrong = "XX" if isinstance(value, str) else value + 1

    for found in (wrong, None):
        (line,) = verify.compare(week, changed(sink, row=row, **{name: found}))
        assert line.startswith(f"wrong {name}: 1, such as")


def test_a_value_where_none_should_be_is_found(week: verify.Expected, sink: pa.Table) -> None:
    row = pc.index(pc.is_null(sink["turnaround_minutes"]), True).as_py()

    (line,) = verify.compare(week, changed(sink, row=row, turnaround_minutes=0))

    assert line.startswith("wrong turnaround_minutes: 1, such as")


def test_an_empty_sink_and_one_without_a_column_are_told_apart(
    week: verify.Expected, sink: pa.Table
) -> None:
    assert verify.compare(week, ROTATION.empty_table())[0].startswith("row missing: 6,064")
    assert verify.compare(week, sink.drop_columns(["leg"])) == ["no column leg"]


def test_legs_out_of_offset_order_are_violations(sink: pa.Table) -> None:
    row = pc.index(pc.equal(sink["leg"], 2), True).as_py()

    early = changed(sink, row=row, queue_offset=-1)
    elsewhere = changed(sink, row=row, queue_id=7)

    assert len(verify.order_violations(early)) == 1
    assert sink["tail"][row].as_py() in verify.order_violations(early)[0]
    assert len(verify.order_violations(elsewhere)) >= 1


def test_a_wrong_summary_is_found(week: verify.Expected) -> None:
    right = pa.Table.from_pandas(week.late_summary, schema=INCREMENT, preserve_index=False)
    in_two = pa.concat_tables(
        [right, changed(right.slice(0, 1), row=0, **dict.fromkeys(INCREMENT.names[2:], 0))]
    )

    assert verify.compare_summary(week, right) == []
    assert verify.compare_summary(week, in_two) == []
    assert verify.compare_summary(week, right.slice(1))[0].startswith("row missing: 1")
    assert len(verify.compare_summary(week, pa.concat_tables([right, right]))) == 2


def test_dead_letters_that_lack_one_or_hold_one_twice_are_found(week: verify.Expected) -> None:
    departures = dataset.departures(7)
    cancelled = pc.match_substring(departures["body"].cast(pa.string()), '"dep_time": null')
    messages = departures.filter(cancelled)

    assert verify.compare_dead_letters(week, messages) == []
    assert verify.compare_dead_letters(week, messages.slice(1))[0].startswith("row missing: 1")
    twice = pa.concat_tables([messages, messages.slice(0, 1)])
    assert verify.compare_dead_letters(week, twice)[0].startswith("row twice or more: 1")
    none = verify.compare_dead_letters(week, messages.slice(0, 0))
    assert none[0].startswith("row missing: 35")


@pytest.fixture(scope="module")
def checks(week: verify.Expected) -> pa.Table:
    """A sink of aircraft checks that is right."""
    frame = week.checks.assign(queue_id=0, queue_offset=range(len(week.checks)))
    return pa.Table.from_pandas(frame[CHECKED.names], schema=CHECKED, preserve_index=False)


def test_aircraft_checks_may_lack_those_of_the_grounded_aircraft_and_no_other(
    week: verify.Expected, checks: pa.Table
) -> None:
    others = checks.filter(pc.not_equal(checks["tail"], "N730MQ"))

    assert verify.compare_checks(week, checks) == []
    assert verify.compare_checks(week, others, grounded="N730MQ") == []
    assert verify.compare_checks(week, others)[0].startswith("row missing: 17")
    (line,) = verify.compare_checks(week, checks, grounded="N730MQ")
    assert line.startswith("row that should not be: 17")
    (line,) = verify.compare_checks(week, others.slice(1), grounded="N730MQ")
    assert line.startswith("row missing: 1")


def test_checks_out_of_offset_order_are_violations(checks: pa.Table) -> None:
    row = pc.index(pc.equal(checks["number"], 2), True).as_py()

    early = changed(checks, row=row, queue_offset=-1)

    assert verify.order_violations(checks, number="number") == []
    (line,) = verify.order_violations(early, number="number")
    assert "number 2 is at offset -1" in line


def test_rows_that_only_one_table_has_are_counted(sink: pa.Table) -> None:
    other = changed(sink, row=0, leg=1_000)

    assert verify.rows_changed(sink, sink.take(list(range(sink.num_rows))[::-1])) == 0
    assert verify.rows_changed(sink, sink.slice(1)) == 1
    assert verify.rows_changed(sink, other) == 2


@pytest.fixture(scope="module")
def noted() -> pa.Table:
    """A ledger of crews that is right."""
    changes = crews.changes(dataset.departures(7))
    ids = pc.binary_join_element_wise(changes["crew"], "1", "/")
    return changes.set_column(0, changes.schema.field(0), ids)


def test_a_wrong_ledger_is_found(week: verify.Expected, noted: pa.Table) -> None:
    cancelled = pc.index(noted["state"], "cancelled").as_py()

    wrong = verify.compare_crews(week, changed(noted, row=cancelled, state="confirmed"))
    abandoned = verify.compare_crews(week, changed(noted, row=cancelled, state="abandoned"))

    assert verify.compare_crews(week, noted) == []
    assert [line.split(",")[0] for line in wrong] == [
        "confirmed: row that should not be: 1",
        "cancelled: row missing: 1",
    ]
    assert [line.split(",")[0] for line in abandoned] == ["cancelled: row missing: 1"]


def test_crew_messages_that_the_ledger_does_not_confirm_are_found(noted: pa.Table) -> None:
    confirmed = crews.halves(noted.filter(pc.equal(noted["state"], "confirmed")))
    cancelled = crews.halves(noted.filter(pc.equal(noted["state"], "cancelled")))

    def found(*messages: pa.Table) -> list[str]:
        lines = verify.compare_crew_messages(noted, pa.concat_tables(messages))
        return [line.split(",")[0] for line in lines]

    assert found(confirmed) == []
    assert found(confirmed.slice(1)) == ["row missing: 1"]
    assert found(confirmed, confirmed.slice(0, 2)) == ["row twice or more: 2"]
    assert found(confirmed, cancelled) == ["row that should not be: 27"]
    body = confirmed["body"][0].as_py().replace(b"N14228", b"N00000")
    other = confirmed.slice(0, 1).set_column(0, confirmed.field(0), pa.array([body]))
    assert found(other, confirmed.slice(1)) == ["wrong tail: 1"]
