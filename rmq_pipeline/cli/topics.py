"""``rmq topic``: create, alter, delete, list and show topics."""

from typing import Annotated, get_args

import typer

from rmq_pipeline import limits
from rmq_pipeline.cli.options import (
    AsJson,
    Flight,
    Home,
    IfNotExists,
    Topic,
    connected,
    examples,
    to_ms,
)
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.topic import PARTITION_TIME, Deduplicate, TopicType

app = typer.Typer(no_args_is_help=True, help="Topics: create, alter, delete, list, show.")

TYPES = list(get_args(TopicType))
DEDUPLICATE = list(get_args(Deduplicate))
COLUMNS = ("name", "type", "queues", "partition_time", "created_at_ms")

WINDOW = "--deduplicate-window"
RETENTION = "--retention"
PARTITION_HELP = (
    "Time of a message for partitions: stored, born, or the name of a property that has ms since "
    "1970."
)
DEDUPLICATE_HELP = (
    "Do not store a message with the id or the key of an earlier one: "
    f"one of {', '.join(DEDUPLICATE)}."
)
WINDOW_HELP = "How long messages are remembered for deduplication."
RETENTION_HELP = "Delete sealed messages older than this; 0: never."
BYTES_HELP = "Delete the oldest segments above this size; 0: never."


@app.command(
    epilog=examples("rmq topic create orders", "rmq topic create orders --type fifo --queues 16")
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    type: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(TYPES)}.", autocompletion=lambda: TYPES),
    ] = "normal",
    queues: Annotated[
        int, typer.Option(help="Number of message queues, the limit of parallel consumers.")
    ] = limits.DEFAULT_QUEUES,
    partition_time: Annotated[str, typer.Option(help=PARTITION_HELP)] = PARTITION_TIME,
    deduplicate: Annotated[
        str, typer.Option(help=DEDUPLICATE_HELP, autocompletion=lambda: DEDUPLICATE)
    ] = "none",
    window_s: Annotated[
        float, typer.Option(WINDOW, metavar="SECONDS", help=WINDOW_HELP)
    ] = limits.DEDUPLICATE_WINDOW_MS / 1000,
    retention_s: Annotated[
        float, typer.Option(RETENTION, metavar="SECONDS", help=RETENTION_HELP)
    ] = 0,
    retention_bytes: Annotated[
        int, typer.Option("--retention-bytes", metavar="BYTES", help=BYTES_HELP)
    ] = 0,
    if_not_exists: IfNotExists = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Create a topic."""
    with connected(home, flight) as client:
        create_topic = client.ensure_topic if if_not_exists else client.create_topic
        topic = create_topic(
            name,
            type=type,
            queues=queues,
            partition_time=partition_time,
            deduplicate=deduplicate,
            deduplicate_window_ms=to_ms(window_s, WINDOW),
            retention_ms=to_ms(retention_s, RETENTION),
            retention_bytes=retention_bytes,
        )
    show_fields(topic, as_json=as_json)


@app.command(
    epilog=examples(
        "rmq topic alter orders --queues 32", "rmq topic alter orders --retention 604800"
    )
)
def alter(
    name: Topic,
    *,
    queues: Annotated[int | None, typer.Option(help="Number of queues; can only grow.")] = None,
    partition_time: Annotated[str | None, typer.Option(help=PARTITION_HELP)] = None,
    deduplicate: Annotated[
        str | None, typer.Option(help=DEDUPLICATE_HELP, autocompletion=lambda: DEDUPLICATE)
    ] = None,
    window_s: Annotated[
        float | None, typer.Option(WINDOW, metavar="SECONDS", help=WINDOW_HELP)
    ] = None,
    retention_s: Annotated[
        float | None, typer.Option(RETENTION, metavar="SECONDS", help=RETENTION_HELP)
    ] = None,
    retention_bytes: Annotated[
        int | None, typer.Option("--retention-bytes", metavar="BYTES", help=BYTES_HELP)
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Change the given settings of a topic; omitted settings stay as they are."""
    with connected(home, flight) as client:
        topic = client.alter_topic(
            name,
            queues=queues,
            partition_time=partition_time,
            deduplicate=deduplicate,
            deduplicate_window_ms=None if window_s is None else to_ms(window_s, WINDOW),
            retention_ms=None if retention_s is None else to_ms(retention_s, RETENTION),
            retention_bytes=retention_bytes,
        )
    show_fields(topic, as_json=as_json)


@app.command(epilog=examples("rmq topic delete orders", "rmq topic delete orders --force"))
def delete(
    name: Topic,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even with messages in flight or scheduled.")
    ] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Delete a topic and all its messages."""
    with connected(home, flight) as client:
        dropped = client.delete_topic(name, force=force)
    if as_json:
        show_fields({"name": name, **dropped}, as_json=True)
    else:
        show_message(f"Deleted topic {name}.")


@app.command("list", epilog=examples("rmq topic list", "rmq topic list --json"))
def list_(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List topics."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_topics())
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="There are no topics.")


@app.command(epilog=examples("rmq topic show orders"))
def show(name: Topic, *, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """Show the settings of a topic and the offsets of its queues."""
    with connected(home, flight) as client:
        topic = client.describe_topic(name)
    if as_json:
        show_fields(topic, as_json=True)
        return
    offsets = topic.pop("offsets")
    topic.pop("growths")
    show_fields(topic, as_json=False)
    show_rows(offsets, as_json=False, empty="")
