"""``rmq demo``: the example pipeline on New York departures, end to end."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from rmq_pipeline import logs
from rmq_pipeline.cli.options import AsJson, LogFormat, LogLevel
from rmq_pipeline.errors import NotFoundError

MODULE: Final = "examples.flights.demo"


class NotInstalledError(NotFoundError):
    """The installation does not contain the example."""

    remedy = "Run it from a checkout of the project."


def demo(
    *,
    days: Annotated[int, typer.Option(help="How many days of 2013, 1 to 365.")] = 7,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave the UI running until Ctrl-C, and keep all files."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Fail after this time. Default: depends on --days."),
    ] = None,
    micro_batch: Annotated[
        int,
        typer.Option(
            min=0, help="Maximum messages of a Spark micro-batch; 0: the consumer's setting."
        ),
    ] = 0,
    as_json: AsJson = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run the departures of 2013 through broker, Dagster and Spark, and check every row.

    Uses a new home, a new DAGSTER_HOME and free ports. Exit code 1: a check failed.
    """
    # The library must not import the application, so this process becomes the example's program.
    # With -P, a folder `examples` in the current directory cannot hide the example.
    command = [sys.executable, "-P", "-m", MODULE, "--days", str(days)]
    command += ["--micro-batch", str(micro_batch)] if micro_batch else []
    command += ["--keep"] if keep else []
    command += ["--json"] if as_json else []
    command += ["--timeout", str(timeout)] if timeout is not None else []
    script = Path(__file__).resolve().parents[2] / Path(*MODULE.split(".")).with_suffix(".py")
    if not script.exists():
        raise NotInstalledError(f"The demo is not installed: {script} does not exist.")
    # set_up also stores the options in the environment, which the example inherits.
    logs.set_up(log_level, log_format)
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell: that is wanted
