"""``rmq sql``: one SELECT over the documented views."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, seconds, stdin
from rmq_pipeline.cli.output import print_json, replacing, rows_of, show_rows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.limits import QUERY_TIMEOUT_S

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["table", "json", "csv", "parquet"]


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One SELECT; - reads stdin.")],
    *,
    format: Annotated[Format, typer.Option(help="Format of the result.")] = "table",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write csv or parquet to this file."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Cancel the query after this time.")
    ] = QUERY_TIMEOUT_S,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Run one SELECT over the broker's views.

    topics, consumer_groups, messages, lite_subscriptions, queue_locks, in_flight, waiting,
    retrying, parked, quarantined_groups, dead_letters, redrives, progress, lag, scheduled, half,
    windows, events, message_trace, window_history, segments, sink_files, sink_replacements; and at
    a past time in_flight_at(t), progress_at(t), lag_at(t), …: docs/sql.md lists their columns.
    condemned is quarantined_groups by its earlier name, for one release.
    """
    form = "json" if as_json else format
    if output is not None and form not in _WRITERS:
        raise RequestError(
            f"--output cannot be used with format {form}.",
            remedy=f"{'Omit --json, and add' if as_json else 'Add'} --format csv or parquet.",
        )
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise RequestError(
            "Parquet cannot be printed on a terminal.", remedy="Give --output, or redirect stdout."
        )
    timeout = seconds(timeout, "--timeout")
    text = stdin().read() if query == "-" else query
    with connected(home, flight) as client:
        answer = client.sql(text, timeout_s=timeout)
    if form in _WRITERS:
        _write(answer, form, output=output)
    elif form == "json":
        print_json(rows_of(answer))
    else:
        show_rows(rows_of(answer), as_json=False, empty="No rows.")


def _write(answer: "pa.Table", form: str, *, output: Path | None) -> None:
    """Write the result to a file or to stdout.

    Raises:
        RequestError: the file cannot be written, or the format cannot represent a value.
    """
    import pyarrow as pa

    writer = _WRITERS[form]
    try:
        if output is None:
            writer(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with replacing(output) as file:
            writer(answer, file)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise RequestError(
            f"The result cannot be written as {form}: {error}.",
            remedy="Cast the column to text.",
        ) from error
    except OSError as error:
        if output is None:
            raise
        raise RequestError(
            f"{output} cannot be written: {error.strerror or error}.",
            remedy="Check the path, its permissions, and the free space of the disk.",
        ) from error


def _write_csv(answer: "pa.Table", file: BinaryIO) -> None:
    from pyarrow import csv

    csv.write_csv(_without_nesting(answer), file)


def _write_parquet(answer: "pa.Table", file: BinaryIO) -> None:
    from rmq_pipeline import checked_parquet

    checked_parquet.write(answer, file)


def _without_nesting(answer: "pa.Table") -> "pa.Table":
    """Convert nested columns to JSON text, because CSV has no lists."""
    import pyarrow as pa

    for index, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            texts = [_json_text(value) for value in answer.column(index).to_pylist()]
            answer = answer.set_column(index, field.name, pa.array(texts, pa.string()))
    return answer


def _json_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


_WRITERS: Final[dict[str, Callable[["pa.Table", BinaryIO], None]]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
}
