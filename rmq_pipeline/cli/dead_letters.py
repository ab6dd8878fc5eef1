"""``rmq dead-letters``: messages that a consumer group has given up."""

from typing import Annotated

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Group, Home, connected, examples
from rmq_pipeline.cli.output import rows_of, show_rows
from rmq_pipeline.cli.statements import statement

app = typer.Typer(no_args_is_help=True, help="Dead letters of consumer groups: list.")

COLUMNS = ("message_id", "topic", "message_group", "tag", "keys", "attempts", "reason")


@app.callback()
def dead_letters() -> None:
    """Dead letters of consumer groups."""


@app.command(
    "list",
    epilog=examples(
        "rmq dead-letters list billing",
        "rmq dead-letters list billing --where \"tag = 'new' AND attempts > 3\" --json",
    ),
)
def list_(
    group: Group,
    *,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="A condition on the columns of the view dead_letters."),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """List the messages that failed for good, and why."""
    query = statement("cli_dead_letters", consumer_group=group)
    if where is not None:
        # On a line of its own: a comment at its end must not swallow the bracket.
        query = f"{query}\nAND ({where}\n)"
    with connected(home, flight) as client:
        client.describe_group(group)
        rows = rows_of(client.sql(query))
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty=f"{group} has no such dead letters.")
