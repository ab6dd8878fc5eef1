"""Seal: old log becomes Parquet, and its files go.

The log before ``sealed_to`` is sealed: its messages are in registered segments, its events in
registered event Parquet. A turn takes the frames from there on up to a bound. Files are written,
synced and renamed; ONE frame registers all of them, and with it ``sealed_to`` moves. Then what
DuckDB keeps of those events goes, DuckDB is checkpointed, and whole log files before ``sealed_to``
are dropped. A crash before the frame leaves files that nobody registered: the next seal deletes
them and begins again. A crash after it leaves steps that the next seal does again.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import SUFFIX, UNFINISHED, Segment
from rmq_pipeline.archive.segment_file import place, show
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.event_rows import single
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored import history, state_history
from rmq_pipeline.broker.stored.ripe import Frames, Reach, reach
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import RequestError, StorageError, StoreFullError
from rmq_pipeline.store import log_file, reserve
from rmq_pipeline.store.commit_log import FaultPoint
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.segments import SegmentWriter

log = logging.getLogger(__name__)

Window = tuple[str, int]

_COUNTS: Final = ("segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files")
#: Log that one frame registers; the segments of a busy queue are as large at most.
_TURN_BYTES: Final = 256 * limits.MIB
#: On a full disk a turn takes this part of the reserve, and no more log than that.
_RESERVE_SHARES: Final = 8
#: What a checkpoint may take; DuckDB does not live on after one that found no room.
_ROOM_OF_DUCKDB: Final = 4 * limits.MIB


def seal(
    engine: Engine, *, limit_bytes: int, window: Window | None, fault: FaultPoint | None = None
) -> dict[str, int]:
    """Seal the oldest log if it is due, and drop the log files that are sealed.

    Due is a log with messages older than ``seal_after_ms``; then all that is older than half of it
    is sealed, so that a trickle does not become a file for each message. Due is also what lies
    before the newest full files, however young.

    Args:
        limit_bytes: of log; a frame more at most.
        fault: called with the name of each step.

    Returns:
        segments, rows and bytes of Parquet written, raw_bytes of these messages in memory,
        event_rows, dropped_files.

    Raises:
        FencedError: the window has been taken over; nothing was registered.
        StoreFullError: no room for the Parquet files, not even in the reserve.
        StorageError: they cannot be written for another reason.
    """
    if limit_bytes <= 0:
        raise RequestError(f"limit_bytes is {limit_bytes} and must be positive.")
    file_bytes = engine.settings.log_file_bytes
    with engine.segments.sealing:
        whole = engine.submit(_TendReserve(engine, window))
        turns = _Turns(engine, window=window, fault=fault or _no_fault)
        try:
            turns.run(limit_bytes, squeezed=not whole or _free_bytes(engine) < file_bytes)
        except BaseException as error:
            # What is on disk and what is registered may differ: look at it again next time.
            engine.segments.loaded = engine.segments.tidy = False
            if isinstance(error, OSError | pa.ArrowException):
                is_full = isinstance(error, OSError) and error.errno in log_file.FULL
                kind = StoreFullError if is_full else StorageError
                raise kind(f"Sealing failed: {error}.") from error
            raise
        turns.report.update(history.keep(engine, window=window, fault=fault or _no_fault))
        if turns.report["dropped_files"]:
            engine.submit(_TendReserve(engine, window))
    return turns.report


def _no_fault(_step: str) -> None:
    return


class _Turns:
    """One seal."""

    def __init__(self, engine: Engine, *, window: Window | None, fault: FaultPoint) -> None:
        self._engine = engine
        self._window = window
        self._fault = fault
        self.report = dict.fromkeys(_COUNTS, 0)

    def run(self, limit_bytes: int, *, squeezed: bool) -> None:
        """Turns of _TURN_BYTES until nothing is due, the limit is reached, or the broker closes."""
        engine = self._engine
        if not engine.segments.tidy:
            self._clean_up()
        self._forget_deleted_topics()
        self._drop()
        ripe = reach(engine, squeezed=squeezed)
        left = limit_bytes
        while left > 0 and not engine.arrivals.closed:
            start = engine.segments.sealed_to
            if not self._turn(min(left, _TURN_BYTES), ripe):
                return
            left -= engine.segments.sealed_to - start

    def _clean_up(self) -> None:
        """Bring the folders to what the log says, and finish what a crash has cut short."""
        engine = self._engine
        segments = segments_of(engine)
        self._tidy_topics()
        history.sweep(engine)
        if segments.sealed_to:
            self._let_events_go()
        segments.tidy = True

    def _tidy_topics(self) -> None:
        segments = self._engine.segments
        state = self._engine.state
        with segments.changing:
            registered = [
                s for topic_id in segments.topics_sealed() for s in segments.of_topic(topic_id)
            ]
            manifest.tidy(
                segments.root,
                registered,
                exists=lambda topic_id: topic_id in state.topics,
                now_ms=self._engine.clock.now_ms(),
            )

    def _forget_deleted_topics(self) -> None:
        segments = self._engine.segments
        for topic_id, topic in segments.topics_sealed().items():
            if topic_id not in self._engine.state.topics:
                with segments.changing:
                    segments.forget(topic_id)
                    manifest.remove_topic(segments.root, topic=topic, topic_id=topic_id)

    def _turn(self, limit_bytes: int, ripe: Reach) -> bool:
        """Seal some frames; whether there were any."""
        start = self._engine.segments.sealed_to
        try:
            done = self._write(start, limit_bytes=limit_bytes, ripe=ripe)
        except OSError as error:
            if error.errno not in log_file.FULL:
                raise
            share = max(self._engine.settings.reserve_bytes // _RESERVE_SHARES, limits.MIB)
            self._make_room(2 * share)
            self._tidy_topics()
            done = self._write(start, limit_bytes=min(limit_bytes, share), ripe=ripe)
        if done is None:
            return False
        self._register(done)
        self._let_events_go()
        self._drop()
        return True

    def _write(self, start: int, *, limit_bytes: int, ripe: Reach) -> "_Written | None":
        """Put the files of a turn under their names."""
        engine = self._engine
        frames = Frames(engine.log, start, ripe=ripe)
        writer = SegmentWriter(engine.segments.root, lambda topic_id: _name_of(engine, topic_id))
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
        state_history.keep(engine, start=start, end=frames.end)
        path, rows = self._write_events(start, frames.end)
        return _Written(tuple(segments), path, rows, start, frames.end, writer.raw_bytes)

    def _write_events(self, start: int, end: int) -> tuple[Path, int]:
        folder = self._engine.home.events
        path = folder / f"{start:020d}-{end:020d}{SUFFIX}"
        unfinished = folder / f".{start:020d}{UNFINISHED}"
        rows = self._engine.database.export_events(end, unfinished)
        _sync_file(unfinished)
        self._fault("events_written")
        unfinished.rename(path)
        log_file.sync_folder(folder)
        self._fault("events_renamed")
        return path, rows

    def _register(self, done: "_Written") -> None:
        engine, report = self._engine, self.report
        segments = engine.segments
        root = segments.root
        sizes = tuple(root.size(place(root, segment)) for segment in done.segments)
        with segments.changing:
            registered: list[Segment] = engine.submit(_Register(done, sizes, self._window))
            engine.log.sync()
            self._fault("registered")
            segments.add(registered, sealed_to=done.end)
            show(root, registered)
            for topic, topic_id in sorted({(s.topic, s.topic_id) for s in registered}):
                counted = segments.of_topic(topic_id)
                manifest.write(root, counted, topic=topic, topic_id=topic_id)
            self._fault("manifests_written")
        report["segments"] += len(registered)
        report["rows"] += sum(segment.rows for segment in registered)
        report["bytes"] += sum(sizes)
        report["raw_bytes"] += done.raw_bytes
        report["event_rows"] += done.event_rows

    def _let_events_go(self) -> None:
        """Have DuckDB know what is registered, without the events that are in Parquet."""
        engine = self._engine
        engine.dispatched()
        self._make_room(_ROOM_OF_DUCKDB)
        engine.database.delete_events(engine.segments.sealed_to)
        self._fault("events_deleted")
        engine.database.checkpoint()
        self._fault("checkpointed")

    def _make_room(self, wanted_bytes: int) -> None:
        """See to it that the disk has that much, if need be out of half of the reserve."""
        engine = self._engine
        missing = wanted_bytes - _free_bytes(engine)
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


@dataclass(frozen=True, slots=True)
class _Written:
    """The files of a turn, not registered yet; they hold the log from ``start`` to ``end``."""

    segments: tuple[Segment, ...]
    events: Path
    event_rows: int
    start: int
    end: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class _Register(Request):
    """Make the files of a turn count."""

    done: _Written
    sizes: tuple[int, ...]
    window: Window | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """An event for each segment, but those of topics that were deleted meanwhile; the rest."""
        state.fence(self.window)
        done = self.done
        kept: list[Segment] = []
        decision = Decision(kept)
        for segment, size in zip(done.segments, self.sizes, strict=True):
            if segment.topic_id in state.topics:
                kept.append(segment)
                detail = {
                    "path": f"topics/{segment.relative}",
                    "base": segment.base,
                    "end": segment.end,
                    "rows": segment.rows,
                    "bytes": size,
                }
                decision.events.append(
                    single(
                        Kind.SEGMENT,
                        now_ms,
                        offset=segment.base,
                        topic_id=segment.topic_id,
                        queue_id=segment.queue_id,
                        detail=json.dumps(detail),
                    )
                )
        events = {
            "path": f"{done.events.parent.name}/{done.events.name}",
            "from_position": done.start,
            "to_position": done.end,
            "rows": done.event_rows,
        }
        decision.events.append(single(Kind.EVENT_SEGMENT, now_ms, detail=json.dumps(events)))
        return decision


@dataclass(frozen=True, slots=True)
class _TendReserve(Request):
    """Make the log's reserve whole again if there is room; whether it is. Refuses an old epoch."""

    engine: Engine
    window: Window | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored; the reserve belongs to the writer's thread."""
        state.fence(self.window)
        return Decision(self.engine.log.refill_reserve())


def _free_bytes(engine: Engine) -> int:
    disk = os.statvfs(engine.home.path)
    return disk.f_bavail * disk.f_frsize


def _name_of(engine: Engine, topic_id: int) -> str | None:
    found = engine.state.topics.get(topic_id)
    return found.topic.name if found else None


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
