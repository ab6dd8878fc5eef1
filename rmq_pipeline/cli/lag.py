"""``rmq lag``: what consumer groups have still to do."""

from typing import Annotated

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, group_names
from rmq_pipeline.cli.output import rows_of, show_rows
from rmq_pipeline.cli.statements import statement


def lag(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", autocompletion=group_names)
    ] = None,
    *,
    by_queue: Annotated[
        bool, typer.Option("--by-queue", help="A row for each message queue.")
    ] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Messages that a consumer group has not settled yet, per topic.

    A group that has never received from a topic, nor subscribed to it, has no row.
    """
    with connected(home, flight) as client:
        if group is not None:
            client.describe_group(group)
        name = "cli_lag_by_queue" if by_queue else "cli_lag"
        rows = rows_of(client.sql(statement(name, consumer_group=group)))
    empty = "No consumer group reads a topic." if group is None else f"{group} reads no topic."
    show_rows(rows, as_json=as_json, empty=empty)
