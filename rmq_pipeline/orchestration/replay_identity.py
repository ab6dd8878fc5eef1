"""Id of a run's replay: work done under an id is not repeated.

The runs of a backfill share its id. Dagster drops the backfill's tags when a run of an ended
backfill is re-executed. A re-executed backfill gets a new id. A run therefore stores its id in a
tag of its own, which re-executions inherit. It also looks for the id in its ancestors.
"""

from collections.abc import Iterator
from typing import Final

import dagster as dg

#: Written by the run itself, and inherited by its re-executions.
REPLAY_ID_TAG: Final = "rmq/replay_id"
#: The first backfill of a chain of re-executions, and the run's own backfill.
_BACKFILL_TAGS: Final = ("dagster/root_backfill_id", "dagster/backfill")
#: Maximum number of ancestors examined.
_GENERATIONS: Final = 100


def identify(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return the id of a run's replay, and store it in the run's tags.

    Raises:
        LookupError: the run re-executes a deleted run, and no ancestor has the id.
    """
    found = replay_id_of(instance, run)
    instance.add_run_tags(run.run_id, {REPLAY_ID_TAG: found})
    return found


def replay_id_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return the id of a run's replay: the id of its first run or backfill.

    Raises:
        LookupError: the run re-executes a deleted run, and no ancestor has the id.
    """
    last = run
    for each in _descent(instance, run):
        last = each
        for tag in (REPLAY_ID_TAG, *_BACKFILL_TAGS):
            if said := each.tags.get(tag):
                return said
    if last.parent_run_id or last.root_run_id:
        raise LookupError(
            f"This run re-executes run {last.parent_run_id or last.root_run_id}, which was deleted,"
            " so the id of its replay is unknown and the replay could be made twice. Set replay_id:"
            " the id of the first run or backfill to have it made once, or a new one to have it"
            " made again."
        )
    return last.run_id


def _descent(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterator[dg.DagsterRun]:
    """Yield the run, its parent, and so on; the root replaces a deleted parent."""
    at: dg.DagsterRun | None = run
    for _ in range(_GENERATIONS):
        if at is None:
            return
        yield at
        parent = _run(instance, at.parent_run_id)
        root = at.root_run_id if at.root_run_id != at.parent_run_id else None
        at = parent or _run(instance, root)


def _run(instance: dg.DagsterInstance, run_id: str | None) -> dg.DagsterRun | None:
    return None if run_id is None else instance.get_run_by_id(run_id)
