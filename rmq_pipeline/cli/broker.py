"""``rmq broker``, ``rmq stop``, ``rmq status`` and ``rmq verify``."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, LogFormat, LogLevel, connected
from rmq_pipeline.cli.output import (
    print_json,
    progress,
    show_fields,
    show_message,
    show_progress,
    show_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rmq_pipeline.broker.work.verification import Verified
    from rmq_pipeline.flight.flags import Listening, Tls

DEFAULT_GRPC: Final = "127.0.0.1:8081"
DEFAULT_FLIGHT: Final = "127.0.0.1:8082"

ServedFlight = Annotated[
    str | None,
    typer.Option(
        "--flight",
        metavar="HOST:PORT",
        help="Address of the Flight endpoint; port 0 picks a free port. Default: RMQ_FLIGHT, then "
        f"the address of the last run, then {DEFAULT_FLIGHT}.",
    ),
]
ServedGrpc = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        metavar="HOST:PORT",
        help="Address of the gRPC endpoint for RocketMQ clients; port 0 picks a free port, none "
        "turns it off. Default: RMQ_GRPC, then the address of the last run, then "
        f"{DEFAULT_GRPC}.",
    ),
]
ServedTls = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="self-made|none",
        help="self-made: encrypt the Flight endpoint with a certificate that the broker makes and "
        "stores in the home, tls/certificate.pem. Default: as in the last run, at first none.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE.pem",
        help="Encrypt with this certificate, followed by its issuers.",
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE.pem", help="Private key of --tls-cert.")
]
GrpcTls = Annotated[
    str | None,
    typer.Option(
        "--grpc-tls",
        metavar="HOST:PORT",
        help="Address of an additional encrypted gRPC endpoint; none turns it off. Default: as in "
        "the last run, at first none.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="HTTP address at which Prometheus scrapes /metrics; port 0 picks a free port, none "
        "turns it off. Default: as in the last run, at first none.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback even without users: every caller may do everything.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE.toml",
        help="A settings file replaces all stored settings; omitted settings return to their "
        "defaults. One name = value per line. Default: RMQ_SETTINGS, then the settings of the last "
        "run. rmq status --json shows all.",
    ),
]
SetSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change one setting of the file or of the last run; NAME=default resets it. "
        "Repeatable.",
    ),
]
LogStore = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="URL",
        help="Store of the commit log: postgresql://HOST:PORT/NAME, s3://BUCKET/PREFIX or "
        "nats://HOST:PORT/STREAM, without a password (PGPASSWORD, AWS_SECRET_ACCESS_KEY, "
        "NATS_PASSWORD); none: only the home has it. The same as --set log_store=URL. "
        "Default: as in the last run, at first none.",
    ),
]

Standby = Annotated[
    bool,
    typer.Option(
        "--standby",
        help="If another broker leads the log of --log, follow it and answer reads; lead once "
        "it has gone, or after `rmq promote` (--set failover=manual).",
    ),
]
UpkeepBy = Annotated[
    Literal["self", "dagster"] | None,
    typer.Option(
        help="Who delivers scheduled messages, revives and seals: the broker itself, or runs "
        "of Dagster. Default: as in the last run, at first self."
    ),
]
FlushWhen = Annotated[
    Literal["sync", "async"] | None,
    typer.Option(
        help="sync: answer a send after its sync to disk. async: answer before. Default: as in "
        "the last run, at first sync."
    ),
]

_MIB = 1 << 20


def broker(
    *,
    home: Home = None,
    grpc: ServedGrpc = None,
    flight: ServedFlight = None,
    upkeep: UpkeepBy = None,
    tls: ServedTls = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    grpc_tls: GrpcTls = None,
    metrics: Metrics = None,
    insecure: Insecure = False,
    flush: FlushWhen = None,
    log_store: LogStore = None,
    standby: Standby = False,
    settings: SettingsFile = None,
    set_: SetSettings = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run a broker in this process until Ctrl-C or `rmq stop`.

    Prints one line once it accepts calls: ready grpc=HOST:PORT flight=HOST:PORT home=DIR.
    """
    from rmq_pipeline import logs
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags
    from rmq_pipeline.serving.interpreter import without_pandas

    logs.set_up(log_level, log_format)
    where = home or default_home()
    listening = listening_to_serve(
        flight=flight,
        grpc=grpc,
        grpc_tls=grpc_tls,
        tls=tls_to_serve(tls, tls_cert, key=tls_key),
        metrics=metrics,
        insecure=insecure,
    )
    chosen = flags.given(settings, set_ or ())
    if log_store is not None:
        chosen = {**(chosen or {}), "log_store": None if log_store == "none" else log_store}
    with without_pandas():
        from rmq_pipeline.serving.serve import serve

        serve(
            where,
            listening=listening,
            upkeep=upkeep,
            flush=flush,
            settings=chosen,
            standby=standby,
        )


def tls_to_serve(kind: str | None, certificate: Path | None, *, key: Path | None) -> "Tls | None":
    """Return the TLS option that the flags select; None if no flag was given.

    Raises:
        RequestError: the flags are incomplete or contradict each other.
    """
    from rmq_pipeline.errors import RequestError
    from rmq_pipeline.flight.flags import NO_TLS, SELF_MADE

    if certificate is not None or key is not None:
        if certificate is None or key is None or kind is not None:
            raise RequestError(
                "--tls-cert and --tls-key belong together and exclude --tls.",
                remedy="Give --tls-cert and --tls-key, or only --tls.",
            )
        return [str(certificate.absolute()), str(key.absolute())]
    if kind not in {None, NO_TLS, SELF_MADE}:
        raise RequestError(f"--tls {kind!r} is unknown.", remedy=f"Use {SELF_MADE} or {NO_TLS}.")
    return kind


def stop(*, home: Home = None, as_json: AsJson = False) -> None:
    """Stop the broker and wait until it has exited. Succeeds if no broker is running."""
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import process

    where = (home or default_home()).absolute()
    stopped = process.stop(where, tell=show_progress)
    if as_json:
        pid = stopped.pid if stopped else None
        show_fields({"stopped": stopped is not None, "pid": pid, "home": str(where)}, as_json=True)
    elif stopped:
        show_message(f"The broker of {where}, process {stopped.pid}, has exited.")
    else:
        show_message(f"No broker serves {where}.")


def status(*, home: Home = None, flight: Flight = None, as_json: AsJson = False) -> None:
    """Show the broker's addresses, state and changed settings."""
    with connected(home, flight) as client:
        facts = client.status()
    if not as_json:
        facts["settings"] = _changed(facts["settings"])
    show_fields({**_addresses(facts), **facts}, as_json=as_json)


def promote(
    *,
    home: Home = None,
    flight: Flight = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Begin to lead also while another broker leads; that one ends."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a standby begin to lead.

    The command returns once it leads. With --force the broker that leads ends, and its clients go
    on at this one. With its setting replication = async, its last answers may be lost.
    """
    from rmq_pipeline.errors import RequestError

    if "," in (flight or ("" if home else os.environ.get("RMQ_FLIGHT", ""))):
        raise RequestError(
            "Several addresses name no standby.",
            remedy="Give the address of the standby to promote: --flight HOST:PORT.",
        )
    with connected(home, flight) as client:
        shown = client.promote(force=force)
    if as_json:
        show_fields(shown, as_json=True)
    else:
        show_message(f"The standby leads now, under epoch {shown['epoch']}.")


def metrics(*, home: Home = None, flight: Flight = None) -> None:
    """Print all metrics as Prometheus scrapes them."""
    from rmq_pipeline.metrics.exposition import exposition

    with connected(home, flight) as client:
        table = client.metrics()
    print(exposition(table).decode(), end="")


def _changed(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings that differ from their defaults."""
    from rmq_pipeline.settings import Settings

    usual = Settings().model_dump(mode="json")
    return {name: str(value) for name, value in settings.items() if value != usual.get(name)}


def _addresses(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the endpoint file of the broker's home, without its token."""
    from dataclasses import asdict

    from rmq_pipeline.endpoint import Endpoint

    try:
        endpoint = Endpoint.read(Path(facts["home"]))
    except OSError:
        # The home of another user may be unreadable here; the broker's own reply suffices.
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
    metrics: str | None,
    insecure: bool,
) -> "Listening":
    """Return the addresses of the flags, or those of RMQ_FLIGHT and RMQ_GRPC.

    Raises:
        RequestError: an address is malformed; the home is not created then.
    """
    from rmq_pipeline.flight.flags import Listening

    return Listening(
        _flight_to_serve(flight), _grpc_to_serve(grpc), grpc_tls, tls, metrics, insecure
    )


def _flight_to_serve(flight: str | None) -> str | None:
    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.errors import RequestError
    from rmq_pipeline.flight.connection import bare

    address = flight or os.environ.get("RMQ_FLIGHT") or None
    if not address:
        return None
    if flight is None and "," in address:
        raise RequestError(
            "RMQ_FLIGHT has several addresses; a broker listens at one.",
            remedy="Give --flight the address of this broker.",
        )
    # RMQ_FLIGHT also serves clients, so it may start with grpc+tls://.
    split_address(bare(address))
    return bare(address)


def _grpc_to_serve(grpc: str | None) -> str | None:
    from rmq_pipeline.access.source import split_address
    from rmq_pipeline.flight.flags import NO_ENDPOINT

    address = grpc or os.environ.get("RMQ_GRPC") or None
    if address and address != NO_ENDPOINT:
        split_address(address)
    return address


def verify(
    *,
    home: Home = None,
    sink: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Check the files of this sink, a folder or URI."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read all files of a home and list the damaged ones. Exit code 1: some are damaged.

    Stop the broker first (`rmq stop`). The command changes nothing.
    """
    from rmq_pipeline.broker.work import verification
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.storage.local import LocalRoot
    from rmq_pipeline.storage.place import at
    from rmq_pipeline.storage.root import address_of

    place = at(address_of(sink if sink is not None else home or default_home()))
    if isinstance(place, LocalRoot):
        place = LocalRoot(place.folder.absolute())
    where = str(place)
    found = _with_progress(
        verification.verify_sink(place) if sink is not None else verification.verify(Path(where))
    )
    damaged = [
        {"file": each.path, "kind": each.kind, "damage": each.damage, "remedy": each.remedy}
        for each in found
        if each.damage is not None
    ]
    counts = Counter(each.kind for each in found)
    size = sum(each.bytes for each in found)
    if as_json:
        of_kinds = dict(sorted(counts.items()))
        facts = {"place": where, "files": len(found), "bytes": size, "kinds": of_kinds}
        print_json({**facts, "damaged": damaged})
    else:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        show_rows(damaged, as_json=False, empty=f"{where} has no damaged files.")
        show_message(f"{len(found)} files, {size / _MIB:.1f} MiB: {kinds}.")
    if damaged:
        raise typer.Exit(1)


def _with_progress(files: "Iterator[Verified]") -> "list[Verified]":
    """Collect all results, and show a progress bar meanwhile."""
    found, done = [], 0
    with progress(unit="MiB") as bars:
        task = bars.add_task("reading", total=None, done=0)
        for each in files:
            found.append(each)
            done += each.bytes
            bars.update(task, done=done // _MIB)
    return found
