"""Assembly of the command ``rmq``, and the reporting of errors."""

import codecs
import inspect
import itertools
import sys
from typing import Annotated

import typer

from rmq_pipeline import __version__, extras
from rmq_pipeline.cli import (
    access,
    backup,
    broker,
    failures,
    groups,
    messages,
    reading,
    sinks,
    sql,
    top,
    topics,
    up,
)
from rmq_pipeline.cli.options import examples, open_closed
from rmq_pipeline.cli.output import show_error
from rmq_pipeline.errors import RequestError, RocketMQError

app = typer.Typer(
    name="rmq",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A message broker with RocketMQ's semantics, for teams that run Dagster and Spark.",
    epilog=examples(
        "rmq up",
        "rmq topic create orders --type fifo",
        "rmq group create billing --order message_group",
        "rmq send orders --body hello --message-group customer-7",
        "rmq receive orders billing --ack",
        "rmq lag billing",
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rmq_pipeline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options before a command."""


app.command(epilog=examples("rmq init shop", "rmq init shop --directory ~/projects"))(up.init)
app.command(epilog=examples("rmq up", "rmq up --port 3001", "rmq up --settings rmq.toml"))(up.up)
app.command(
    epilog=examples(
        "rmq ui",
        "rmq ui --flight grpc+tls://rmq.example.com:8082 --dagster https://dagster.example.com",
    )
)(up.ui)
app.command(
    epilog=examples(
        "rmq broker",
        "rmq broker --home /srv/rmq --flight 127.0.0.1:0",
        "rmq broker --flight 0.0.0.0:8082 --grpc-tls 0.0.0.0:8443 --tls self-made",
        "rmq broker --set log_file_bytes=67108864 --set reserve_bytes=67108864",
        "rmq broker --set delay_levels_ms=1000,10000,60000",
    )
)(broker.broker)
app.command(epilog=examples("rmq stop", "rmq stop --home /srv/rmq"))(broker.stop)
app.command(epilog=examples("rmq status", "rmq status --json | jq -r .flight"))(broker.status)
app.command(epilog=examples("rmq promote", "rmq promote --home /srv/standby --force"))(
    broker.promote
)
app.command(epilog=examples("rmq metrics", "rmq metrics | grep lag"))(broker.metrics)
app.add_typer(topics.app, name="topic")
app.add_typer(groups.group_app, name="group")
app.add_typer(access.user_app, name="user")
app.add_typer(access.acl_app, name="acl")
app.command(
    epilog=examples(
        "rmq send orders --body hello --tag new --key order-17",
        "rmq send orders --file orders.ndjson",
        "generate | rmq send orders --file -",
        "rmq send reminders --body 'call back' --deliver-at 2030-01-01T09:00:00Z",
    )
)(messages.send)
app.command(
    epilog=examples(
        "rmq receive orders billing",
        "rmq receive orders billing -n 100 --ack --json",
        "rmq receive orders billing --filter 'new || paid' --wait 10",
        "rmq receive orders billing --filter \"region IN ('e', 'w')\" --filter-type sql92",
    )
)(messages.receive)
app.command(
    epilog=examples(
        "rmq ack RECEIPT",
        "rmq ack $(rmq receive orders billing --json | jq -r '.[].receipt_handle')",
    )
)(messages.ack)
app.command(
    epilog=examples("rmq tail orders", "rmq tail orders -n 0 -f", "rmq tail orders -f --json")
)(reading.tail)
app.command(
    epilog=examples(
        "rmq peek billing orders", "rmq peek billing orders -n 100 --json | jq -r '.[].message_id'"
    )
)(reading.peek)
app.command(epilog=examples("rmq recall reminders 5F0C6A…"))(messages.recall)
app.command(epilog=examples("rmq lag", "rmq lag billing --by-queue"))(groups.lag)
app.command(
    epilog=examples(
        "rmq find orders --key order-17",
        "rmq find orders --from 2030-01-01T09:00:00Z --to 2030-01-01T10:00:00Z --json",
    )
)(messages.find)
app.command(
    epilog=examples("rmq top", "rmq top --once --json", "rmq top --at 2030-01-01T09:00:00Z")
)(top.top)
app.command(epilog=examples("rmq trace 01000C29A3B5D11F2E05A1B2C300000001"))(messages.trace)
app.add_typer(failures.dead_letter_app, name="dead-letters")
app.add_typer(failures.parked_app, name="parked")
app.add_typer(groups.offset_app, name="offset")
app.add_typer(sinks.app, name="sink")
app.command(
    epilog=examples(
        'rmq sql "SELECT topic, count(*) FROM messages GROUP BY topic"',
        'rmq sql "SELECT * FROM in_flight" --format csv',
        "rmq sql - --format parquet --output lag.parquet < lag.sql",
    )
)(sql.sql)
app.command(
    epilog=examples(
        "rmq stop && rmq verify",
        "rmq verify --home /backup/rmq --json | jq -r '.damaged[].file'",
        "rmq verify --sink /srv/sinks/flights",
    )
)(broker.verify)
app.command(
    epilog=examples(
        "rmq backup /backup/rmq",
        "rmq backup s3://bucket/backups/rmq --home /srv/rmq --keep 14d --json",
        "rmq backup /backup/rmq --list",
    )
)(backup.backup)
app.command(
    epilog=examples(
        "rmq restore /backup/rmq /srv/rmq2",
        "rmq restore /backup/rmq /srv/rmq2 --to-time 2030-01-31T09:00:00Z",
    )
)(backup.restore)
app.command(
    epilog=examples(
        "rmq fork /srv/rmq /tmp/rmq-dev",
        "rmq fork /srv/rmq /tmp/rmq-dev --at 2030-01-31T09:00:00Z",
    )
)(backup.fork)
app.command(epilog=examples("rmq repair /srv/rmq --dry-run", "rmq repair /srv/rmq --yes"))(
    backup.repair
)
app.command(epilog=examples("rmq demo", "rmq demo --days 365 --keep"))(up.demo)


def _unwrap_help(commands: typer.Typer) -> None:
    """Let the terminal wrap the paragraphs of help: Typer keeps the line breaks of docstrings."""
    for command in commands.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(each.replace("\n", " ") for each in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _unwrap_help(group.typer_instance)


def run() -> None:
    """Run the command line of this process, and exit.

    An error is one line on stderr (a JSON object with --json), and exit code 1. A malformed
    command line has exit code 2.
    """
    open_closed()
    _unwrap_help(app)
    try:
        app()
    except RocketMQError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        lacking = extras.named(error)
        if not isinstance(lacking, extras.MissingExtraError):
            raise
        _fail(lacking)
    except OSError as error:
        # For example a folder that cannot be created: the text of the system says why.
        what = f": {error.filename}" if error.filename is not None else ""
        _fail(RequestError(f"{error.strerror or error}{what}"))
    except UnicodeError as error:
        if isinstance(error, UnicodeEncodeError) and codecs.lookup(error.encoding).name != "utf-8":
            what = f"The output cannot be written in {error.encoding}."
            _fail(RequestError(what, remedy="Set PYTHONIOENCODING=utf-8."))
        # An argument or stdin is not UTF-8.
        _fail(
            RequestError(
                f"An argument or the input is not UTF-8: {error}.", remedy="Encode it in UTF-8."
            )
        )


def _fail(error: RocketMQError) -> None:
    show_error(error, as_json=_wants_json(sys.argv[1:]))
    sys.exit(1)


def _wants_json(arguments: list[str]) -> bool:
    pairs = itertools.pairwise(arguments)
    return "--json" in arguments or "--format=json" in arguments or ("--format", "json") in pairs
