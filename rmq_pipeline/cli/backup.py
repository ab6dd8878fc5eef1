"""``rmq backup``, ``rmq restore``, ``rmq fork`` and ``rmq repair``."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rmq_pipeline.cli.options import MOMENT, AsJson, Home
from rmq_pipeline.cli.output import (
    print_json,
    progress,
    show_fields,
    show_message,
    show_progress,
    show_rows,
)
from rmq_pipeline.text import format_ms, parse_ms

if TYPE_CHECKING:
    from rmq_pipeline.backup.destination import Destination
    from rmq_pipeline.backup.manifest import Manifest
    from rmq_pipeline.backup.repairing import Plan
    from rmq_pipeline.backup.taking import Report

Dest = Annotated[
    str,
    typer.Argument(metavar="DEST", help="A folder, or a URI such as s3://bucket/backups/rmq."),
]
ToTime = Annotated[
    str | None,
    typer.Option("--to-time", metavar="TIME", help=f"Restore this moment: {MOMENT}."),
]
_MIB: Final = 1 << 20
_COLUMNS: Final = ("number", "earliest", "latest", "last_frame", "files", "bytes")


def backup(
    dest: Dest,
    *,
    home: Home = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="N|DAYSd",
            help="Keep this many backups, or those of this many days (14d). Default: all.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the backups of DEST, and take none.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read all that the backups of DEST name, and take none."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Back up a home, also while its broker runs: only what is new is copied.

    Run it on the machine of the broker, as its user. RMQ_USER and RMQ_PASSWORD need the right
    cluster update if the home has users.
    """
    from rmq_pipeline.backup.destination import Destination
    from rmq_pipeline.backup.taking import back_up
    from rmq_pipeline.endpoint import default_home

    destination = Destination.open(dest)
    if listed:
        rows = [_row(each) for each in destination.manifests()]
        show_rows(rows, as_json=as_json, columns=_COLUMNS, empty="There is no backup.")
        return
    if check:
        _check(destination, as_json=as_json)
        return
    where = (home or default_home()).absolute()
    with _bar("copying") as tell:
        report = back_up(
            where, destination, ask_broker=lambda: _copied(where), keep=keep, tell=tell
        )
    if as_json:
        print_json(_facts(report))
        return
    manifest = report.manifest
    state = f"new, dispatch waited {report.waited_ms:.0f} ms" if report.is_new_snapshot else "kept"
    show_message(
        f"Backup {manifest.number} of {where}: {report.written_bytes / _MIB:.1f} MiB written,"
        f" {manifest.size / _MIB:.1f} MiB in all; the snapshot is {state}."
    )
    if report.deleted_backups or report.deleted_objects:
        show_message(
            f"Deleted {report.deleted_backups} old backups and {report.deleted_objects} files."
        )
    for first, last in report.spans:
        show_message(f"Any moment can be restored from {format_ms(first)} to {format_ms(last)}.")
    show_message(f"The last frame is of {format_ms(manifest.log_end_ms)}.")


def _check(destination: "Destination", *, as_json: bool) -> None:
    manifests = destination.manifests()
    rows = [
        {"number": number, "damage": message} for number, message in destination.damage(manifests)
    ]
    sound = f"All files of {len(manifests)} backups match their checksums."
    show_rows(rows, as_json=as_json, columns=("number", "damage"), empty=sound)
    if rows:
        raise typer.Exit(1)


def restore(
    dest: Dest,
    home: Annotated[Path, typer.Argument(metavar="HOME", help="A new or an empty folder.")],
    *,
    to_time: ToTime = None,
    as_json: AsJson = False,
) -> None:
    """Write a home from a backup, as it was at a moment. Default: the last one."""
    from rmq_pipeline.backup.destination import Destination
    from rmq_pipeline.backup.restoring import restore as restored_home

    to_ms = None if to_time is None else parse_ms(to_time)
    with _bar("restoring") as tell:
        done = restored_home(Destination.open(dest), home, to_ms=to_ms, tell=tell)
    facts = {
        "home": str(home.absolute()),
        "backup": done.manifest.number,
        "last_frame": format_ms(done.at_ms),
        "log_end": done.log_end,
        "cut_bytes": done.cut_bytes,
        "bytes": done.manifest.size,
    }
    if as_json:
        show_fields(facts, as_json=True)
        return
    show_message(
        f"{facts['home']} is as it was at {format_ms(to_ms or done.at_ms)}; its last"
        f" frame is of {facts['last_frame']}. Start it: rmq broker --home {home}"
    )


def fork(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="The home of a broker.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new or an empty folder.")],
    *,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help=f"The state of this moment: {MOMENT}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a home with the state of another one, for development. Default: the state of now.

    The files of messages are not copied where the file system can share them. A fork has no
    users and no addresses.
    """
    from rmq_pipeline.backup.forking import fork as forked_home

    where = home.absolute()
    at_ms = None if at is None else parse_ms(at)
    with _bar("forking") as tell:
        done = forked_home(where, target, at_ms=at_ms, ask_broker=lambda: _copied(where), tell=tell)
    facts = {"home": str(target.absolute()), "at": format_ms(done.at_ms)}
    if as_json:
        show_fields({**facts, "shared": done.shared, "copied": done.copied}, as_json=True)
        return
    show_message(
        f"{facts['home']} is as {where} was at {facts['at']}; it shares {done.shared} files with"
        f" it. Start it: rmq broker --home {target}"
    )


def repair(
    home: Annotated[Path, typer.Argument(metavar="HOME", help="The home of a stopped broker.")],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the command would do, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Repair a home that a start refuses: keep all up to the damage, and set the rest aside.

    Without --yes the command asks. Exit code 1: there is damage, and it was not repaired.
    """
    from rmq_pipeline.backup import repairing

    with repairing.locked(home) as where:
        found = repairing.plan(where)
        if not as_json:
            for line in _plan_lines(found):
                show_message(line)
        wanted = found.is_needed and not dry_run
        if wanted and not yes:
            wanted = not as_json and sys.stdin.isatty() and typer.confirm("Repair it?")
        aside = repairing.repair(found) if wanted else None
    if as_json:
        print_json({**_plan_facts(found), "aside": str(aside) if aside else None})
    elif aside is not None:
        show_message(f"Repaired. {aside} has what was taken out.")
    if found.is_needed and aside is None:
        if not dry_run and not yes and (as_json or not sys.stdin.isatty()):
            show_progress("Nothing was changed. To repair it without a question, give --yes.")
        raise typer.Exit(1)


def _plan_facts(found: "Plan") -> dict[str, Any]:
    from rmq_pipeline.store.log import log_file

    cut_at, end = found.cut or (None, None)
    lost = found.lost
    return {
        "home": str(found.home),
        "damage": list(found.damage),
        "cut_at": cut_at,
        "log_end": end,
        "derives_database": found.is_derived,
        "lost_frames": lost.frames,
        "lost_from": None if lost.first_ms is None else format_ms(lost.first_ms),
        "lost_to": None if lost.last_ms is None else format_ms(lost.last_ms),
        "lost_messages": [
            {
                "topic": found.topics.get(topic_id),
                "topic_id": topic_id,
                "queue_id": queue_id,
                "from_offset": first,
                "messages": end - first,
            }
            for (topic_id, queue_id), (first, end) in sorted(lost.offsets.items())
        ],
        "log_begins_at": found.first,
        "new_headers": [str(log_file.path_of(found.home / "log", each)) for each in found.headers],
        "segments_written_again": [each.relative for each, _ in found.missing],
    }


def _plan_lines(found: "Plan") -> Iterator[str]:
    facts = _plan_facts(found)
    if not found.is_needed:
        yield f"The log and the database of {found.home} have no damage that a start refuses."
        return
    yield from found.damage
    if found.cut is not None:
        yield (
            f"The log is cut at position {facts['cut_at']}: it loses"
            f" {facts['log_end'] - facts['cut_at']} bytes, with {facts['lost_frames']} frames that"
            " can be read"
            + (
                f", from {facts['lost_from']} to {facts['lost_to']}."
                if found.lost.first_ms
                else "."
            )
        )
    for row in facts["lost_messages"]:
        yield (
            f"It loses at least {row['messages']} messages of topic"
            f" {row['topic'] or row['topic_id']} from offset {row['from_offset']} of queue"
            f" {row['queue_id']} on."
        )
    for path in facts["new_headers"]:
        yield f"The header of {path} is written again; its frames are sound."
    if found.first and found.sets_aside:
        yield (
            f"The files of the log before position {found.first} are set aside: their messages are"
            " in segments, and nothing is lost."
        )
    for path in facts["segments_written_again"]:
        yield f"{path}, which a merge replaced, is written again from the larger one."
    if found.is_derived:
        yield "The database is made again from the log."


def _copied(home: Path) -> dict[str, Any]:
    """Let the broker of a home copy its state."""
    from rmq_pipeline.backup.snapshot import no_broker
    from rmq_pipeline.endpoint import Endpoint
    from rmq_pipeline.flight.client import Client

    if Endpoint.read(home) is None:
        return no_broker()
    with Client(home=home, retry_s=0) as client:
        return client.copy_state()


@contextmanager
def _bar(what: str) -> Iterator[Callable[[str, int], None]]:
    done = 0
    with progress(unit="MiB") as bars:
        task = bars.add_task(what, total=None, done=0)

        def tell(_name: str, size: int) -> None:
            nonlocal done
            done += size
            bars.update(task, done=done // _MIB)

        yield tell


def _row(manifest: "Manifest") -> dict[str, Any]:
    has_moments = manifest.earliest_ms <= manifest.latest_ms
    return {
        "number": manifest.number,
        "earliest": format_ms(manifest.earliest_ms) if has_moments else None,
        "latest": format_ms(manifest.latest_ms) if has_moments else None,
        "last_frame": format_ms(manifest.log_end_ms),
        "files": len(manifest.files) + len(manifest.log),
        "bytes": manifest.size,
    }


def _facts(report: "Report") -> dict[str, Any]:
    return {
        **_row(report.manifest),
        "home": report.manifest.home,
        "is_new_snapshot": report.is_new_snapshot,
        "waited_ms": report.waited_ms,
        "written": report.written,
        "written_bytes": report.written_bytes,
        "log_bytes": report.log_bytes,
        "deleted_backups": report.deleted_backups,
        "deleted_objects": report.deleted_objects,
        "restorable": [
            {"from": format_ms(first), "to": format_ms(last)} for first, last in report.spans
        ],
    }
