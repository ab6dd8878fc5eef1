"""History of the state: writing snapshots, merging event files, and dropping old ones.

Runs after each seal, in single steps. One frame registers each step: from then on a file counts, or
counts no longer. A file that does not count is deleted when no query can still read it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import checked_parquet, durable_files
from rmq_pipeline.archive.shared_history import name_of
from rmq_pipeline.broker.decide.request import Fence
from rmq_pipeline.broker.decide.segments import RegisterHistory
from rmq_pipeline.broker.work import shared_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.store import history
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.history import KeptHistory
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.commit_log import FaultPoint

log = logging.getLogger(__name__)
_File = dict[str, Any]

#: Events since the last snapshot that justify another one, once the last one is old enough.
_FEW_EVENTS: Final = 1_000
#: Event files with fewer rows are merged with adjacent ones: at least _MERGED_FILES at once, into a
#: file of at most _MERGED_ROWS.
_SMALL_ROWS: Final = 500_000
_MERGED_FILES: Final = 8
_MERGED_ROWS: Final = 2_000_000
#: Entries of the report.
COUNTS: Final = ("snapshot_rows", "merged_event_rows", "forgotten_files")


def keep(engine: Engine, *, window: Fence | None, fault: FaultPoint) -> dict[str, int]:
    """Run the due steps for the history. The caller holds the seal lock.

    Args:
        fault: called with the name of each step.

    Returns:
        snapshot_rows, merged_event_rows, and forgotten_files.

    Raises:
        FencedError: a newer epoch has opened the window; the written files do not count.
    """
    report = dict.fromkeys(COUNTS, 0)
    steps = _Steps(engine, window=window, fault=fault, report=report)
    try:
        steps.take_snapshot()
        steps.merge()
        steps.forget()
    except (OSError, StoreFullError) as error:
        if isinstance(error, OSError) and error.errno not in log_file.FULL:
            raise StorageError(f"The history was not written: {error}.") from error
        log.warning("The history is written when the disk has free space: %s", error)
    sweep(engine)
    return report


def sweep(engine: Engine) -> None:
    """Delete history files that do not count, once no query can read them."""
    engine.dispatched()  # any frame may have registered a file
    for file in engine.database.sweep_history():
        log.info("Deleted %s, which no query reads.", file)
    shared_files.sweep(engine)


@dataclass(frozen=True, slots=True)
class _Steps:
    engine: Engine
    window: Fence | None
    fault: FaultPoint
    report: dict[str, int]

    def take_snapshot(self) -> None:
        """Write the state to a file if enough events have happened since the last snapshot."""
        engine, settings = self.engine, self.engine.settings
        kept = self._kept()
        last = kept.snapshots.slice(kept.snapshots.num_rows - 1).to_pylist()[0]
        happened = engine.database.events_since(last["position"])
        old = engine.clock.now_ms() - last["at_ms"] >= settings.snapshot_every_ms
        if happened < (
            min(_FEW_EVENTS, settings.snapshot_events) if old else settings.snapshot_events
        ):
            return
        folder = engine.home.path / history.SNAPSHOTS
        unfinished = folder / ".snapshot.unfinished"
        taken = engine.database.export_snapshot(unfinished)
        path = folder / name_of(f"{taken.position:020d}", epoch=engine.epoch)
        durable_files.publish(unfinished, path)
        shared_files.put(engine, path)
        self.fault("snapshot_written")
        self._register(
            {
                Kind.SNAPSHOT: {
                    "path": f"{history.SNAPSHOTS}/{path.name}",
                    "position": taken.position,
                    "taken_at_ms": taken.at_ms,
                    "rows": taken.rows,
                    "bytes": path.stat().st_size,
                }
            }
        )
        self.fault("snapshot_registered")
        self.report["snapshot_rows"] += taken.rows

    def merge(self) -> None:
        """Merge small adjacent event files into one, if there are enough."""
        files = _to_merge(self._kept().event_files.to_pylist())
        if not files:
            return
        home = self.engine.home
        first, last = files[0]["from_position"], files[-1]["to_position"]
        path = home.events / name_of(f"{first:020d}-{last:020d}", epoch=self.engine.epoch)
        unfinished = home.events / ".merged.unfinished"
        shared_files.fetch(self.engine, [file["path"] for file in files])
        sources = [home.path / file["path"] for file in files]
        if damaged := [each for each in sources if not _is_whole(each)]:
            # DuckDB does the merge, and verifies no checksums.
            log.error("%s is damaged and is not merged: restore it.", damaged[0])
            return
        rows = self.engine.database.merge_events(sources, unfinished)
        durable_files.publish(unfinished, path)
        shared_files.put(self.engine, path)
        self.fault("events_merged")
        self._register(
            {
                Kind.EVENT_SEGMENTS_REPLACED: {
                    "removed": [file["path"] for file in files],
                    "path": f"{history.EVENTS}/{path.name}",
                    "from_position": first,
                    "to_position": last,
                    "rows": rows,
                }
            }
        )
        self.fault("events_replaced")
        self.report["merged_event_rows"] += rows

    def forget(self) -> None:
        """Drop files older than the retention, except those that later points in time need."""
        retention_ms = self.engine.settings.history_retention_ms
        if retention_ms is None:
            return
        kept = self._kept()
        horizon_ms = self.engine.clock.now_ms() - retention_ms
        snapshots = kept.snapshots.to_pylist()
        old = list(takewhile(lambda each: each["at_ms"] <= horizon_ms, snapshots))
        if len(old) < 2:
            return
        position = old[-1]["position"]
        # The last file stays at any age: it says how far the log is sealed.
        files = kept.event_files.to_pylist()[:-1]
        removed = [file["path"] for file in files if file["to_position"] <= position]
        self._register(
            {
                Kind.EVENT_SEGMENTS_REPLACED: {"removed": removed},
                Kind.SNAPSHOT: {"kept_from": position},
            }
        )
        self.fault("history_forgotten")
        self.report["forgotten_files"] += len(removed) + len(old) - 1

    def _kept(self) -> KeptHistory:
        self.engine.dispatched()  # each step depends on the registrations of the one before
        return self.engine.database.kept_history()

    def _register(self, details: dict[Kind, _File]) -> None:
        self.engine.submit(RegisterHistory(details, self.window))
        self.engine.confirm()


def _is_whole(path: Path) -> bool:
    try:
        with checked_parquet.open_file(path) as file:
            checked_parquet.count_rows(file)
    except (OSError, pa.ArrowException):
        return False
    return True


def _to_merge(files: Sequence[_File]) -> list[_File]:
    """Return the first run of small adjacent files to merge; empty if there is none."""
    run: list[_File] = []
    rows = 0
    for file in files:
        if file["rows"] >= _SMALL_ROWS or rows + file["rows"] > _MERGED_ROWS:
            if len(run) >= _MERGED_FILES:
                return run
            run, rows = [], 0
        if file["rows"] < _SMALL_ROWS:
            run.append(file)
            rows += file["rows"]
    return run if len(run) >= _MERGED_FILES else []
