"""Which part of the log is ripe to be sealed, and its messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.broker.writer import EVENTS, MESSAGES
from rmq_pipeline.store.commit_log import CommitLog, Section
from rmq_pipeline.store.segment_reader import Segments

#: Messages that are put in order at a time.
_SORT_BYTES: Final = 32 * limits.MIB
#: Full log files that stay whatever they hold, until they are old.
_KEPT_FILES: Final = 4


@dataclass(frozen=True, slots=True)
class Reach:
    """How far to seal: frames not younger than ``horizon_ms``, and all that end by ``position``."""

    horizon_ms: int
    position: int
    #: Nothing beyond it: sealing writes frames too, and would go on after itself.
    stop: int


def sealable(engine: Engine) -> int:
    """The log before this position is on disk and in DuckDB."""
    dispatched: int = engine.database.dispatched
    return min(engine.log.synced, dispatched)


def reach(engine: Engine, *, squeezed: bool) -> Reach:
    """What is ripe now: all there is when the disk is full (``squeezed``) and a file can go."""
    now_ms, after_ms = engine.clock.now_ms(), engine.settings.seal_after_ms
    engine.dispatched()
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
    """``next_due_ms``, None when no moment is known; ``due``, the bytes of log to be sealed now."""
    segments = segments_of(engine)
    try:
        oldest_ms = _oldest_message_ms(engine, segments)
    except LookupError:  # a seal is just dropping what we look at
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
    """When the first message that is not sealed was stored; None when there is none.

    Events alone are no reason to seal: registering files is one.
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
    """The ripe frames from ``start`` on; ``end`` is where those end that were given."""

    def __init__(self, commit_log: CommitLog, start: int, *, ripe: Reach) -> None:
        self._frames = commit_log.frames(start, ripe.stop)
        self._ripe = ripe
        self._start = start
        self.end = start

    def messages(self, limit_bytes: int) -> Iterator[list[pa.RecordBatch]]:
        """Their messages, in lists of about _SORT_BYTES, until the limit."""
        batches: list[pa.RecordBatch] = []
        size = 0
        for end, sections in self._frames:
            if end > self._ripe.position and _time_of(sections) > self._ripe.horizon_ms:
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
    """When a frame was written; 0 when nothing in it says so."""
    names = {MESSAGES: "stored_at_ms", EVENTS: "at_ms"}
    for section in sections:
        if section.kind in names and section.batch.num_rows:
            at_ms: int = section.batch.column(names[section.kind])[0].as_py()
            return at_ms
    return 0
