"""The departures as they are sent."""

import json

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.examples.flights import dataset


@pytest.fixture(scope="module")
def year() -> pa.Table:
    return dataset.departures()


@pytest.fixture(scope="module")
def bodies(year: pa.Table) -> list[dict[str, object]]:
    return [json.loads(body) for body in year["body"].to_pylist()]


def test_year_and_week_have_the_known_numbers_of_departures(year: pa.Table) -> None:
    assert year.num_rows == 336_776
    assert dataset.departures(7).num_rows == 6_099


def test_table_is_what_a_topic_is_sent(year: pa.Table) -> None:
    assert year.schema.equals(dataset.DEPARTURE)
    assert [name for name in year.column_names if year[name].null_count] == []


def test_first_departure_has_every_field_of_the_file(year: pa.Table) -> None:
    first = year.slice(0, 1).to_pylist()[0]

    assert json.loads(first["body"]) == {
        "year": 2013,
        "month": 1,
        "day": 1,
        "dep_time": 517,
        "sched_dep_time": 515,
        "dep_delay": 2,
        "arr_time": 830,
        "sched_arr_time": 819,
        "arr_delay": 11,
        "carrier": "UA",
        "flight": 1545,
        "tailnum": "N14228",
        "origin": "EWR",
        "dest": "IAH",
        "air_time": 227,
        "distance": 1400,
        "hour": 5,
        "minute": 15,
        "time_hour": "2013-01-01T10:00:00Z",
    }
    assert first["tag"] == "UA"
    assert first["keys"] == ["UA1545"]
    assert first["message_group"] == "N14228"
    assert first["born_at_ms"] == 1357035300000  # 05:15 in New York
    assert first["properties"] == [("origin", "EWR"), ("dest", "IAH")]


def test_columns_say_what_the_body_says(year: pa.Table, bodies: list[dict[str, object]]) -> None:
    flights = [f"{body['carrier']}{body['flight']}" for body in bodies]

    assert year["tag"].to_pylist() == [body["carrier"] for body in bodies]
    assert year["keys"].to_pylist() == [[flight] for flight in flights]
    assert year["message_group"].to_pylist() == [
        body["tailnum"] or flight for body, flight in zip(bodies, flights, strict=True)
    ]
    assert year["properties"].to_pylist() == [
        [("origin", body["origin"]), ("dest", body["dest"])] for body in bodies
    ]


def test_departures_are_in_scheduled_order(year: pa.Table) -> None:
    born = year["born_at_ms"].to_numpy()

    assert (born[1:] >= born[:-1]).all()


def test_of_a_tie_the_one_that_left_first_is_sent_first(
    year: pa.Table, bodies: list[dict[str, object]]
) -> None:
    last: dict[tuple[str, int], float] = {}
    ties = 0
    for group, born, body in zip(
        year["message_group"].to_pylist(), year["born_at_ms"].to_pylist(), bodies, strict=True
    ):
        delay = body["dep_delay"]
        left = float("inf") if delay is None else float(str(delay))
        ties += (group, born) in last
        assert last.get((group, born), float("-inf")) <= left
        last[group, born] = left

    assert ties == 31


def test_days_are_a_prefix_of_the_year(year: pa.Table) -> None:
    week = dataset.departures(7)

    assert week.equals(year.slice(0, week.num_rows))


def test_a_year_has_at_most_365_days() -> None:
    for days in (0, 366):
        with pytest.raises(ValueError, match="1 to 365"):
            dataset.departures(days)


def test_groups_and_keys_are_within_the_limits_of_names(year: pa.Table) -> None:
    assert pc.max(pc.binary_length(year["message_group"])).as_py() <= 63
    assert pc.min(pc.binary_length(year["message_group"])).as_py() >= 1
