"""``rmq up``: a supervised broker, Dagster and the web page; ``rmq ui``; ``rmq demo``."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rmq_pipeline import extras, logs
from rmq_pipeline.cli.broker import (
    DEFAULT_FLIGHT,
    GrpcTls,
    Insecure,
    Metrics,
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
from rmq_pipeline.cli.options import AsJson, Flight, Home, LogFormat, LogLevel
from rmq_pipeline.cli.output import print_json, show_message
from rmq_pipeline.errors import OperatorError, RequestError, RocketMQError

if TYPE_CHECKING:
    from rmq_pipeline.endpoint import Endpoint
    from rmq_pipeline.flight.flags import Listening, Values
    from rmq_pipeline.orchestration.dev_server import DevServer
    from rmq_pipeline.orchestration.project import CodeLocation

Module = Annotated[
    str | None,
    typer.Option(
        "--module",
        "-m",
        metavar="MODULE",
        help="The Python module with your `defs`. Default: that of the project in DIR.",
    ),
]
WorkingDirectory = Annotated[
    Path | None,
    typer.Option(
        "--working-directory",
        "-d",
        metavar="DIR",
        help="Folder of --module. Default: the current folder.",
    ),
]
Ui = Annotated[
    str | None,
    typer.Option(
        "--ui",
        metavar="HOST:PORT",
        help="Address of the web page; none turns it off. Default: 127.0.0.1:8083, or a free port "
        "if it is taken.",
    ),
]
Reload = Annotated[
    bool,
    typer.Option(
        "--reload",
        help="Load the project again when its code changes. Ends its runs; the next ones continue.",
    ),
]
#: In place of an address: serve no page.
NO_PAGE: Final = "none"
DEMO_MODULE: Final = "rmq_pipeline.examples.flights.demo"


def up(
    *,
    home: Home = None,
    grpc: ServedGrpc = None,
    flight: ServedFlight = None,
    tls: ServedTls = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    grpc_tls: GrpcTls = None,
    metrics: Metrics = None,
    insecure: Insecure = False,
    port: Annotated[int, typer.Option(help="Port of Dagster's UI; 0 picks a free port.")] = 3000,
    ui: Ui = None,
    dagster_home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Default: $DAGSTER_HOME, dagster_home in the project, dagster in the home.",
        ),
    ] = None,
    module: Module = None,
    working_directory: WorkingDirectory = None,
    reload: Reload = False,
    settings: SettingsFile = None,
    set_: SetSettings = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Run a broker, Dagster and the web page; what dies is restarted. Ctrl-C stops all.

    Dagster does the broker's background work, and its sensors start the consumers. The page shows
    topics, groups and messages, now and as of any moment.
    """
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight import flags

    extras.check("broker", "dagster", "ui")
    from rmq_pipeline.orchestration.project import CodeLocation

    logs.set_up(log_level, log_format)
    where = (home or default_home()).absolute()
    listening = listening_to_serve(
        flight=flight,
        grpc=grpc,
        grpc_tls=grpc_tls,
        tls=tls_to_serve(tls, tls_cert, key=tls_key),
        metrics=metrics,
        insecure=insecure,
    )
    _check_page(ui)
    values = flags.given(settings, set_ or ())
    if listening.flight is None and not (where / flags.SETTINGS_FILE).exists():
        listening = replace(listening, flight=DEFAULT_FLIGHT)
    # Dagster's processes must find the broker through its home: a restart may change the port.
    os.environ.pop("RMQ_FLIGHT", None)
    code = _checked(CodeLocation.find(module, working_directory), reload=reload)
    folder = _dagster_home(dagster_home, home=where, code=code)
    _run(
        where, listening, settings=values, folder=folder, port=port, code=code, ui=ui, reload=reload
    )


def _dagster_home(given: Path | None, *, home: Path, code: "CodeLocation") -> Path:
    if given is not None:
        return given
    if named := os.environ.get("DAGSTER_HOME"):
        return Path(named)
    in_project = code.folder / "dagster_home"
    return in_project if code.is_project and in_project.is_dir() else home / "dagster"


def _run(
    home: Path,
    listening: "Listening",
    *,
    settings: "Values | None",
    folder: Path,
    port: int,
    code: "CodeLocation",
    ui: str | None,
    reload: bool = False,
) -> None:
    """Run all until Ctrl-C, or until the broker cannot be restarted.

    Args:
        home: the home of the broker.
        listening: addresses and TLS of the broker.
        settings: changes to the broker's stored settings.
        folder: the DAGSTER_HOME.
        port: the port of Dagster's UI; 0 picks a free one.
        code: the code that Dagster loads.
        ui: the address of the page; None: the default one, or another if it is taken.
        reload: load the code again when its files change.
    """
    from rmq_pipeline.cli.supervisor import Supervisor
    from rmq_pipeline.flight.process import Interruption
    from rmq_pipeline.orchestration.backoff import FailureWatch
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
        show_message(_addresses(broker.endpoint, home))
        show_message("Dagster  starting …")
        with DevServer(folder, port=port, env={"RMQ_HOME": str(home)}, code=code) as dagster:
            # A message that is sent next finds the topics of the project.
            for sensor in dagster.wait_for_topics(interruption.wait):
                show_message(
                    f"The sensor {sensor} has not created its topics yet: look at its ticks."
                )
            show_message(_loaded(code, dagster))
            show_message(f"Dagster  {dagster.url}   DAGSTER_HOME {folder}")
            page = _page(ui, home=home, insecure=listening.insecure, dagster_url=dagster.url)
            watch = FailureWatch(
                folder, url=dagster.url, tell=show_message, code_since_s=dagster.code_since_s
            )
            with watch, page, _reloading(dagster, code, home=home) if reload else nullcontext():
                show_message("Ctrl-C stops all.")
                interruption.wait()
            show_message("Stopping …")
    if failures:
        raise failures[0]


def _reloading(
    dagster: "DevServer", code: "CodeLocation", *, home: Path
) -> AbstractContextManager[object]:
    from rmq_pipeline.orchestration.code_reload import CodeReload, Sources

    sources = Sources(code.folder, ignored=[home, dagster.dagster_home])
    return CodeReload(dagster, sources, tell=show_message)


def _checked(code: "CodeLocation", *, reload: bool) -> "CodeLocation":
    if reload and not code.is_project:
        raise RequestError(
            "There is no project to reload.", remedy="Name its module with -m, or omit --reload."
        )
    return code


def _check_page(address: str | None) -> None:
    """Refuse a given address that is taken, before anything is started."""
    if address is not None and address != NO_PAGE:
        from rmq_pipeline.access.source import check_free, split_address

        check_free(*split_address(address))


@contextmanager
def _page(
    address: str | None, *, home: Path, insecure: bool, dagster_url: str | None
) -> Iterator[None]:
    """Serve the page within the block."""
    from rmq_pipeline.web.server import ANY_PORT, DEFAULT_ADDRESS, PageServer, Where

    if address == NO_PAGE:
        yield
        return
    connect = Where(home=home).connect

    def server(at: str) -> PageServer:
        return PageServer(connect, at, insecure=insecure, dagster_url=dagster_url)

    try:
        made = server(address or DEFAULT_ADDRESS).start()
    except (RequestError, OperatorError) as error:
        if address is not None:
            raise
        show_message(f"{error.message} The page gets another port.")
        made = server(ANY_PORT).start()
    try:
        show_message(f"page     {made.url}")
        yield
    finally:
        made.stop()


def ui(
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Address of the page. Default: 127.0.0.1:8083; port 0 picks a free port.",
        ),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    insecure: Insecure = False,
    dagster: Annotated[
        str | None,
        typer.Option("--dagster", metavar="URL", help="Dagster's UI, for links to its runs."),
    ] = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Serve the web page of a broker until Ctrl-C.

    It shows topics, groups and messages, now and as of any moment. If the broker has users, a
    browser must sign in as one of them, and has this user's rights.
    """
    extras.check("ui")
    from rmq_pipeline.endpoint import default_home
    from rmq_pipeline.flight.process import Interruption
    from rmq_pipeline.web.server import DEFAULT_ADDRESS, PageServer, Where

    logs.set_up(log_level, log_format)
    address = flight or (None if home else os.environ.get("RMQ_FLIGHT"))
    where = Where(address, home=None if address else (home or default_home()).absolute())
    interruption = Interruption()
    made = PageServer(
        where.connect, listen or DEFAULT_ADDRESS, insecure=insecure, dagster_url=dagster
    )
    with made:
        show_message(f"page     {made.url}   broker {address or where.home}")
        show_message("Ctrl-C stops it.")
        interruption.wait()


def _loaded(code: "CodeLocation", dagster: "DevServer") -> str:
    from rmq_pipeline.orchestration.upkeep_assets import GROUP

    if not code.is_project:
        return "project  none: `rmq init NAME` writes one. Only the background work runs."
    project = f"project  {code.module}   {code.folder}"
    with suppress(OSError, ValueError):  # this line need not wait for a busy webserver
        if dagster.graphql.asset_groups() <= {GROUP}:
            hint = "It has no pipelines. Give them to definitions(pipelines=[…])."
            return f"{project}\n         {hint}"
    return project


def _addresses(endpoint: "Endpoint", home: Path) -> str:
    return f"broker   {endpoint.flight}   gRPC {endpoint.grpc or '-'}   home {home}"


def init(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project's package.")],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-d",
            metavar="DIR",
            help="The project becomes a folder in it. Default: the current folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a new Dagster project with topics, consumers, a transaction checker and tests.

    It runs as it is: `cd NAME`, then `rmq up` and `pytest`.
    """
    from rmq_pipeline import scaffold

    parent = (directory or Path()).absolute()
    files = scaffold.write(name, parent)
    if as_json:
        print_json({"project": str(parent / name), "files": [str(file) for file in files]})
        return
    for file in files:
        show_message(f"wrote  {file.relative_to(parent)}")
    show_message(f"Next: cd {parent / name if directory else name} && rmq up")


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

    Needs the extra `demo` and a JDK. Uses a new home, a new DAGSTER_HOME and free ports.
    Exit code 1: a check failed.
    """
    # No module of the library imports an example, so this process becomes the example's program.
    # With -P, a folder `rmq_pipeline` in the current directory cannot hide the library.
    command = [sys.executable, "-P", "-m", DEMO_MODULE, "--days", str(days)]
    command += ["--micro-batch", str(micro_batch)] if micro_batch else []
    command += ["--keep"] if keep else []
    command += ["--json"] if as_json else []
    command += ["--timeout", str(timeout)] if timeout is not None else []
    extras.check("demo")
    # set_up also stores the options in the environment, which the example inherits.
    logs.set_up(log_level, log_format)
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell: that is wanted
