"""``rmq up``: a broker and Dagster, kept running together."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmq_pipeline.cli.broker import (
    DEFAULT_FLIGHT,
    GrpcTls,
    Insecure,
    ServedFlight,
    ServedGrpc,
    ServedTls,
    SetSettings,
    SettingsFile,
    TlsCertificate,
    TlsKey,
    listening_to_serve,
    tls_to_serve,
)
from rmq_pipeline.cli.options import Home
from rmq_pipeline.cli.output import show_message
from rmq_pipeline.errors import RocketMQError

if TYPE_CHECKING:
    from rmq_pipeline.endpoint import Endpoint
    from rmq_pipeline.flight.flags import Listening, Values


def up(
    *,
    home: Home = None,
    grpc: ServedGrpc = None,
    flight: ServedFlight = None,
    tls: ServedTls = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    grpc_tls: GrpcTls = None,
    insecure: Insecure = False,
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

    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags
    from rmq_pipeline.orchestration.dev_server import project_root

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    where = (home or default_home()).absolute()
    listening = listening_to_serve(
        flight=flight,
        grpc=grpc,
        grpc_tls=grpc_tls,
        tls=tls_to_serve(tls, tls_cert, key=tls_key),
        insecure=insecure,
    )
    values = flags.given(settings, set_ or ())
    if listening.flight is None and not (where / flags.SETTINGS_FILE).exists():
        listening = replace(listening, flight=DEFAULT_FLIGHT)
    # Everything below finds the broker through its home, which knows where a restarted one is.
    os.environ.pop("RMQ_FLIGHT", None)
    folder = dagster_home or Path(os.environ.get("DAGSTER_HOME") or project_root() / "dagster_home")
    _run(where, listening, settings=values, folder=folder, port=port)


def _run(
    home: Path, listening: "Listening", *, settings: "Values | None", folder: Path, port: int
) -> None:
    """Both, until Ctrl-C, or until the broker cannot be started again."""
    from rmq_pipeline.cli.supervisor import Supervisor
    from rmq_pipeline.interruption import Interruption
    from rmq_pipeline.orchestration.dev_server import DevServer

    interruption = Interruption()
    failures: list[RocketMQError] = []

    def give_up(error: RocketMQError) -> None:
        failures.append(error)
        interruption.set()

    supervisor = Supervisor(
        home, listening, settings=settings, tell=show_message, on_failure=give_up
    )
    with supervisor as broker:
        show_message(_doors(broker.endpoint, home))
        show_message("Dagster  starting …")
        with DevServer(folder, port=port, env={"RMQ_HOME": str(home)}) as dagster:
            show_message(f"Dagster  {dagster.url}   DAGSTER_HOME {folder}")
            show_message("Ctrl-C ends both.")
            interruption.wait()
            show_message("Ending …")
    if failures:
        raise failures[0]


def _doors(endpoint: "Endpoint", home: Path) -> str:
    return f"broker   {endpoint.flight}   gRPC {endpoint.grpc or '-'}   home {home}"
