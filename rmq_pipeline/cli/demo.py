"""``rmq demo``: the example with the departures of New York, from end to end."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from rmq_pipeline.cli.options import AsJson
from rmq_pipeline.errors import NotFoundError

MODULE: Final = "examples.flights.demo"


class NotInstalledError(NotFoundError):
    """The example is no part of what was installed."""

    remedy = "Run it from a checkout of the project."


def demo(
    *,
    days: Annotated[int, typer.Option(help="How many days of 2013, 1 to 365.")] = 7,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave the UI running until Ctrl-C, and the files after it."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Give up after this long. Default: by the days."),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option(min=0, help="Most messages of a Spark micro-batch. 0: the consumer's.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Run the departures of 2013 through broker, Dagster and Spark, and check every row.

    In a fresh home, with a DAGSTER_HOME of its own and free ports. Exit code 1 if a fact is wrong.
    """
    # The library does not import the application: the example is another program, as a user would
    # start it, and this process becomes it. -P: a folder `examples` here must not hide it.
    command = [sys.executable, "-P", "-m", MODULE, "--days", str(days)]
    command += ["--micro-batch", str(micro_batch)] if micro_batch else []
    command += ["--keep"] if keep else []
    command += ["--json"] if as_json else []
    command += ["--timeout", str(timeout)] if timeout is not None else []
    script = Path(__file__).resolve().parents[2] / Path(*MODULE.split(".")).with_suffix(".py")
    if not script.exists():
        raise NotInstalledError("The demo is not installed.")
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell: that is wanted
