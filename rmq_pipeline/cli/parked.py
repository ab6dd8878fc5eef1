"""``rmq parked``: messages and message groups parked after a final failure."""

from typing import Annotated, Any

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Group, Home, connected, examples, group_names
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.cli.sql import statement
from rmq_pipeline.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Parked messages and message groups: list, unpark.")

COLUMNS = (
    *("consumer_group", "topic", "message_group", "queue_id", "queue_offset"),
    *("state", "since_ms", "waiting", "reason"),
)


@app.command("list", epilog=examples("rmq parked list", "rmq parked list billing --json"))
def list_(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", autocompletion=group_names)
    ] = None,
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """List parked messages, with the number of messages waiting behind, and quarantined groups."""
    with connected(home, flight) as client:
        if group is not None:
            client.describe_group(group)
        rows = rows_of(client.sql(statement("cli_parked", consumer_group=group)))
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="Nothing is parked.")


@app.command(
    epilog=examples(
        "rmq parked unpark billing --message-group customer-7",
        "rmq parked unpark billing --topic orders --all --skip",
    )
)
def unpark(
    group: Group,
    *,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Only messages of this topic.")
    ] = None,
    message_group: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this message group; repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All groups, and messages without a message group.")
    ] = False,
    skip: Annotated[
        bool,
        typer.Option("--skip", help="Dead-letter the failed messages and continue behind them."),
    ] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Deliver parked messages again, from their first attempt, then the messages behind them."""
    import pyarrow as pa

    if everything == bool(message_group):
        raise RequestError(
            "The command needs either --message-group or --all.",
            remedy="Give the message groups to unpark, or --all.",
        )
    chosen: Any = None
    if message_group:
        chosen = pa.table({"message_group": pa.array(message_group, pa.string())})
    with connected(home, flight) as client:
        done = client.unpark(group, topic=topic, message_groups=chosen, skip=skip)
    if as_json:
        show_fields(done, as_json=True)
        return
    show_message(
        f"{done['skipped'] if skip else done['unparked']} messages are"
        f" {'dead-lettered' if skip else 'redelivered'};"
        f" the quarantine of {done['lifted']} message groups is lifted."
    )
