"""``rmq sink``: convert sinks of older formats to Delta tables."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, connected, examples
from rmq_pipeline.cli.output import progress, show_rows
from rmq_pipeline.errors import RequestError

if TYPE_CHECKING:
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.storage.root import Address

app = typer.Typer(no_args_is_help=True, help="Sinks: convert old ones to Delta tables.")

_COLUMNS: Final = ("state", "group", "version", "files", "why")
_UNKNOWN: Final = "No group that this user may see lists a file of the folder."
#: States after which a sink is a Delta table.
_DONE: Final = {"converted", "already a Delta table"}


@app.callback()
def sinks() -> None:
    """Sinks: convert old ones to Delta tables."""


@app.command(
    epilog=examples(
        "rmq sink convert aircraft_rotations",
        "rmq sink convert --all",
        "rmq sink convert --all --sinks s3://lake/sinks --json | jq '.[] | .state'",
    )
)
def convert(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SINK", help="Sinks below --sinks, or their paths or URIs."),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Convert each sink below --sinks.")] = False,
    parent: Annotated[
        str | None,
        typer.Option(
            "--sinks",
            metavar="DIR",
            help="The folder of all sinks, or its URI. Default: RMQ_SINKS, then sinks in the home.",
        ),
    ] = None,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Make sinks of older formats Delta tables, without waiting for a window.

    The broker's current list of files is published; no file of rows is written or moved. Consumers
    and compactions may go on meanwhile. Exit code 1: a sink was not converted.
    """
    from rmq_pipeline.endpoint import sinks_root

    if every == bool(names):
        raise RequestError("Name the sinks, or give --all.")
    try:
        root = sinks_root(parent, home=home)
        places = _every_sink(root) if every else {name: _sink(root, name) for name in names or ()}
    except ValueError as error:
        raise RequestError(str(error)) from error
    rows = []
    with connected(home, flight) as client, progress(unit="sinks") as bars:
        task = bars.add_task("converting", total=len(places), done=0)
        for name, place in places.items():
            rows.append({"sink": name, **_converted(client, place)})
            bars.update(task, advance=1, done=len(rows))
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    show_rows(rows, as_json=as_json, columns=told, empty="")
    if not all(row["state"] in _DONE for row in rows):
        raise typer.Exit(1)


def _every_sink(root: "Address") -> dict[str, "Address"]:
    """Return the folders with a manifest."""
    from rmq_pipeline.lake.manifest import NAME
    from rmq_pipeline.storage.place import at
    from rmq_pipeline.storage.root import below

    found = {name: below(root, name) for name in at(root).folders("")}
    sinks = {name: place for name, place in found.items() if at(place).exists(NAME)}
    if not sinks:
        raise RequestError(
            f"{at(root)} has no sinks: no folder in it has a manifest.",
            remedy="Give the folder of the sinks: --sinks, or RMQ_SINKS.",
        )
    return sinks


def _sink(root: "Address", name: str) -> "Address":
    from rmq_pipeline.lake.manifest import NAME
    from rmq_pipeline.storage.place import at
    from rmq_pipeline.storage.root import below

    place = below(root, name)
    if not at(place).exists(NAME):
        raise RequestError(
            f"{at(place)} is no sink: it has no manifest.",
            remedy="Give the path of the sink, or the folder of all sinks by --sinks.",
        )
    return place


def _converted(client: "Client", place: "Address") -> dict[str, Any]:
    """Return a row about the sink; a damaged sink does not keep the others from it."""
    from rmq_pipeline.durable_files import DamagedFileError
    from rmq_pipeline.lake.publication import convert as published
    from rmq_pipeline.storage.place import at

    try:
        done = asdict(published(client, sink=place, likely=at(place).uri.rpartition("/")[2]))
    except (DamagedFileError, ValueError) as error:
        return dict.fromkeys(_COLUMNS) | {"state": "not converted", "why": str(error)}
    is_unknown = done["state"] == "unknown to the broker"
    return {**done, "why": _UNKNOWN if is_unknown else None}
