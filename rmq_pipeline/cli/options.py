"""Options and arguments that several commands share, and the client that they select."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from rmq_pipeline.errors import RequestError, RocketMQError

if TYPE_CHECKING:
    from rmq_pipeline.flight.client import Client
#: Longest duration of an option: about 285 years; timers of the system overflow beyond it.
LONGEST_S: Final = 9_000_000_000


def examples(*commands: str) -> str:
    """Format example commands for the end of a help text."""
    lines = [command.replace("[", r"\[") for command in commands]
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def topic_names(incomplete: str) -> list[str]:
    """Complete the name of a topic; no completions if the broker does not answer."""
    return _names("list_topics", incomplete)


def group_names(incomplete: str) -> list[str]:
    """Complete the name of a consumer group; no completions if the broker does not answer."""
    return _names("list_groups", incomplete)


def user_names(incomplete: str) -> list[str]:
    """Complete the name of a user; no completions if the broker does not answer."""
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
        help="The broker's Flight endpoint; grpc+tls://HOST:PORT if it is encrypted. Default: the "
        "one of --home, then RMQ_FLIGHT, then the one of the default home. RMQ_USER and "
        "RMQ_PASSWORD are the credentials, RMQ_CERTIFICATE is the trusted certificate.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="debug, info, warning or error. Default: RMQ_LOG_LEVEL, then warning.",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="FORMAT",
        help="human or json, on stderr. Default: RMQ_LOG_FORMAT, then human.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)]
Group = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names)]

MOMENT: Final = "ISO 8601 (local time if it has no zone), or ms since 1970"


@contextmanager
def connected(home: Path | None, flight: str | None) -> Iterator["Client"]:
    """Yield a client of the broker that --home and --flight select.

    The client does not wait for a broker to start. Its first call raises BrokerUnavailableError
    if no broker answers.

    Raises:
        RequestError: the address is malformed.
    """
    import os

    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.flight.connection import addresses_of

    address = flight or (None if home else os.environ.get("RMQ_FLIGHT"))
    if address and 0 in [split_address(each)[1] for each in addresses_of(address)]:
        # Port 0 means that the broker chose a free port; only the home has its number.
        address = None
    with Client(address, home=None if address else home or default_home(), retry_s=0) as client:
        yield client


IfNotExists = Annotated[
    bool, typer.Option("--if-not-exists", help="Succeed if it exists; it stays as it is.")
]


def seconds(given: float, option: str) -> float:
    """Check the seconds given for an option and return them.

    Raises:
        RequestError: the value is NaN, negative, or above LONGEST_S.
    """
    if not 0 <= given <= LONGEST_S:
        raise RequestError(f"{option} is a number of seconds from 0 to {LONGEST_S}, not {given:g}.")
    return given


def to_ms(given_s: float, option: str) -> int:
    """Convert the seconds given for an option to ms; raises as ``seconds`` does."""
    return round(seconds(given_s, option) * 1000)


def open_closed() -> None:
    """Connect closed standard streams to /dev/null; call it at the start of a command.

    Python sets a closed stream to None. Its descriptor must be taken too. Otherwise the next
    opened file, perhaps one of a home, would get the number, and output of libraries with it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open returns the lowest free number, which is this one. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nobody = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, nobody)


def stdin() -> TextIO:
    """Return stdin, for the argument -.

    Raises:
        RequestError: stdin is closed.
    """
    if sys.stdin is None:
        raise RequestError(
            "- reads stdin, but stdin is closed.", remedy="Redirect stdin from a file or a pipe."
        )
    return sys.stdin
