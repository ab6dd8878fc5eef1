"""``rmq lag``: messages that consumer groups have not settled yet."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, group_names
from rmq_pipeline.cli.output import rows_of, show_rows

Row = Mapping[str, Any]

_SUMS: Final = ("lag", "matching_lag", "in_flight", "retrying", "parked")
_ORDER: Final = (
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
    return [_sum(queues) for queues in found.values()]


def _sum(queues: list[Row]) -> dict[str, Any]:
    values: dict[str, Any] = {name: queues[0][name] for name in _ORDER}
    for name in _SUMS:
        numbers = [row[name] for row in queues]
        values[name] = None if None in numbers else sum(numbers)
    values["estimated"] = any(row["estimated"] for row in queues)
    waiting = [row["oldest_unread_at_ms"] for row in queues if row["lag"] > 0]
    values["oldest_unread_at_ms"] = min((at for at in waiting if at is not None), default=None)
    return values
