"""Files of a log that is in a store: what its leader shares, and what other homes take over.

Segments are in the archive's root, which all homes of the log have. History files are there and in
each home that needs them. The history of keyed states is in no frame and in no shared file: each
home writes its own from the frames, before it drops them.

A leader may be fenced without noticing it, and go on later. Therefore:

    names       have the epoch of the leader that wrote the file; no other leader writes them
    a file      counts once its event is in the store, which refuses those of a fenced leader
    deletions   follow an event in the store that a file counts no longer; or they are of files that
                no event names, of the leader's own epoch and earlier ones
    frames      go from the store once the copy of the state before the newest (shared_state.py) has
                what they did; the store names the newest, and refuses the name and the deletion to
                a fenced leader
    manifests   are derived: a fenced leader may replace one that is being written, and the next
                seal of the topic, or the next leader, writes it again
"""

import logging
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import place
from rmq_pipeline.archive.shared_history import SharedHistory
from rmq_pipeline.broker.decide.request import CheckFence
from rmq_pipeline.broker.work import keyed_state, shared_state
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.home import check_has_archive
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.broker.work.shared_state import StateCopy
from rmq_pipeline.errors import StorageError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.history import GRACE_S
from rmq_pipeline.store.log.commit_log import FaultPoint
from rmq_pipeline.store.stored_state import finish_copy

log = logging.getLogger(__name__)

#: Full log files that are sealed between two copies of the state, at least.
_TRIM_FILES: Final = 4
#: Bytes of log whose keyed states are written at once.
_STATES_BYTES: Final = 64 * MIB


def put(engine: Engine, path: Path) -> None:
    """Share a history file of the home, before it is registered.

    Raises:
        OSError: the archive cannot be written.
    """
    if engine.shared_history is not None:
        engine.shared_history.put(path.relative_to(engine.home.path).as_posix())


def settled_topics(engine: Engine) -> Collection[int]:
    """Return the ids of topics that may exist for the next leader; none if there is no other one.

    The state runs ahead of the log: it may lack a topic whose deletion is not stored, and never
    will be. All that was decided before this call is stored when it returns, and the state has it.
    """
    before = set(engine.state.topics)
    engine.submit(CheckFence(None))
    if engine.replication is None:
        return ()
    engine.confirm()
    return before


def trim(engine: Engine, fault: FaultPoint) -> None:
    """Copy the state, and trim the log in the store up to the copy before.

    A home that lags by less than a copy, or is fetching the last one, still finds its frames. What
    a leader does not delete, because it dies, its successor deletes after the next copy. The caller
    holds the seal lock, and the home has all that was sealed.

    Args:
        fault: called with the name of each step.

    Raises:
        StorageError: the archive lacks a file, or the store does not answer.
        LogFencedError: another broker leads.
        OSError: the archive cannot be written.
    """
    leads, history = engine.leads, engine.shared_history
    if leads is None or history is None:
        return
    before, sealed_to = leads.copy, engine.segments.sealed_to
    since = sealed_to - (before.sealed_to if before else 0)
    # A copy is written for at least as much log, so both are written about twice.
    if since < max(_TRIM_FILES * engine.settings.log_file_bytes, _size(engine.home.database)):
        return
    check_has_archive(history.root, log_id=leads.log_id, claimed=leads.archive)
    if not _has_space(engine):
        log.warning("The state is not copied to the archive: the disk has too little free space.")
        return
    # Before the copy is made, and again for what it names: frames are deleted after this.
    _check_shared(engine, history, files=_counted(engine))
    copy = _copied(engine, history)
    fault("state_copied")
    leads.note_copy(copy)
    fault("state_noted")
    if before is not None:
        leads.replication.store.trim(before.sealed_to)
        log.info("trimmed the log in its store: to=%d", before.sealed_to)
    fault("store_trimmed")
    kept = {copy.folder, *([before.folder] if before else [])}
    shared_state.delete_others(history.root, kept, epoch=engine.epoch)


def _copied(engine: Engine, history: SharedHistory) -> StateCopy:
    folder = engine.home.path / shared_state.COPYING
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        engine.database.copy(folder)
        try:
            facts = finish_copy(folder / FILE_NAME)
        except ValueError as error:
            raise StorageError(f"The copy of the state cannot be read: {error}.") from error
        _check_shared(engine, history, files=facts.files)
        assert engine.replication is not None, "the broker that leads"
        engine.replication.wait_for(facts.dispatched)
        return shared_state.store(
            history.root,
            home=engine.home.path,
            database=folder / FILE_NAME,
            at=(facts.dispatched, facts.sealed_to),
            epoch=engine.epoch,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_space(engine: Engine) -> bool:
    """Return True if the copy of the database leaves space for the log."""
    database = engine.home.database
    files = (database, database.with_name(f"{database.name}.wal"))
    size = sum(_size(path) for path in files if path.exists())
    return free_bytes(engine.home.path) > 2 * size + engine.settings.log_file_bytes


def _counted(engine: Engine) -> set[str]:
    segments = segments_of(engine)
    sealed = [each for topic_id in segments.topics_sealed() for each in segments.of_topic(topic_id)]
    return {f"topics/{each.relative}" for each in sealed} | _registered(engine)


def _check_shared(engine: Engine, history: SharedHistory, *, files: Collection[str]) -> None:
    """Check that the archive has all files that a copy names."""
    root = engine.segments.root
    there, shared = root.files("").keys(), history.paths()
    for path in sorted(files):
        folder, _, relative = path.partition("/")
        if folder == "topics":
            segment = Segment.from_path(relative)
            if segment.topic_id not in engine.state.topics:
                continue
            is_there = place(root, segment) in there
        else:
            is_there = path in shared
        if not is_there:
            raise StorageError(
                f"{path} is not in {root}: the log in its store is not trimmed.",
                remedy="Restore the file, or wait: if it has just expired, the next seal trims.",
            )


def _size(path: Path) -> int:
    return path.stat().st_size


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that has a folder."""
    return shutil.disk_usage(folder).free


def sweep(engine: Engine) -> None:
    """Delete history files in the archive that no longer count; the leader calls it."""
    if engine.shared_history is None:
        return
    for path in engine.shared_history.sweep(
        _registered(engine), epoch=engine.epoch, grace_s=GRACE_S
    ):
        log.info("Deleted %s, which no query reads.", path)


def fetch(engine: Engine, paths: Iterable[str]) -> None:
    """Fetch the history files that the home lacks.

    Raises:
        StorageError: a file cannot be read, or the disk is full.
    """
    if engine.shared_history is not None:
        for path in paths:
            engine.shared_history.fetch(path)


def take_over(engine: Engine) -> None:
    """Write the keyed states of the log that other leaders have sealed.

    History files come when a query or a merge needs them: on a full disk nothing could be sealed.

    Raises:
        StorageError: a file cannot be read.
        OSError: a file cannot be written.
    """
    if engine.shared_history is None:
        return
    sealed_to = segments_of(engine).sealed_to
    if engine.database.has_keyed_state():
        for start, end in _parts(engine, sealed_to):
            keyed_state.keep(engine, start=start, end=end)


def follow(engine: Engine) -> None:
    """Drop from the home of a standby what the leader has sealed.

    Raises:
        StorageError: a file cannot be read.
        OSError: a file cannot be written.
    """
    if engine.shared_history is None:
        return
    with engine.segments.sealing:
        sealed_to = segments_of(engine).sealed_to
        if not engine.log.can_drop_before(sealed_to):
            return
        take_over(engine)
        engine.database.sweep_history()
        engine.database.delete_events(sealed_to)
        engine.database.checkpoint()
        dropped = engine.log.drop_before(sealed_to)
    log.info("dropped sealed log: to=%d files=%d", sealed_to, len(dropped))


def _registered(engine: Engine) -> set[str]:
    kept = engine.database.kept_history()
    paths = [
        *kept.snapshots.column("path").to_pylist(),
        *kept.event_files.column("path").to_pylist(),
    ]
    return {path for path in paths if path is not None}


def _parts(engine: Engine, sealed_to: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the sealed log that the home still has.

    Some states may have been written before; written again, they replace these.
    """
    start = end = engine.log.first
    for end, _ in engine.log.frames(start, sealed_to):
        if end - start >= _STATES_BYTES:
            yield start, end
            start = end
    if end > start:
        yield start, end
