"""``rmq verify``: a check of all files of a home or a sink for damage."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmq_pipeline.cli.options import AsJson, Home
from rmq_pipeline.cli.output import print_json, progress, show_message, show_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rmq_pipeline.broker.verification import Verified

_MIB = 1 << 20


def verify(
    *,
    home: Home = None,
    sink: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check the files of this sink instead of a home."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read all files of a home and list the damaged ones. Exit code 1: some are damaged.

    Stop the broker first (`rmq stop`). The command changes nothing.
    """
    from rmq_pipeline.broker import verification
    from rmq_pipeline.endpoint import default_home

    where = (sink or home or default_home()).absolute()
    found = _shown(verification.verify_sink(where) if sink else verification.verify(where))
    damaged = [
        {"file": each.path, "kind": each.kind, "damage": each.damage, "remedy": each.remedy}
        for each in found
        if each.damage is not None
    ]
    counts = Counter(each.kind for each in found)
    size = sum(each.bytes for each in found)
    if as_json:
        of_kinds = dict(sorted(counts.items()))
        facts = {"place": str(where), "files": len(found), "bytes": size, "kinds": of_kinds}
        print_json({**facts, "damaged": damaged})
    else:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        show_rows(damaged, as_json=False, empty=f"{where} has no damaged files.")
        show_message(f"{len(found)} files, {size / _MIB:.1f} MiB: {kinds}.")
    if damaged:
        raise typer.Exit(1)


def _shown(files: "Iterator[Verified]") -> "list[Verified]":
    """Collect all results, and show a progress bar meanwhile."""
    found, done = [], 0
    with progress(unit="MiB") as bars:
        task = bars.add_task("reading", total=None, done=0)
        for each in files:
            found.append(each)
            done += each.bytes
            bars.update(task, done=done // _MIB)
    return found
