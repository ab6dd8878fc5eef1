"""``rmq up``: a broker and Dagster, kept running together."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmq_pipeline.cli.broker import (
    DEFAULT_FLIGHT,
    ServedFlight,
    ServedGrpc,
    SetSettings,
    SettingsFile,
    address_to_serve,
    grpc_to_serve,
)
from rmq_pipeline.cli.options import Home
from rmq_pipeline.cli.output import show_message
from rmq_pipeline.errors import RocketMQError

if TYPE_CHECKING:
    from rmq_pipeline.endpoint import Endpoint


def up(
    *,
    home: Home = None,
    grpc: ServedGrpc = None,
    flight: ServedFlight = None,
    port: Annotated[int, typer.Option(help="Of Dagster's UI; 0 picks a free one.")] = 3000,
    dagster_home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Default: DAGSTER_HOME, then dagster_home in the project."
        ),
    ] = None,
    settings: SettingsFile = None,
    set_: SetSettings = None,
) -> None:
    """Run a broker and Dagster, each started again when it dies; Ctrl-C ends both.

    Dagster does the broker's background work, and its sensors start the consumers.
    """
    import logging

    from rmq_pipeline.cli.supervisor import Supervisor
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags
    from rmq_pipeline.interruption import Interruption
    from rmq_pipeline.orchestration.dev_server import DevServer, project_root

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    where = (home or default_home()).absolute()
    address = address_to_serve(flight)
    values = flags.given(settings, set_ or ())
    if address is None and not (where / flags.SETTINGS_FILE).exists():
        address = DEFAULT_FLIGHT
    # Everything below finds the broker through its home, which knows where a restarted one is.
    os.environ.pop("RMQ_FLIGHT", None)
    interruption = Interruption()
    failures: list[RocketMQError] = []

    def give_up(error: RocketMQError) -> None:
        failures.append(error)
        interruption.set()

    folder = dagster_home or Path(os.environ.get("DAGSTER_HOME") or project_root() / "dagster_home")
    addresses = {"flight": address, "grpc": grpc_to_serve(grpc)}
    supervisor = Supervisor(
        where, addresses, settings=values, tell=show_message, on_failure=give_up
    )
    with supervisor as broker:
        show_message(_doors(broker.endpoint, where))
        show_message("Dagster  starting …")
        with DevServer(folder, port=port, env={"RMQ_HOME": str(where)}) as dagster:
            show_message(f"Dagster  {dagster.url}   DAGSTER_HOME {folder}")
            show_message("Ctrl-C ends both.")
            interruption.wait()
            show_message("Ending …")
    if failures:
        raise failures[0]


def _doors(endpoint: "Endpoint", home: Path) -> str:
    return f"broker   {endpoint.flight}   gRPC {endpoint.grpc or '-'}   home {home}"
