"""What the consumers must have made of the departures, computed anew from the CSV with pandas.

Nothing here comes from the code it checks but names of columns: instants are made from local
time and the time zone, legs and the leg before from a groupby over the whole year, so neither
messages, batches, state nor retries can have left a trace in it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.examples.flights import crews
from rmq_pipeline.examples.flights.dataset import DAYS_OF_YEAR, YEAR, csv_path
from rmq_pipeline.examples.flights.rotations import LATE_FIELDS, ROTATION
from rmq_pipeline.examples.flights.summary import INCREMENT

LATE_MINUTES: Final = 60
EXAMPLES: Final = 5

#: Columns the broker decides, in no way told by the CSV; order_violations looks at them.
PLACE: Final = ("queue_id", "queue_offset")
_MINUTE: Final = pd.Timedelta(minutes=1)
_CANCELLED: Final = pa.schema(
    [("message_group", pa.string()), ("flight", pa.string()), ("born_at_ms", pa.int64())]
)

#: pandas types that hold nulls without turning integers into floats.
_NULLABLE: Final = {
    pa.int32(): pd.Int64Dtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.string(): pd.StringDtype("python"),
}


@dataclass(frozen=True)
class Expected:
    """The facts of the first days of 2013."""

    #: Departures: messages of topic ``departures``.
    published: int
    #: Cancelled ones, without a departure time.
    dead_letters: int
    #: Legs more than an hour late: messages of topic ``late_aircraft``.
    late: int
    #: A row a leg, ROTATION's columns but queue_id and queue_offset.
    rotations: pd.DataFrame
    #: A row a late leg, LATE_FIELDS.
    late_rows: pd.DataFrame
    #: A row a cancelled departure: message_group, flight, born_at_ms.
    dead_letter_rows: pd.DataFrame
    #: A row an hour and carrier, INCREMENT's columns.
    late_summary: pd.DataFrame
    #: A row a departure, CHECKED's columns but queue_id and queue_offset.
    checks: pd.DataFrame
    #: A row a change of crew: tail, flight, scheduled_departure_ms.
    crews_confirmed: pd.DataFrame
    crews_cancelled: pd.DataFrame


def expected(days: int = DAYS_OF_YEAR) -> Expected:
    """The facts of the first days, 1 to 365, of 2013."""
    flights = _flights(days)
    rotations = _rotations(flights[flights["dep_time"].notna()])
    cancelled = flights[flights["dep_time"].isna()]
    late = rotations[rotations["dep_delay_minutes"] > LATE_MINUTES]
    first = flights[~flights.duplicated(["tail", "month", "day"])]
    return Expected(
        published=len(flights),
        dead_letters=len(cancelled),
        late=len(late),
        rotations=rotations,
        late_rows=late[list(LATE_FIELDS)].reset_index(drop=True),
        dead_letter_rows=_typed(
            {
                "message_group": cancelled["tail"],
                "flight": cancelled["code"],
                "born_at_ms": _ms(cancelled["scheduled"]),
            }
        ),
        late_summary=_summary(late),
        checks=_typed(
            {
                "tail": flights["tail"],
                "number": flights.groupby("tail").cumcount() + 1,
                "flight": flights["code"],
                "born_at_ms": _ms(flights["scheduled"]),
            }
        ),
        crews_confirmed=_crews(first[first["dep_time"].notna()]),
        crews_cancelled=_crews(first[first["dep_time"].isna()]),
    )


def _flights(days: int) -> pd.DataFrame:
    flights = pd.read_csv(csv_path())
    local = pd.to_datetime(flights[["year", "month", "day", "hour", "minute"]])
    flights["scheduled"] = local.dt.tz_localize("America/New_York").dt.tz_convert("UTC")
    flights["code"] = flights["carrier"] + flights["flight"].astype(str)
    flights["tail"] = flights["tailnum"].fillna(flights["code"])
    end = pd.Timestamp(date(YEAR, 1, 1) + timedelta(days=days))
    return flights[local < end].sort_values("scheduled", kind="stable")


def _rotations(legs: pd.DataFrame) -> pd.DataFrame:
    actual = legs["scheduled"] + legs["dep_delay"] * _MINUTE
    arrival = actual + legs["air_time"] * _MINUTE
    tail = legs["tail"]
    turnaround = (legs["scheduled"] - arrival.groupby(tail).shift()) / _MINUTE
    brought = legs["arr_delay"].groupby(tail).shift().where(turnaround <= 24 * 60)
    carried = np.minimum(brought, legs["dep_delay"]).clip(lower=0).fillna(0)
    return _typed(
        {
            "tail": tail,
            "leg": legs.groupby("tail").cumcount() + 1,
            "carrier": legs["carrier"],
            "flight": legs["code"],
            "origin": legs["origin"],
            "dest": legs["dest"],
            "previous_dest": legs["dest"].groupby(tail).shift(),
            "scheduled_departure_ms": _ms(legs["scheduled"]),
            "actual_departure_ms": _ms(actual),
            "dep_delay_minutes": legs["dep_delay"],
            "arr_delay_minutes": legs["arr_delay"],
            "turnaround_minutes": turnaround,
            "carried_delay_minutes": carried,
            "born_at_ms": _ms(legs["scheduled"]),
        }
    )


def _crews(departures: pd.DataFrame) -> pd.DataFrame:
    return _typed(
        {
            "tail": departures["tail"],
            "flight": departures["code"],
            "scheduled_departure_ms": _ms(departures["scheduled"]),
        }
    )


def _summary(late: pd.DataFrame) -> pd.DataFrame:
    hour = pd.to_datetime(late["scheduled_departure_ms"].astype("int64"), unit="ms").dt.floor("h")
    delays = late["dep_delay_minutes"].groupby([_ms(hour), late["carrier"]])
    summary = delays.agg(["count", "sum"]).reset_index()
    return _typed(dict(zip(INCREMENT.names, (summary[name] for name in summary), strict=True)))


def _ms(times: pd.Series) -> pd.Series:
    epoch = pd.Timestamp(0, tz=times.dt.tz)
    return (times - epoch) // pd.Timedelta(milliseconds=1)


def _typed(columns: dict[str, pd.Series]) -> pd.DataFrame:
    frame = pd.DataFrame(columns).reset_index(drop=True)
    numbers = frame.select_dtypes("number").columns
    types = {name: "Int64" if name in numbers else "string[python]" for name in frame}
    return frame.astype(types)


def compare(expected: Expected, sink: pa.Table) -> list[str]:
    """What is wrong with the sink of ``aircraft_rotations``; nothing, if it is equal row for row.

    Args:
        sink: all of it, in any order, at least ROTATION's columns.

    Returns:
        A line for each kind of difference, with a count and the first examples.
    """
    return _differences(expected.rotations, sink, key=("tail", "leg"))


def compare_summary(expected: Expected, sink: pa.Table) -> list[str]:
    """What is wrong with the sink of ``late_summary``, once its increments are summed."""
    if missing := _missing(INCREMENT.names, sink):
        return missing
    keys = ["flight_hour_ms", "carrier"]
    counted = [(name, "sum") for name in INCREMENT.names if name not in keys]
    sums = sink.group_by(keys).aggregate(counted)
    sums = sums.rename_columns([name.removesuffix("_sum") for name in sums.column_names])
    return _differences(expected.late_summary, sums, key=keys)


def compare_dead_letters(expected: Expected, messages: pa.Table) -> list[str]:
    """What is wrong with the messages of the dead letter topic; column body will do."""
    cancelled = [
        {
            "message_group": body["tailnum"] or f"{body['carrier']}{body['flight']}",
            "flight": f"{body['carrier']}{body['flight']}",
            "born_at_ms": pd.Timestamp(body["time_hour"]).value // 10**6 + body["minute"] * 60_000,
        }
        for body in map(json.loads, messages["body"].to_pylist())
    ]
    found = pa.Table.from_pylist(cancelled, schema=_CANCELLED)
    return _differences(expected.dead_letter_rows, found, key=_CANCELLED.names)


def compare_late(expected: Expected, messages: pa.Table) -> list[str]:
    """What is wrong with the messages of topic ``late_aircraft``; column body will do."""
    bodies = [json.loads(body) for body in messages["body"].to_pylist()]
    types = pa.schema([ROTATION.field(name) for name in LATE_FIELDS])
    return _differences(
        expected.late_rows, pa.Table.from_pylist(bodies, schema=types), key=("tail", "leg")
    )


def compare_checks(expected: Expected, sink: pa.Table, *, grounded: str = "") -> list[str]:
    """What is wrong with the sink of ``aircraft_checks`` while an aircraft is grounded, or none."""
    checks = expected.checks
    return _differences(checks[checks["tail"] != grounded], sink, key=("tail", "number"))


def rows_changed(before: pa.Table, after: pa.Table) -> int:
    """Rows that only one of two tables has."""
    both = pd.concat([before.to_pandas(), after.to_pandas()])
    return len(both.drop_duplicates(keep=False))


def compare_crews(expected: Expected, noted: pa.Table) -> list[str]:
    """What is wrong with the ledger's changes of crews; those that were abandoned do not count."""
    key = ("tail", "scheduled_departure_ms")
    wanted = {"confirmed": expected.crews_confirmed, "cancelled": expected.crews_cancelled}
    return [
        f"{state}: {line}"
        for state, want in wanted.items()
        for line in _differences(want, noted.filter(pc.equal(noted["state"], state)), key=key)
    ]


def compare_crew_messages(noted: pa.Table, messages: pa.Table) -> list[str]:
    """What is wrong with the messages of topic ``crew_changes``: the ledger's confirmed changes.

    Args:
        noted: all that the ledger has.
        messages: column body will do.
    """
    fields = crews.FIELDS
    want = noted.filter(pc.equal(noted["state"], "confirmed")).select(fields)
    bodies = [json.loads(body) for body in messages["body"].to_pylist()]
    got = pa.Table.from_pylist(bodies, schema=want.schema)
    return _differences(want.to_pandas(types_mapper=_NULLABLE.get), got, key=("change_id",))


def order_violations(sink: pa.Table, *, number: str = "leg") -> list[str]:
    """Legs of the sink that an aircraft flew out of order, each in a line.

    In order means: an aircraft's legs come from one queue, each at a later offset than the leg
    before it.

    Args:
        sink: at least tail, number, queue_id and queue_offset.
        number: the column that counts an aircraft's rows.
    """
    if missing := _missing(("tail", number, *PLACE), sink):
        return missing
    legs = sink.select(["tail", number, *PLACE]).rename_columns(["tail", "leg", *PLACE])
    legs = legs.to_pandas().sort_values(["tail", "leg"])
    before = legs.shift()
    wrong = (legs["tail"] == before["tail"]) & (
        (legs["queue_id"] != before["queue_id"]) | (legs["queue_offset"] <= before["queue_offset"])
    )
    return [
        f"{row.tail}: {number} {row.leg} is at offset {row.queue_offset} of queue {row.queue_id}, "
        f"not behind the one before it"
        for row in legs[wrong].itertuples()
    ]


def _missing(names: Sequence[str], table: pa.Table) -> list[str]:
    return [f"no column {name}" for name in names if name not in table.column_names]


def _differences(want: pd.DataFrame, table: pa.Table, *, key: Sequence[str]) -> list[str]:
    names = list(want.columns)
    if missing := _missing(names, table):
        return missing
    got = table.select(names).combine_chunks().to_pandas(types_mapper=_NULLABLE.get)
    want, got = want.set_index(list(key)), got.set_index(list(key))
    lines = _lines("row twice or more", got.index[got.index.duplicated()])
    got = got[~got.index.duplicated()]
    lines += _lines("row missing", want.index.difference(got.index))
    lines += _lines("row that should not be", got.index.difference(want.index))
    both = want.index.intersection(got.index)
    return lines + _cells(want.loc[both], got.loc[both])


def _cells(want: pd.DataFrame, got: pd.DataFrame) -> list[str]:
    lines: list[str] = []
    for name in want.columns:
        same = (want[name] == got[name]).fillna(False) | (want[name].isna() & got[name].isna())
        pairs = zip(want[name][~same], got[name][~same], strict=True)
        lines += _lines(
            f"wrong {name}",
            [
                f"{place} is {found}, not {right}"
                for place, (right, found) in zip(want.index[~same], pairs, strict=True)
            ],
        )
    return lines


def _lines(what: str, places: Sequence[object]) -> list[str]:
    if len(places) == 0:
        return []
    examples = "; ".join(str(place) for place in places[:EXAMPLES])
    return [f"{what}: {len(places):,}, such as {examples}"]
