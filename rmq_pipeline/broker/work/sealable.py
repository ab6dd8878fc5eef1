"""Sealable range of the log, and its messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES
from rmq_pipeline.store.log.commit_log import CommitLog, Section
from rmq_pipeline.store.segment_reader import Segments

#: Bytes of messages that are sorted together.
_SORT_BYTES: Final = 32 * limits.MIB
#: Number of full log files that stay, unless they are old.
_KEPT_FILES: Final = 4


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
    """Return the log position up to which the log is synced and in DuckDB."""
    dispatched: int = engine.database.dispatched
    return min(engine.log.synced, dispatched)


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


def due(engine: Engine) -> dict[str, int | None]:
    """Return ``next_due_ms``, None if unknown, and ``due``, the bytes of log to seal now."""
    segments = segments_of(engine)
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
