"""Upkeep status of the archive: due merges, due expiry, and totals."""

from dataclasses import dataclass
from typing import Any, Final

from rmq_pipeline import limits
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import topic_folder
from rmq_pipeline.broker.work import compaction, retention
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import segments_of

#: Longest age of a status; and its least age, even if segments have changed since.
_LOOK_EVERY_MS: Final = 60_000
_LOOK_AT_MOST_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ArchiveStatus:
    """Upkeep status with its time and the version of the registered segments."""

    version: int
    at_ms: int
    #: Number of segments to merge.
    mergeable: int
    #: When a segment expires or a file's grace period ends; None if unknown.
    expires_at_ms: int | None


def due(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return ``next_due_ms`` and ``due`` of compact and expire."""
    now_ms = engine.clock.now_ms()
    seen = engine.archive_status
    if seen is None or _is_old(seen, engine.segments.version, now_ms=now_ms):
        seen = engine.archive_status = _look(engine, now_ms)
    expires_at_ms = seen.expires_at_ms
    if expires_at_ms is not None:
        expires_at_ms = max(expires_at_ms, engine.held_until_ms)
    return {
        "compact": {"next_due_ms": None, "due": seen.mergeable},
        "expire": {
            "next_due_ms": expires_at_ms,
            "due": int(expires_at_ms is not None and expires_at_ms <= now_ms),
        },
    }


def _is_old(seen: ArchiveStatus, version: int, *, now_ms: int) -> bool:
    age_ms = now_ms - seen.at_ms
    return age_ms >= _LOOK_EVERY_MS or (seen.version != version and age_ms >= _LOOK_AT_MOST_MS)


def _look(engine: Engine, now_ms: int) -> ArchiveStatus:
    segments = segments_of(engine)
    version = segments.version
    mergers = compaction.plan(engine, topic=None, limit_bytes=limits.COMPACT_SPARK_BYTES)
    moments = []
    for topic in [each.topic for each in list(engine.state.topics.values())]:
        moments.append(retention.next_overdue_ms(engine, topic, now_ms=now_ms))
        replaced = manifest.read(segments.root, topic_folder(topic.name, topic.topic_id)).replaced
        moments += [each["at_ms"] + engine.settings.replaced_grace_ms for each in replaced[:1]]
    known = [moment for moment in moments if moment is not None]
    inputs = sum(len(each.inputs) for each in mergers)
    return ArchiveStatus(version, now_ms, inputs, min(known, default=None))


def facts(engine: Engine) -> dict[str, Any]:
    """Return the archive's address, totals, and the files, rows and bytes of each topic."""
    segments = segments_of(engine)
    topics = []
    for state in sorted(engine.state.topics.values(), key=lambda each: each.topic.name):
        topic = state.topic
        listed = manifest.read(segments.root, topic_folder(topic.name, topic.topic_id))
        if not listed.files and not listed.replaced:
            continue
        files = listed.files
        topics.append(
            {
                "topic": topic.name,
                "files": len(files),
                "rows": sum(each["rows"] for each in files),
                "bytes": sum(each["bytes"] for each in files),
                "min_stored_at_ms": min((f["min_stored_at_ms"] for f in files), default=None),
                "max_stored_at_ms": max((f["max_stored_at_ms"] for f in files), default=None),
                "replaced_files": len(listed.replaced),
            }
        )
    totals = {name: sum(each[name] for each in topics) for name in ("files", "rows", "bytes")}
    return {"root": segments.root.address, **totals, "topics": topics}
