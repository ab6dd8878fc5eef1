"""``rmq group``: consumer groups; ``rmq offset``: their committed offsets; ``rmq lag``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, get_args

import typer

from rmq_pipeline import limits
from rmq_pipeline.cli.options import (
    MOMENT,
    AsJson,
    Flight,
    Group,
    Home,
    IfNotExists,
    Topic,
    connected,
    examples,
    group_names,
)
from rmq_pipeline.cli.output import rows_of, show_fields, show_message, show_rows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.group import OnFailure, Order
from rmq_pipeline.text import parse_ms

group_app = typer.Typer(
    no_args_is_help=True, help="Consumer groups: create, alter, delete, list, show."
)

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
#: Statistics that a member reports per topic, with their column titles.
_MEMBER_STATISTICS: Final = {
    "consume_rt_ms": "consume ms",
    "consume_ok_per_s": "ok/s",
    "consume_failed_per_s": "failed/s",
    "pull_rt_ms": "pull ms",
    "pulled_per_s": "pulled/s",
    "cached": "cached",
    "cached_bytes": "cached bytes",
}

#: Columns of a topic's lag.
_LAG_COLUMNS: Final = (
    "topic",
    "lag",
    "matching_lag",
    "estimated",
    "filters",
    "oldest_unread_at_ms",
)

Row = dict[str, Any]

_LAG_SUMS: Final = ("lag", "matching_lag", "in_flight", "retrying", "parked")
_LAG_ORDER: Final = (
    "consumer_group",
    "topic",
    "lag",
    "matching_lag",
    "estimated",
    "filters",
    "in_flight",
    "retrying",
    "parked",
    "oldest_unread_at_ms",
)
offset_app = typer.Typer(
    no_args_is_help=True, help="Offsets of consumer groups: show, reset, clone."
)


@group_app.command(
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
    if_not_exists: IfNotExists = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Create a consumer group."""
    with connected(home, flight) as client:
        create_group = client.ensure_group if if_not_exists else client.create_group
        group = create_group(
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


@group_app.command(epilog=examples("rmq group alter billing --max-attempts 5"))
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


@group_app.command(epilog=examples("rmq group delete billing"))
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


@group_app.command("list", epilog=examples("rmq group list", "rmq group list --json"))
def list_(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """List consumer groups."""
    with connected(home, flight) as client:
        rows = rows_of(client.list_groups())
    show_rows(rows, as_json=as_json, columns=COLUMNS, empty="There are no consumer groups.")


@group_app.command(epilog=examples("rmq group show billing", "rmq group show billing --json"))
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


def show_group(group: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a consumer group: its settings, then tables of members, queues, filters and lag."""
    if as_json:
        show_fields(group, as_json=True)
        return
    aside = ("members", "locks", "filters", "mixed_filters", "lag")
    show_fields({name: value for name, value in group.items() if name not in aside}, as_json=False)
    members: Mapping[str, Any] = group.get("members", {})
    locks: list[Mapping[str, Any]] = group.get("locks", [])
    listings = {
        "Members": list(_members(members)),
        "Queues": _queues(members, locks),
        "Statistics": list(_statistics(members)),
        "Filters": list(_filters(group)),
        "Lag": [{name: row[name] for name in _LAG_COLUMNS} for row in group.get("lag", [])],
    }
    for title, rows in listings.items():
        if rows or title == "Members":
            show_message(f"\n{title}")
            show_rows(rows, as_json=False, empty="The group has no members.")
    for topic, filters in _part(group, "mixed_filters").items():
        show_message(
            f"\nWARNING: topic {topic} is received with {len(filters)} filters: a message that one "
            "member filters out is lost for the others. Use one filter in all members, or one "
            "consumer group per filter."
        )


def _members(members: Mapping[str, Any]) -> Iterator[Row]:
    for client_id, member in members.items():
        details = _part(member, "details")
        yield {
            "client_id": client_id,
            "model": details.get("model"),
            "order": details.get("order"),
            "topics": member.get("topics"),
            "seen_at_ms": member.get("seen_at_ms"),
        }


def _queues(members: Mapping[str, Any], locks: list[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each queue that a member reports or that is locked."""
    rows: dict[tuple[str, int], Row] = {}
    for client_id, member in members.items():
        for topic, queue_ids in _part(_part(member, "details"), "queues").items():
            ids = queue_ids if isinstance(queue_ids, list) else []
            for queue_id in filter(lambda one: isinstance(one, int), ids):
                row = rows.setdefault((topic, queue_id), _queue(topic, queue_id))
                row["members"] = [*row["members"], client_id]
    for lock in locks:
        at = lock["topic"], lock["queue_id"]
        row = rows.setdefault(at, _queue(*at))
        row["locked_by"], row["expires_at_ms"] = lock["client_id"], lock["expires_at_ms"]
    return [rows[at] for at in sorted(rows)]


def _queue(topic: str, queue_id: int) -> Row:
    named = {"topic": topic, "queue_id": queue_id, "members": []}
    return {**named, "locked_by": None, "expires_at_ms": None}


def _statistics(members: Mapping[str, Any]) -> Iterator[Row]:
    for client_id, member in members.items():
        for topic, numbers in _part(_part(member, "details"), "statistics").items():
            said = numbers if isinstance(numbers, Mapping) else {}
            shown = {title: said.get(name) for name, title in _MEMBER_STATISTICS.items()}
            yield {"client_id": client_id, "topic": topic, **shown}


def _filters(group: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each filter; none for topics that are received without a filter."""
    for topic, filters in _part(group, "filters").items():
        for filter_, clients in filters.items():
            if set(filters) != {"*"}:
                yield {"topic": topic, "filter": filter_, "clients": clients}


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested mapping; empty if it is missing or malformed, as members report freely."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}


def lag(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", autocompletion=group_names)
    ] = None,
    *,
    by_queue: Annotated[
        bool, typer.Option("--by-queue", help="Show one row per message queue.")
    ] = False,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Show how many messages each consumer group has not settled yet, per topic.

    matching_lag counts only messages that the group's filter selects. It is empty if the group
    has sent no filter since the broker's start; estimated marks an estimate. A group has a row
    for a topic once it has received from it or subscribed to it.
    """
    with connected(home, flight) as client:
        rows = rows_of(client.lag(group))
    shown = rows if by_queue else by_topic(rows)
    empty = "No consumer group reads a topic." if group is None else f"{group} reads no topic."
    show_rows(shown, as_json=as_json, empty=empty)


def by_topic(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Sum the rows of queues to one row per group and topic."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["consumer_group"], row["topic"]), []).append(row)
    return [_sum_of_queues(queues) for queues in found.values()]


def _sum_of_queues(queues: list[Row]) -> dict[str, Any]:
    values: dict[str, Any] = {name: queues[0][name] for name in _LAG_ORDER}
    for name in _LAG_SUMS:
        numbers = [row[name] for row in queues]
        values[name] = None if None in numbers else sum(numbers)
    values["estimated"] = any(row["estimated"] for row in queues)
    waiting = [row["oldest_unread_at_ms"] for row in queues if row["lag"] > 0]
    values["oldest_unread_at_ms"] = min((at for at in waiting if at is not None), default=None)
    return values


@offset_app.callback()
def offset() -> None:
    """Offsets of consumer groups."""


@offset_app.command("show", epilog=examples("rmq offset show billing orders"))
def show_offsets(
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


@offset_app.command(
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


@offset_app.command(epilog=examples("rmq offset clone billing billing-two orders"))
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
