"""``rmq offset``: committed offsets of consumer groups."""

from typing import Annotated

import typer

from rmq_pipeline.cli.options import (
    MOMENT,
    AsJson,
    Flight,
    Group,
    Home,
    Topic,
    connected,
    examples,
    group_names,
    parse_ms,
)
from rmq_pipeline.cli.output import rows_of, show_rows
from rmq_pipeline.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Offsets of consumer groups: show, reset, clone.")


@app.callback()
def offset() -> None:
    """Offsets of consumer groups."""


@app.command(epilog=examples("rmq offset show billing orders"))
def show(
    group: Group,
    topic: Topic,
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Show the committed offset of a consumer group in each queue, and its number of resets."""
    with connected(home, flight) as client:
        places = client.committed_offsets(group, topic)
    rows = [
        {"queue_id": queue, "queue_offset": offset, "resets": resets}
        for queue, (offset, resets) in places.items()
        if offset >= 0
    ]
    show_rows(rows, as_json=as_json, empty=f"Group {group} has read nothing of {topic}.")


@app.command(
    epilog=examples(
        "rmq offset reset billing orders --to-earliest",
        "rmq offset reset billing orders --to-time 2030-01-01T09:00:00Z",
        "rmq offset reset billing orders --to-offset 100 --queue 3",
    )
)
def reset(
    group: Group,
    topic: Topic,
    *,
    to_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=f"To the first message stored at or after: {MOMENT}."),
    ] = None,
    to_offset: Annotated[int | None, typer.Option(help="To this offset in every queue.")] = None,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="Past all messages.")] = False,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the first retained message.")
    ] = False,
    queue: Annotated[int | None, typer.Option(help="Only this queue.")] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Move a consumer group to other offsets. Its leases end, and their receipts become invalid."""
    if sum([to_time is not None, to_offset is not None, to_latest, to_earliest]) != 1:
        raise RequestError(
            "The command needs exactly one target.",
            remedy="Give one of --to-time, --to-offset, --to-latest, --to-earliest.",
        )
    with connected(home, flight) as client:
        offsets = client.reset_offset(
            group,
            topic,
            to_offset=to_offset,
            to_time_ms=parse_ms(to_time) if to_time is not None else None,
            to_latest=to_latest,
            to_earliest=to_earliest,
            queue_id=queue,
        )
    show_rows(rows_of(offsets), as_json=as_json, empty="")


@app.command(epilog=examples("rmq offset clone billing billing-two orders"))
def clone(
    from_group: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="Group whose offsets are copied.", autocompletion=group_names
        ),
    ],
    to_group: Annotated[
        str, typer.Argument(metavar="TO", help="Group that moves.", autocompletion=group_names)
    ],
    *,
    topic: Topic,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Move a consumer group to the offsets of another group. Its leases end."""
    with connected(home, flight) as client:
        offsets = client.clone_offsets(from_group, to_group, topic=topic)
    rows = [{"queue_id": queue, "queue_offset": offset} for queue, offset in offsets.items()]
    show_rows(rows, as_json=as_json, empty=f"Group {from_group} has read nothing of {topic}.")
