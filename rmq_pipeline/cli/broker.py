"""``rmq broker``, ``rmq stop`` and ``rmq status``."""

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected
from rmq_pipeline.cli.output import show_fields, show_message

DEFAULT_GRPC: Final = "127.0.0.1:8081"
DEFAULT_FLIGHT: Final = "127.0.0.1:8082"

ServedFlight = Annotated[
    str | None,
    typer.Option(
        "--flight",
        metavar="HOST:PORT",
        help="Where the table door listens; port 0 picks a free one. Default: RMQ_FLIGHT, then "
        f"what the home had the last time, then {DEFAULT_FLIGHT}.",
    ),
]
ServedGrpc = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        metavar="HOST:PORT",
        help="Where the door for RocketMQ clients listens. This version has none: its line says "
        f"grpc=-. Default: RMQ_GRPC, then {DEFAULT_GRPC}.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE.toml",
        help="Settings, one name = value a line; those it does not name get their defaults. "
        "Default: RMQ_SETTINGS, then what the home had the last time. rmq status --json shows all.",
    ),
]
SetSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="One setting, on top of the file or of what the home had; NAME=default gives it its "
        "default. Repeat it for more.",
    ),
]


def broker(
    *,
    home: Home = None,
    grpc: ServedGrpc = None,
    flight: ServedFlight = None,
    upkeep: Annotated[
        Literal["self", "dagster"] | None,
        typer.Option(
            help="Who delivers scheduled messages, revives and seals: the broker itself, or runs "
            "of Dagster. Default: as the last time, at first self."
        ),
    ] = None,
    flush: Annotated[
        Literal["sync", "async"] | None,
        typer.Option(
            help="Answer a send once it is on the disk, or before. Default: as the last time, at "
            "first sync."
        ),
    ] = None,
    settings: SettingsFile = None,
    set_: SetSettings = None,
) -> None:
    """Serve a home in this process until Ctrl-C or `rmq stop`.

    Prints one line when it serves: ready grpc=- flight=HOST:PORT home=DIR.
    """
    import logging

    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags
    from rmq_pipeline.flight.serve import serve

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    where = home or default_home()
    address = address_to_serve(flight)
    check_grpc(grpc)
    values = flags.given(settings, set_ or ())
    serve(where, flight=address, upkeep=upkeep, flush=flush, settings=values)


def stop(*, home: Home = None, as_json: AsJson = False) -> None:
    """End the broker of a home, and wait until it is gone; well, too, when there is none."""
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import process

    where = (home or default_home()).absolute()
    stopped = process.stop(where)
    if as_json:
        pid = stopped.pid if stopped else None
        show_fields({"stopped": stopped is not None, "pid": pid, "home": str(where)}, as_json=True)
    elif stopped:
        show_message(f"The broker of {where}, process {stopped.pid}, has ended.")
    else:
        show_message(f"No broker serves {where}.")


def status(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """Where the broker answers, and how it is."""
    with connected(home, flight) as client:
        facts = client.status()
    if not as_json:
        facts["settings"] = _changed(facts["settings"])
    show_fields({**_doors(facts), **facts}, as_json=as_json)


def _changed(settings: dict[str, Any]) -> dict[str, str]:
    """The settings that are not as every broker has them."""
    from rmq_pipeline.settings import Settings

    usual = Settings().model_dump(mode="json")
    return {name: str(value) for name, value in settings.items() if value != usual.get(name)}


def _doors(facts: dict[str, Any]) -> dict[str, Any]:
    """What the broker has written down in its home about itself, but its token."""
    from dataclasses import asdict

    from rmq_pipeline.endpoint import Endpoint

    endpoint = Endpoint.read(Path(facts["home"]))
    if endpoint is None:
        return {}
    return {name: value for name, value in asdict(endpoint).items() if name != "token"}


def address_to_serve(flight: str | None) -> str | None:
    """The address asked for, else RMQ_FLIGHT; None: what the home remembers, then the default.

    Raises:
        RequestError: it is no HOST:PORT, or lies beyond loopback; nothing has been made yet.
    """
    from rmq_pipeline.flight.server import loopback

    address = flight or os.environ.get("RMQ_FLIGHT") or None
    if address:
        loopback(address)
    return address


def check_grpc(grpc: str | None) -> None:
    """Refuse an address for the door of RocketMQ clients that could not be served either.

    Raises:
        RequestError: it is no HOST:PORT, or lies beyond loopback.
    """
    from rmq_pipeline.flight.server import loopback

    loopback(grpc or os.environ.get("RMQ_GRPC") or DEFAULT_GRPC)
