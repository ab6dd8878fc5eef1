"""``rmq find`` and ``rmq trace``."""

from typing import Annotated

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


def find(
    topic: Topic,
    *,
    key: Annotated[str | None, typer.Option(help="One of its keys.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="Its message id.")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help=f"Stored at or after: {MOMENT}.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help=f"Stored before: {MOMENT}.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", help="At most this many.")] = 100,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Find messages of a topic by key, by id, or by the time they were stored."""
    if key is None and message_id is None and from_ is None and to is None:
        raise RequestError("Say what to find: --key, --id, or --from and --to.")
    query = statement(
        "cli_find",
        topic=topic,
        key=key,
        message_id=message_id,
        from_ms=parse_ms(from_) if from_ else None,
        to_ms=parse_ms(to) if to else None,
        count=limit,
    )
    with connected(home, flight) as client:
        client.describe_topic(topic)
        rows = rows_of(client.sql(query))
    show_rows(rows, as_json=as_json, columns=FOUND_COLUMNS, empty=f"{topic} has no such message.")


def trace(
    message_id: Annotated[str, typer.Argument(metavar="MESSAGE_ID")],
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """What happened to a message: stored, delivered, failed, settled, by which group and client."""
    with connected(home, flight) as client:
        rows = rows_of(client.sql(statement("cli_trace", message_id=message_id)))
    if not rows:
        raise NotFoundError(f"No message has the id {message_id}.")
    show_rows(rows, as_json=as_json, empty="")
