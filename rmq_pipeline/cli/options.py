"""Options and arguments that several commands take, and the client they lead to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rmq_pipeline.errors import RocketMQError

if TYPE_CHECKING:
    from rmq_pipeline.flight.client import Client


def examples(*commands: str) -> str:
    """The end of a help text."""
    lines = [command.replace("[", r"\[") for command in commands]
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def topic_names(incomplete: str) -> list[str]:
    """Completions of a topic's name; none when no broker answers."""
    return _names("list_topics", incomplete)


def group_names(incomplete: str) -> list[str]:
    """Completions of a consumer group's name; none when no broker answers."""
    return _names("list_groups", incomplete)


def user_names(incomplete: str) -> list[str]:
    """Completions of a user's name; none when no broker answers."""
    return _names("list_users", incomplete)


def _names(verb: str, incomplete: str) -> list[str]:
    try:
        with connected(None, None) as client:
            table = getattr(client, verb)()
    except RocketMQError:
        return []
    return [name for name in table["name"].to_pylist() if name.startswith(incomplete)]


Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="The broker's home. Default: RMQ_HOME, then .rmq in the project: the nearest folder "
        "upwards with a pyproject.toml or workspace.yaml, or the current one.",
    ),
]
Flight = Annotated[
    str | None,
    typer.Option(
        "--flight",
        metavar="HOST:PORT",
        help="The broker's table door; grpc+tls://HOST:PORT is an encrypted one. Default: that of "
        "--home, then RMQ_FLIGHT, then that of the default home. RMQ_USER and RMQ_PASSWORD say who "
        "calls, RMQ_CERTIFICATE names what to trust.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)]
Group = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names)]

MOMENT: Final = "ISO 8601 (without a zone: this machine's), or ms since 1970"


@contextmanager
def connected(home: Path | None, flight: str | None) -> Iterator["Client"]:
    """A client of the broker that --home and --flight name; it does not wait for one to start.

    Raises:
        RequestError: the address is none.
        BrokerUnavailableError: no broker answers, when the first call is made.
    """
    import os

    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.flight.target import bare

    address = flight or (None if home else os.environ.get("RMQ_FLIGHT"))
    if address and split_address(bare(address))[1] == 0:
        # Any free port was asked for, so only the home knows which one it became.
        address = None
    with Client(address, home=None if address else home or default_home(), retry_s=0) as client:
        yield client
