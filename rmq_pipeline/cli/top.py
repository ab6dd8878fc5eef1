"""``rmq top``: consumer groups and topics, again every two seconds."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rmq_pipeline.cli.options import MOMENT, AsJson, Flight, Home, connected, seconds
from rmq_pipeline.cli.output import console, show_message, table_of
from rmq_pipeline.text import format_ms, parse_ms

if TYPE_CHECKING:
    from rich.console import Group

GROUPS: Final = (
    *("consumer_group", "topic", "lag", "oldest_unread_at_ms"),
    *("in_flight", "retrying", "parked", "dead_letters"),
)
TOPICS: Final = (
    *("topic", "type", "queues", "messages", "last_minute"),
    *("last_stored_at_ms", "scheduled", "half"),
)


def top(
    *,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help=f"Show the state as of a moment: {MOMENT}."),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Show consumer groups and topics until Ctrl-C: lag, deliveries, failures, new messages.

    With --json each look is one line. Without a terminal, or with --at, it looks once.
    """
    from rich.live import Live

    from rmq_pipeline.flight.process import Interruption
    from rmq_pipeline.web.state import State

    pause_s = max(0.1, seconds(interval, "--interval"))
    at_ms = parse_ms(at) if at is not None else None
    screen = console()
    with connected(home, flight) as client, suppress(KeyboardInterrupt):

        def look() -> dict[str, Any]:
            state = State(client, at_ms=at_ms)
            return {"at_ms": state.at_ms, "groups": state.groups(), "topics": state.topics()}

        ends = once or at_ms is not None or not (as_json or screen.is_terminal)
        interruption = None if ends else Interruption()
        if as_json:
            show_message(json.dumps(look()))
            while interruption is not None and not interruption.wait(pause_s):
                show_message(json.dumps(look()))
        elif interruption is None:
            screen.print(_shown(look()))
        else:
            with Live(_shown(look()), console=screen, auto_refresh=False) as live:
                while not interruption.wait(pause_s):
                    live.update(_shown(look()), refresh=True)


def _shown(look: Mapping[str, Any]) -> "Group":
    from rich.console import Group

    groups, topics = look["groups"], look["topics"]
    return Group(
        format_ms(look["at_ms"]),
        "",
        table_of(groups, GROUPS) if groups else "No consumer group exists.",
        "",
        table_of(topics, TOPICS) if topics else "No topic exists.",
    )
