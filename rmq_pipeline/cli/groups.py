"""``rmq group``: create, alter, delete, list and show consumer groups."""

from typing import Annotated, get_args

import typer

from rmq_pipeline import limits
from rmq_pipeline.cli.lag import by_topic
from rmq_pipeline.cli.members import show_group
from rmq_pipeline.cli.options import AsJson, Flight, Group, Home, connected, examples
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.group import OnFailure, Order

app = typer.Typer(no_args_is_help=True, help="Consumer groups: create, alter, delete, list, show.")

ORDERS = list(get_args(Order))
FAILURES = list(get_args(OnFailure))
COLUMNS = ("name", "order", "max_attempts", "on_failure", "created_at_ms")

ORDER_HELP = f"One of {', '.join(ORDERS)}."
ATTEMPTS_HELP = "Maximum deliveries of a message, including the first."
REMEMBERED_HELP = "How long the broker remembers the idempotency keys of acks."
RATE_HELP = "Maximum messages per second for the group; 0: no limit."
FAILURE_HELP = f"After the last attempt: {', '.join(FAILURES)}."
BACKOFF_HELP = (
    "Delays in ms after the first, second, … failure, joined by commas; the last one repeats."
)
POLICIES = ["customized", "exponential"]
POLICY_HELP = "customized: the delays of --backoff-ms. exponential: delays that grow."
INITIAL_HELP = "First delay of an exponential backoff."
MAX_HELP = "Longest delay of an exponential backoff."
MULTIPLIER_HELP = "Factor between two delays of an exponential backoff."
Policy = Annotated[str | None, typer.Option(help=POLICY_HELP, autocompletion=lambda: POLICIES)]
Initial = Annotated[
    int | None,
    typer.Option(help=INITIAL_HELP, metavar="MS", show_default=str(limits.BACKOFF_INITIAL_MS)),
]
Longest = Annotated[
    int | None,
    typer.Option(help=MAX_HELP, metavar="MS", show_default=str(limits.BACKOFF_MAX_MS)),
]
Multiplier = Annotated[
    float | None,
    typer.Option(help=MULTIPLIER_HELP, show_default=str(limits.BACKOFF_MULTIPLIER)),
]


@app.command(
    epilog=examples(
        "rmq group create billing",
        "rmq group create billing --order message_group --max-attempts 3 --backoff-ms 1000,5000",
        "rmq group create billing --order message_group --on-failure park --backoff exponential",
        "rmq group create ledger --order queue",
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
    backoff: Policy = None,
    backoff_initial_ms: Initial = None,
    backoff_max_ms: Longest = None,
    backoff_multiplier: Multiplier = None,
    max_rate: Annotated[
        float | None, typer.Option(help=RATE_HELP, metavar="PER_SECOND", show_default="no limit")
    ] = None,
    idempotency_window_ms: Annotated[
        int, typer.Option(help=REMEMBERED_HELP, metavar="MS")
    ] = limits.IDEMPOTENCY_WINDOW_MS,
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
            backoff=_growing(
                backoff,
                initial_ms=backoff_initial_ms,
                max_ms=backoff_max_ms,
                multiplier=backoff_multiplier,
            ),
            max_rate_per_s=max_rate,
            idempotency_window_ms=idempotency_window_ms,
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
    backoff: Policy = None,
    backoff_initial_ms: Initial = None,
    backoff_max_ms: Longest = None,
    backoff_multiplier: Multiplier = None,
    max_rate: Annotated[float | None, typer.Option(help=RATE_HELP, metavar="PER_SECOND")] = None,
    idempotency_window_ms: Annotated[
        int | None, typer.Option(help=REMEMBERED_HELP, metavar="MS")
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Change the given settings of a consumer group; omitted settings stay as they are."""
    with connected(home, flight) as client:
        group = client.alter_group(
            name,
            max_attempts=max_attempts,
            backoff_ms=_delays(backoff_ms),
            on_failure=on_failure,
            backoff=_growing(
                backoff,
                initial_ms=backoff_initial_ms,
                max_ms=backoff_max_ms,
                multiplier=backoff_multiplier,
            ),
            max_rate_per_s=max_rate,
            idempotency_window_ms=idempotency_window_ms,
        )
    show_fields(group, as_json=as_json)


@app.command(epilog=examples("rmq group delete billing"))
def delete(
    name: Group,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even with messages in flight.")
    ] = False,
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
        show_message(f"Deleted consumer group {name}.")


@app.command("list", epilog=examples("rmq group list", "rmq group list --json"))
def list_(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List consumer groups."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_groups())
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="There are no consumer groups.")


@app.command(epilog=examples("rmq group show billing", "rmq group show billing --json"))
def show(name: Group, *, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """Show a consumer group: settings, members with their queues, and lag."""
    with connected(home, flight) as client:
        group = client.describe_group(name)
        group["lag"] = by_topic(rows_of(client.lag(name)))
    show_group(group, as_json=as_json)


def _delays(text: str | None) -> tuple[int, ...] | None:
    """Parse numbers joined by commas.

    Raises:
        RequestError: a part is not a number.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(
            f"--backoff-ms {text!r} has a part that is not a number.",
            remedy="Give numbers joined by commas, such as 1000,5000.",
        ) from None


def _growing(policy: str | None, **numbers: float | None) -> str | dict[str, float] | None:
    """Return the backoff policy that the options select; any number makes it exponential.

    Raises:
        RequestError: a number was given for a policy other than exponential.
    """
    given = {name: number for name, number in numbers.items() if number is not None}
    if not given:
        return policy
    if policy not in (None, "exponential"):
        raise RequestError(
            f"--backoff {policy} does not use {', '.join(given)}.",
            remedy="Use --backoff exponential, or omit these options.",
        )
    return given
