"""``rmq find`` and ``rmq trace``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rmq_pipeline.cli.moments import parse_ms
from rmq_pipeline.cli.options import MOMENT, AsJson, Flight, Home, Topic, connected
from rmq_pipeline.cli.output import rows_of, show_rows
from rmq_pipeline.cli.statements import statement
from rmq_pipeline.errors import NotFoundError, RequestError

FOUND_COLUMNS = (
    "queue_id",
    "queue_offset",
    "message_id",
    "message_group",
    "tag",
    "keys",
    "stored_at_ms",
)


class MessageNotFoundError(NotFoundError):
    """No message with this id is in the broker."""

    remedy = "Check the id, and that this broker still has the message."


def find(
    topic: Topic,
    *,
    key: Annotated[str | None, typer.Option(help="One of the message's keys.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="The message id.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help=f"Stored at or after: {MOMENT}.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help=f"Stored before: {MOMENT}.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Maximum messages.")] = 100,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Find messages of a topic by key, by id, or by the time they were stored."""
    if key is None and message_id is None and from_ is None and to is None:
        raise RequestError(
            "The search has no condition.", remedy="Give --key, --id, --from or --to."
        )
    with connected(home, flight) as client:
        found = client.find(
            topic,
            key=key,
            message_id=message_id,
            from_ms=parse_ms(from_) if from_ else None,
            to_ms=parse_ms(to) if to else None,
            limit=limit,
        )
    rows = [{"topic": topic, **row} for row in rows_of(found.drop_columns("body"))]
    show_rows(rows, as_json=as_json, columns=FOUND_COLUMNS, empty=f"{topic} has no such message.")


def trace(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID")],
    *,
    sink: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also show the message's rows in this sink."),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Show the history of a message: stored, delivered and by which run, failed and why, settled.

    The last rows are the sink files that may contain its results.
    """
    with connected(home, flight) as client:
        rows = rows_of(client.sql(statement("cli_trace", message_id=message_id)))
    if not rows:
        raise MessageNotFoundError(f"No message has the id {message_id}.")
    if sink is not None:
        rows += _rows_in(sink, rows)
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    show_rows(rows, as_json=as_json, columns=told, empty="")


def _rows_in(sink: Path, stations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history row for each sink row of the message, from the sink's current files."""
    from rmq_pipeline.lake.rows import rows_of_message

    places = {(s["queue_id"], s["queue_offset"]): s for s in stations if s["what"] == "sink_file"}
    found = []
    for (queue_id, queue_offset), station in places.items():
        rows = rows_of_message(sink, queue_id=queue_id, queue_offset=queue_offset)
        for row in rows.to_pylist() if rows is not None else ():
            told = json.dumps(row, default=repr)
            found.append({**station, "what": "sink_row", "detail": told})
    return found
