"""``rmq broker``, ``rmq stop`` and ``rmq status``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected
from rmq_pipeline.cli.output import show_fields, show_message, show_progress

if TYPE_CHECKING:
    from rmq_pipeline.flight.flags import Listening, Tls

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
        help="Where the door for RocketMQ clients listens; port 0 picks a free one, none keeps it "
        f"shut. Default: RMQ_GRPC, then what the home had the last time, then {DEFAULT_GRPC}.",
    ),
]
ServedTls = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="self-made|none",
        help="self-made: encrypt the table door with a certificate that the broker makes and keeps "
        "in the home, tls/certificate.pem. Default: as the last time, at first none.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE.pem",
        help="Encrypt with this certificate, and those that vouch for it.",
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE.pem", help="The key of --tls-cert.")
]
GrpcTls = Annotated[
    str | None,
    typer.Option(
        "--grpc-tls",
        metavar="HOST:PORT",
        help="Where the door for RocketMQ clients listens encrypted, too; none: nowhere. Default: "
        "as the last time, at first none.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback even without users: everybody may do everything.",
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
    tls: ServedTls = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    grpc_tls: GrpcTls = None,
    insecure: Insecure = False,
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

    Prints one line when it serves: ready grpc=HOST:PORT flight=HOST:PORT home=DIR.
    """
    import logging

    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags
    from rmq_pipeline.serving.serve import serve

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    where = home or default_home()
    serve(
        where,
        listening=listening_to_serve(
            flight=flight,
            grpc=grpc,
            grpc_tls=grpc_tls,
            tls=tls_to_serve(tls, tls_cert, key=tls_key),
            insecure=insecure,
        ),
        upkeep=upkeep,
        flush=flush,
        settings=flags.given(settings, set_ or ()),
    )


def tls_to_serve(kind: str | None, certificate: Path | None, *, key: Path | None) -> "Tls | None":
    """What was said about certificates, for the home to keep."""
    from rmq_pipeline.errors import RequestError
    from rmq_pipeline.flight.flags import NO_TLS, SELF_MADE

    if certificate is not None or key is not None:
        if certificate is None or key is None or kind is not None:
            raise RequestError("Give --tls-cert and --tls-key, or --tls.")
        return [str(certificate.absolute()), str(key.absolute())]
    if kind not in {None, NO_TLS, SELF_MADE}:
        raise RequestError(f"--tls is {SELF_MADE} or {NO_TLS}, not {kind!r}.")
    return kind


def stop(*, home: Home = None, as_json: AsJson = False) -> None:
    """End the broker of a home and wait until it is gone; that there is none is no error."""
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import process

    where = (home or default_home()).absolute()
    stopped = process.stop(where, tell=show_progress)
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

    try:
        endpoint = Endpoint.read(Path(facts["home"]))
    except OSError:
        # Another user's home, which need not be readable here: the broker has answered anyhow.
        return {}
    if endpoint is None:
        return {}
    return {name: value for name, value in asdict(endpoint).items() if name != "token"}


def listening_to_serve(
    *,
    flight: str | None,
    grpc: str | None,
    grpc_tls: str | None,
    tls: "Tls | None",
    insecure: bool,
) -> "Listening":
    """What was asked for, else what RMQ_FLIGHT and RMQ_GRPC say.

    Raises:
        RequestError: an address is no HOST:PORT; nothing has been made yet.
    """
    from rmq_pipeline.flight.flags import Listening

    return Listening(_flight_to_serve(flight), _grpc_to_serve(grpc), grpc_tls, tls, insecure)


def _flight_to_serve(flight: str | None) -> str | None:
    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.flight.target import bare

    address = flight or os.environ.get("RMQ_FLIGHT") or None
    if not address:
        return None
    # What is in the environment for clients may name the protocol.
    split_address(bare(address))
    return bare(address)


def _grpc_to_serve(grpc: str | None) -> str | None:
    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.flight.flags import NO_DOOR

    address = grpc or os.environ.get("RMQ_GRPC") or None
    if address and address != NO_DOOR:
        split_address(address)
    return address
