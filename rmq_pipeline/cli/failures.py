"""``rmq dead-letters`` and ``rmq parked``: messages after their final failure."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_pipeline.cli.options import (
    AsJson,
    Flight,
    Group,
    Home,
    connected,
    examples,
    group_names,
    seconds,
)
from rmq_pipeline.cli.output import (
    print_json,
    progress,
    rows_of,
    show_fields,
    show_message,
    show_rows,
)
from rmq_pipeline.errors import RequestError
from rmq_pipeline.store.statements import select

if TYPE_CHECKING:
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.redriving import Plan, Report

dead_letter_app = typer.Typer(
    no_args_is_help=True, help="Dead letters of consumer groups: list, redrive."
)

DEAD_LETTER_COLUMNS = (
    "message_id",
    "topic",
    "message_group",
    "tag",
    "keys",
    "attempts",
    "reason",
    "signature",
)

Where = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="A condition on the columns of the view dead_letters."),
]
parked_app = typer.Typer(
    no_args_is_help=True, help="Parked messages and message groups: list, unpark."
)

PARKED_COLUMNS = (
    *("consumer_group", "topic", "message_group", "queue_id", "queue_offset"),
    *("state", "since_ms", "waiting", "reason"),
)


@dead_letter_app.callback()
def dead_letters() -> None:
    """Dead letters of consumer groups."""


@dead_letter_app.command(
    "list",
    epilog=examples(
        "rmq dead-letters list billing",
        "rmq dead-letters list billing --where \"tag = 'new' AND attempts > 3\" --json",
    ),
)
def list_dead_letters(
    group: Group,
    *,
    where: Where = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of a consumer group, with the reasons."""
    query = select("cli_dead_letters", consumer_group=group)
    if where is not None:
        from rmq_pipeline.redriving import condition

        query = f"{query}\nAND {condition(where).sql('duckdb', comments=False)}"
    with connected(home, flight) as client:
        client.describe_group(group)
        rows = rows_of(client.sql(query))
    show_rows(
        rows,
        as_json=as_json,
        columns=DEAD_LETTER_COLUMNS,
        empty=f"{group} has no such dead letters.",
    )


@dead_letter_app.command(
    epilog=examples(
        "rmq dead-letters redrive billing",
        "rmq dead-letters redrive billing --where \"signature = '3f0c8a1b2d4e'\" --rate 50",
        "rmq dead-letters redrive billing --filter \"region = 'east' AND price > 9\" --limit 100",
        "rmq sql \"SELECT * FROM redrives WHERE redrive_id = 'redrive-…'\"",
    )
)
def redrive(
    group: Group,
    *,
    where: Where = None,
    filter_: Annotated[
        str, typer.Option("--filter", metavar="EXPR", help="A SQL92 filter, as in `rmq receive`.")
    ] = "",
    rate: Annotated[
        float, typer.Option(metavar="N", help="Messages per second; 0 for no limit.")
    ] = 0.0,
    max_failed_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Stop if a larger share of them fails again.")
    ] = 0.2,
    limit: Annotated[int, typer.Option(metavar="N", help="At most this many; 0 for all.")] = 0,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Stop waiting when no message was settled this long."),
    ] = 60.0,
    redrive_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Continue an earlier redrive.")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Redeliver dead letters to their consumer group, each once, without copying them.

    A message group receives them in order, before its later messages. The command waits until
    every message is settled. Exit code 1: too many failed again.
    """
    from rmq_pipeline.redriving import Plan, manifest, new_id

    if not math.isfinite(rate):
        raise RequestError(
            f"--rate is a number of messages per second, not {rate}.",
            remedy="Give a number; 0 means no limit.",
        )
    plan = Plan(
        group=group,
        where=where or "",
        filter=filter_,
        rate_per_s=rate,
        max_failed_share=max_failed_share,
        limit=limit,
        patience_s=seconds(wait, "--wait"),
    )
    with connected(home, flight) as client:
        report = _redrive(client, plan, redrive_id=redrive_id or new_id())
        if as_json:
            messages = rows_of(manifest(client, report.redrive_id))
            print_json({**report.facts(), "messages": messages})
        else:
            show_fields(report.facts(), as_json=False)
    if report.status == "stopped":
        raise typer.Exit(1)


def _redrive(client: "Client", plan: "Plan", *, redrive_id: str) -> "Report":
    from rmq_pipeline.redriving import redrive

    with progress(unit="decided") as bars:
        task = bars.add_task(redrive_id, total=None, done=0)

        def show(report: "Report") -> None:
            bars.update(task, total=report.chosen, completed=report.decided, done=report.decided)

        return redrive(client, plan, redrive_id=redrive_id, on_progress=show)


@parked_app.command("list", epilog=examples("rmq parked list", "rmq parked list billing --json"))
def list_parked(
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
        rows = rows_of(client.sql(select("cli_parked", consumer_group=group)))
    show_rows(rows, as_json=as_json, columns=PARKED_COLUMNS, empty="Nothing is parked.")


@parked_app.command(
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
