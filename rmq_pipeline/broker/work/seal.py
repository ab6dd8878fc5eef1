"""Seal: write old log to Parquet, and drop its files.

The log before ``sealed_to`` is sealed: its messages are in registered segments, its events in
registered event files. A turn takes the next frames up to a limit. It writes, syncs and renames
files; ONE frame registers all of them and moves ``sealed_to``. Then DuckDB deletes those events and
is checkpointed, and whole log files before ``sealed_to`` are dropped. A crash before the frame
leaves unregistered files: the next seal deletes them and starts over. A crash after it leaves steps
that the next seal repeats.

If the log is in a store, the files have the leader's epoch in their names, and the frame must be in
the store before anything goes (see shared_files.py).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import durable_files, limits
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import UNFINISHED, Segment
from rmq_pipeline.archive.segment_file import SegmentWriter, place, show
from rmq_pipeline.archive.shared_history import name_of
from rmq_pipeline.broker.decide.request import Fence, RefillReserve
from rmq_pipeline.broker.decide.segments import RegisterSealed, Sealed
from rmq_pipeline.broker.work import event_history, keyed_state, shared_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES
from rmq_pipeline.errors import RequestError, StorageError, StoreFullError
from rmq_pipeline.storage.root import is_uri, shown
from rmq_pipeline.store.log import log_file, reserve
from rmq_pipeline.store.log.commit_log import CommitLog, FaultPoint, Section
from rmq_pipeline.store.segment_reader import Segments

#: Bytes of messages that are sorted together.
_SORT_BYTES: Final = 32 * limits.MIB
#: Number of full log files that stay, unless they are old.
_KEPT_FILES: Final = 4
log = logging.getLogger(__name__)
_COUNTS: Final = ("segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files")
#: While the archive is away, how long a seal waits until it tries again.
_RETRY_MS: Final = 30_000
#: Bytes of log that one frame registers; also the largest segment of a busy queue.
_TURN_BYTES: Final = 256 * limits.MIB
_NEEDS_ARCHIVE: Final = (
    "The log is in log_store, and archive_root is not set: no messages are sealed or expire."
)
#: On a full disk a turn takes 1/8 of the reserve, and at most as much log.
_RESERVE_SHARES: Final = 8
#: Space that a checkpoint may need. DuckDB must be reopened after a checkpoint that found no space.
_ROOM_OF_DUCKDB: Final = 4 * limits.MIB


@dataclass(frozen=True, slots=True)
class Reach:
    """End of the sealable range.

    The range has frames written up to ``horizon_ms``, and frames that end by ``position``.
    """

    horizon_ms: int
    position: int
    #: Frames after this position are not sealed: sealing writes frames itself, and would not end.
    stop: int


def sealable(engine: Engine) -> int:
    """Return the log position up to which the log is synced, in DuckDB and in its store."""
    dispatched: int = engine.database.dispatched
    reached = min(engine.log.synced, dispatched)
    return reached if engine.replication is None else min(reached, engine.replication.confirmed)


def reach(engine: Engine, *, squeezed: bool) -> Reach:
    """Return the range to seal now.

    On a full disk (``squeezed``) that is the whole log, if a log file can be dropped then.
    """
    now_ms, after_ms = engine.clock.now_ms(), engine.settings.seal_after_ms
    engine.dispatched()  # segments are registered behind all earlier frames
    stop = sealable(engine)
    segments = engine.segments
    if squeezed and engine.log.end - engine.log.first > engine.settings.log_file_bytes:
        return Reach(now_ms, stop, stop)
    position = segments.sealed_to
    if stop - position > _kept_bytes(engine) + engine.settings.log_file_bytes:
        position = stop - _kept_bytes(engine)
    oldest_ms = _oldest_message_ms(engine, segments)
    old = oldest_ms is not None and oldest_ms + after_ms <= now_ms
    return Reach(now_ms - after_ms // 2 if old else -1, position, stop)


def due(engine: Engine) -> dict[str, Any]:
    """Return ``next_due_ms``, None if unknown, and ``due``, the bytes of log to seal now.

    ``waits`` says why nothing is sealed. While the archive's store is away, seal is due every 30
    seconds.
    """
    if engine.keeps_all:
        return {"next_due_ms": None, "due": 0, "waits": _NEEDS_ARCHIVE}
    if engine.followed is not None:
        return {"next_due_ms": None, "due": 0}
    segments = segments_of(engine)
    if segments.away is not None:
        at_ms, why = segments.away
        if engine.clock.now_ms() < at_ms + _RETRY_MS:
            return {"next_due_ms": at_ms + _RETRY_MS, "due": 0, "waits": why}
    try:
        oldest_ms = _oldest_message_ms(engine, segments)
    except LookupError:  # a seal is dropping this part of the log
        return {"next_due_ms": None, "due": 0}
    now_ms = engine.clock.now_ms()
    unsealed = sealable(engine) - segments.sealed_to
    if unsealed > _kept_bytes(engine) + engine.settings.log_file_bytes:
        return {"next_due_ms": now_ms, "due": unsealed - _kept_bytes(engine)}
    if oldest_ms is None:
        return {"next_due_ms": None, "due": 0}
    at_ms = oldest_ms + engine.settings.seal_after_ms
    return {"next_due_ms": at_ms, "due": unsealed if at_ms <= now_ms else 0}


def note_away(engine: Engine, error: Exception) -> None:
    """Note that the archive's store cannot be reached, unless the archive is a local folder.

    Errors of the system have a number: those of the local log, or a file that is missing.
    """
    address = engine.settings.archive_root
    if not isinstance(error, OSError) or error.errno is not None:
        return
    if address is not None and is_uri(address):
        why = f"{shown(address)} cannot be reached: {error}"
        engine.segments.away = engine.clock.now_ms(), why


def _kept_bytes(engine: Engine) -> int:
    return _KEPT_FILES * engine.settings.log_file_bytes


def _oldest_message_ms(engine: Engine, segments: Segments) -> int | None:
    """Return when the first unsealed message was stored; None: there is none.

    Events alone start no seal, because registering files writes events.
    """
    position, oldest_ms = segments.looked_at
    if oldest_ms is not None and position >= segments.sealed_to:
        return oldest_ms
    position, oldest_ms = max(position, segments.sealed_to), None
    for end, sections in engine.log.frames(position, sealable(engine)):
        found = [s for s in sections if s.kind == MESSAGES and s.batch.num_rows]
        if found:
            oldest_ms = _time_of(found)
            break
        position = end
    segments.looked_at = position, oldest_ms
    return oldest_ms


class Frames:
    """Sealable frames from ``start`` on; ``end`` is the end of the frames returned so far."""

    def __init__(self, commit_log: CommitLog, start: int, *, sealable: Reach) -> None:
        self._frames = commit_log.frames(start, sealable.stop)
        self._sealable = sealable
        self._start = start
        self.end = start

    def messages(self, limit_bytes: int) -> Iterator[list[pa.RecordBatch]]:
        """Yield their messages in lists of about _SORT_BYTES, up to the limit."""
        batches: list[pa.RecordBatch] = []
        size = 0
        for end, sections in self._frames:
            if end > self._sealable.position and _time_of(sections) > self._sealable.horizon_ms:
                break
            batches.extend(section.batch for section in sections if section.kind == MESSAGES)
            size += end - self.end
            self.end = end
            if size >= _SORT_BYTES and batches:
                yield batches
                batches, size = [], 0
            if end - self._start >= limit_bytes:
                break
        if batches:
            yield batches


def _time_of(sections: list[Section]) -> int:
    """Return when a frame was written; 0 if no row of it has a time."""
    names = {MESSAGES: "stored_at_ms", EVENTS: "at_ms"}
    for section in sections:
        if section.kind in names and section.batch.num_rows:
            at_ms: int = section.batch.column(names[section.kind])[0].as_py()
            return at_ms
    return 0


def seal(
    engine: Engine, *, limit_bytes: int, window: Fence | None, fault: FaultPoint | None = None
) -> dict[str, int]:
    """Seal the oldest log if it is due, and drop sealed log files.

    The log is due when it has messages older than ``seal_after_ms``. Then all frames older than
    half of that are sealed, so that a trickle of messages does not make a file each. Frames before
    the newest full files are due at any age.

    Args:
        limit_bytes: most bytes of log; one frame may exceed it.
        fault: called with the name of each step.

    Returns:
        segments, rows and bytes of Parquet written, raw_bytes of these messages in memory,
        event_rows, dropped_files; and those of ``event_history.keep``.

    Raises:
        FencedError: a newer epoch has opened the window; nothing was registered.
        StoreFullError: the disk has no space for the Parquet files, even with the reserve.
        StorageError: the files cannot be written for another reason.
    """
    if limit_bytes <= 0:
        raise RequestError(f"limit_bytes is {limit_bytes} and must be positive.")
    if engine.keeps_all:
        engine.submit(RefillReserve(window))
        return dict.fromkeys((*_COUNTS, *event_history.COUNTS), 0)
    file_bytes = engine.settings.log_file_bytes
    with engine.segments.sealing:
        whole = engine.submit(RefillReserve(window))
        turns = _Turns(engine, window=window, fault=fault or _no_fault)
        try:
            engine.segments.claim()
            turns.run(
                limit_bytes,
                squeezed=not whole or shared_files.free_bytes(engine.home.path) < file_bytes,
            )
        except BaseException as error:
            # Files and registrations may differ now: check them at the next seal.
            engine.segments.loaded = engine.segments.tidy = False
            if isinstance(error, OSError | pa.ArrowException):
                note_away(engine, error)
                is_full = isinstance(error, OSError) and error.errno in log_file.FULL
                kind = StoreFullError if is_full else StorageError
                raise kind(f"Sealing failed: {error}.") from error
            raise
        engine.segments.away = None
        turns.report.update(event_history.keep(engine, window=window, fault=fault or _no_fault))
        if turns.report["dropped_files"]:
            engine.submit(RefillReserve(window))
        try:
            shared_files.trim(engine, fault or _no_fault)
        except OSError as error:
            note_away(engine, error)
            raise StorageError(f"The state was not copied to the archive: {error}.") from error
    return turns.report


def _no_fault(_step: str) -> None:
    return


class _Turns:
    """One run of seal."""

    def __init__(self, engine: Engine, *, window: Fence | None, fault: FaultPoint) -> None:
        self._engine = engine
        self._window = window
        self._fault = fault
        self.report = dict.fromkeys(_COUNTS, 0)

    def run(self, limit_bytes: int, *, squeezed: bool) -> None:
        """Seal in turns of _TURN_BYTES until nothing is due, the limit, or the broker's close."""
        engine = self._engine
        if not engine.segments.tidy:
            self._clean_up()
        self._forget_deleted_topics()
        self._drop()
        sealable = reach(engine, squeezed=squeezed)
        left = limit_bytes
        while left > 0 and not engine.wakeups.closed:
            start = engine.segments.sealed_to
            if not self._turn(min(left, _TURN_BYTES), sealable):
                return
            left -= engine.segments.sealed_to - start

    def _clean_up(self) -> None:
        """Make the folders match the log, and finish the steps that a crash interrupted."""
        engine = self._engine
        segments = segments_of(engine)
        shared_files.take_over(engine)
        self._tidy_topics()
        event_history.sweep(engine)
        if segments.sealed_to:
            self._let_events_go()
        segments.tidy = True

    def _tidy_topics(self) -> None:
        state = self._engine.state
        with self._engine.segments.changing:
            # A merge meanwhile may be stored without an answer: its file counts.
            before = shared_files.settled_topics(self._engine)
            segments = segments_of(self._engine)
            registered = [
                s for topic_id in segments.topics_sealed() for s in segments.of_topic(topic_id)
            ]
            manifest.tidy(
                segments.root,
                registered,
                exists=lambda topic_id: topic_id in before or topic_id in state.topics,
                now_ms=self._engine.clock.now_ms(),
                epoch=self._engine.epoch,
            )

    def _forget_deleted_topics(self) -> None:
        engine, segments = self._engine, self._engine.segments
        sealed = segments.topics_sealed()
        if sealed.keys() <= engine.state.topics.keys():
            return
        before = shared_files.settled_topics(engine)
        for topic_id, topic in sealed.items():
            if topic_id not in before and topic_id not in engine.state.topics:
                with segments.changing:
                    segments.forget(topic_id)
                    manifest.remove_topic(
                        segments.root, topic=topic, topic_id=topic_id, epoch=engine.epoch
                    )

    def _turn(self, limit_bytes: int, sealable: Reach) -> bool:
        """Seal some frames; return False if there are none."""
        start = self._engine.segments.sealed_to
        try:
            done = self._write(start, limit_bytes=limit_bytes, sealable=sealable)
        except OSError as error:
            if error.errno not in log_file.FULL:
                raise
            share = max(self._engine.settings.reserve_bytes // _RESERVE_SHARES, limits.MIB)
            self._make_room(2 * share)
            self._tidy_topics()
            done = self._write(start, limit_bytes=min(limit_bytes, share), sealable=sealable)
        if done is None:
            return False
        self._register(done)
        self._let_events_go()
        self._drop()
        return True

    def _write(self, start: int, *, limit_bytes: int, sealable: Reach) -> Sealed | None:
        """Write the files of a turn and rename them to their final names."""
        engine = self._engine
        frames = Frames(engine.log, start, sealable=sealable)
        writer = SegmentWriter(
            engine.segments.root, lambda topic_id: _name_of(engine, topic_id), epoch=engine.epoch
        )
        try:
            for batches in frames.messages(limit_bytes):
                writer.add(batches)
            if frames.end == start:
                return None
            writer.finish()
            self._fault("segments_written")
            segments = writer.publish()
        except BaseException:
            writer.abort()
            raise
        self._fault("segments_renamed")
        keyed_state.keep(engine, start=start, end=frames.end)
        path, rows = self._write_events(start, frames.end)
        return Sealed(tuple(segments), path, rows, start, frames.end, writer.raw_bytes)

    def _write_events(self, start: int, end: int) -> tuple[Path, int]:
        folder = self._engine.home.events
        path = folder / name_of(f"{start:020d}-{end:020d}", epoch=self._engine.epoch)
        unfinished = folder / f".{start:020d}{UNFINISHED}"
        rows = self._engine.database.export_events(end, unfinished)
        self._fault("events_written")
        durable_files.publish(unfinished, path)
        shared_files.put(self._engine, path)
        self._fault("events_renamed")
        return path, rows

    def _register(self, done: "Sealed") -> None:
        engine, report = self._engine, self.report
        segments = engine.segments
        root = segments.root
        sizes = tuple(root.size(place(root, segment)) for segment in done.segments)
        with segments.changing:
            registered: list[Segment] = engine.submit(RegisterSealed(done, sizes, self._window))
            engine.confirm()
            self._fault("registered")
            segments.add(registered, sealed_to=done.end)
            show(root, registered)
            for topic, topic_id in sorted({(s.topic, s.topic_id) for s in registered}):
                counted = segments.of_topic(topic_id)
                manifest.write(root, counted, topic=topic, topic_id=topic_id, epoch=engine.epoch)
            self._fault("manifests_written")
        report["segments"] += len(registered)
        report["rows"] += sum(segment.rows for segment in registered)
        report["bytes"] += sum(sizes)
        report["raw_bytes"] += done.raw_bytes
        report["event_rows"] += done.event_rows

    def _let_events_go(self) -> None:
        """Wait until DuckDB has the registrations, then delete its events that are in Parquet."""
        engine = self._engine
        # DuckDB must have the registrations before the log is dropped.
        engine.dispatched()
        self._make_room(_ROOM_OF_DUCKDB)
        engine.database.delete_events(engine.segments.sealed_to)
        self._fault("events_deleted")
        engine.database.checkpoint()
        self._fault("checkpointed")

    def _make_room(self, wanted_bytes: int) -> None:
        """Ensure this much free disk space, if needed from at most half of the reserve."""
        engine = self._engine
        missing = wanted_bytes - shared_files.free_bytes(engine.home.path)
        if missing <= 0:
            return
        left = (engine.home.log / reserve.NAME).stat().st_size - missing
        if left < engine.settings.reserve_bytes // 2:
            raise StoreFullError(
                f"Sealing lacks {missing} bytes of disk; half of the reserve is kept for receive "
                "and settle."
            )
        engine.log.draw_reserve(missing)

    def _drop(self) -> None:
        dropped = self._engine.log.drop_before(self._engine.segments.sealed_to)
        self.report["dropped_files"] += len(dropped)
        if dropped:
            self._fault("log_dropped")


def _name_of(engine: Engine, topic_id: int) -> str | None:
    found = engine.state.topics.get(topic_id)
    return found.topic.name if found else None
