"""``rmq group``: create, alter, delete, list and show consumer groups."""

from typing import Annotated, get_args

import typer

from rmq_pipeline import limits
from rmq_pipeline.cli.options import AsJson, Flight, Group, Home, connected, examples
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.group import OnFailure, Order

app = typer.Typer(no_args_is_help=True, help="Consumer groups: create, alter, delete, list, show.")

ORDERS = list(get_args(Order))
FAILURES = list(get_args(OnFailure))
COLUMNS = ("name", "order", "max_attempts", "on_failure", "created_at_ms")

ORDER_HELP = f"One of {', '.join(ORDERS)}."
ATTEMPTS_HELP = "Deliveries of a message, the first one counted."
FAILURE_HELP = f"After the last attempt: {', '.join(FAILURES)}."
BACKOFF_HELP = (
    "Delays after the first, second, … failure in ms, joined by commas; the last repeats."
)


@app.command(
    epilog=examples(
        "rmq group create billing",
        "rmq group create billing --order message_group --max-attempts 3 --backoff-ms 1000,5000",
    )
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    order: Annotated[str, typer.Option(help=ORDER_HELP, autocompletion=lambda: ORDERS)] = "none",
    max_attempts: Annotated[int, typer.Option(help=ATTEMPTS_HELP)] = limits.DEFAULT_MAX_ATTEMPTS,
    on_failure: Annotated[
        str, typer.Option(help=FAILURE_HELP, autocompletion=lambda: FAILURES)
    ] = "dead_letter",
    backoff_ms: Annotated[
        str | None,
        typer.Option(help=BACKOFF_HELP, metavar="MS,MS,…", show_default="delay levels 3 to 18"),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Create a consumer group."""
    with connected(home, flight) as client:
        group = client.create_group(
            name,
            order=order,
            max_attempts=max_attempts,
            backoff_ms=_delays(backoff_ms) or limits.BACKOFF_MS,
            on_failure=on_failure,
        )
    show_fields(group, as_json=as_json)


@app.command(epilog=examples("rmq group alter billing --max-attempts 5"))
def alter(
    name: Group,
    *,
    max_attempts: Annotated[int | None, typer.Option(help=ATTEMPTS_HELP)] = None,
    on_failure: Annotated[
        str | None, typer.Option(help=FAILURE_HELP, autocompletion=lambda: FAILURES)
    ] = None,
    backoff_ms: Annotated[str | None, typer.Option(help=BACKOFF_HELP, metavar="MS,MS,…")] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given."""
    with connected(home, flight) as client:
        group = client.alter_group(
            name,
            max_attempts=max_attempts,
            backoff_ms=_delays(backoff_ms),
            on_failure=on_failure,
        )
    show_fields(group, as_json=as_json)


@app.command(epilog=examples("rmq group delete billing"))
def delete(
    name: Group,
    *,
    force: Annotated[bool, typer.Option("--force", help="Even with messages in flight.")] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Delete a consumer group and its progress."""
    with connected(home, flight) as client:
        dropped = client.delete_group(name, force=force)
    if as_json:
        show_fields({"name": name, **dropped}, as_json=True)
    else:
        show_message(f"Consumer group {name} is deleted.")


@app.command("list", epilog=examples("rmq group list", "rmq group list --json"))
def list_(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List consumer groups."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_groups())
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="There are no consumer groups.")


@app.command(epilog=examples("rmq group show billing"))
def show(name: Group, *, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """Show a consumer group's settings."""
    with connected(home, flight) as client:
        group = client.describe_group(name)
    show_fields(group, as_json=as_json)


def _delays(text: str | None) -> tuple[int, ...] | None:
    """Raises: RequestError, when a part is no number."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--backoff-ms {text!r} is not numbers joined by commas.") from None
