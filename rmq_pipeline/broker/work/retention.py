"""Expiry: whole segments go when the topic no longer retains their messages.

Expiry drops the oldest sealed messages of a queue: its min_offset rises to the end of a segment. It
does not depend on whether a group has read them. But pending messages stay, and so do all messages
behind them: unsettled deliveries, parked, scheduled and half messages. Messages that a repetition
may still repeat stay, too.
"""

from collections.abc import Sequence
from typing import Final

from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import hide, sync_shown
from rmq_pipeline.broker.decide.request import CheckFence, Fence
from rmq_pipeline.broker.decide.segments import ExpireSegments
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import registering, segments_of
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log.commit_log import FaultPoint
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID, Topic

_COUNTS: Final = ("segments", "rows", "bytes", "held_back", "deleted_files")
#: Time after which retained segments with pending messages are looked at again.
_LOOK_AGAIN_MS: Final = 10 * 60_000
_SYSTEM: Final = (SCHEDULE_TOPIC_ID, HALF_TOPIC_ID)


def expire(
    engine: Engine, *, window: Fence | None, fault: FaultPoint | None = None
) -> dict[str, int]:
    """Expire segments that topics no longer retain, and delete files whose grace period is over.

    Args:
        engine: the open store.
        window: window of the caller; refused if a newer epoch has opened it.
        fault: called with the name of each step.

    Returns:
        segments, rows and bytes that expired; held_back: segments retained for pending messages;
        deleted_files.

    Raises:
        FencedError: a newer epoch has opened the window; nothing has expired.
    """
    segments, step = segments_of(engine), fault or _no_fault
    report = dict.fromkeys(_COUNTS, 0)
    now_ms = engine.clock.now_ms()
    engine.submit(CheckFence(window))
    for topic in [each.topic for each in list(engine.state.topics.values())]:
        with segments.changing:
            old = overdue(engine, topic, now_ms=now_ms)
            if old:
                _expire_topic(engine, topic, old=old, window=window, report=report, step=step)
    held = report["held_back"] and not report["segments"]
    engine.held_until_ms = now_ms + _LOOK_AGAIN_MS if held else 0
    report["deleted_files"] = delete_replaced(engine)
    step("dead_lettered")
    return report


def _no_fault(_step: str) -> None:
    return


def _expire_topic(
    engine: Engine,
    topic: Topic,
    *,
    old: Sequence[tuple[Segment, int]],
    window: Fence | None,
    report: dict[str, int],
    step: FaultPoint,
) -> None:
    segments = engine.segments
    with registering(segments):
        kept_from: dict[int, int] = engine.submit(
            ExpireSegments(topic.topic_id, tuple(old), window)
        )
        engine.log.sync()
    step("expired")
    gone = [each for each, _ in old if each.end <= kept_from.get(each.queue_id, 0)]
    report["held_back"] += len(old) - len(gone)
    if not gone:
        return
    segments.replace(gone, [])
    hide(segments.root, gone)
    sync_shown(segments.root, gone)
    step("expired_hidden")
    left = segments.of_topic(topic.topic_id)
    manifest.write(
        segments.root,
        left,
        topic=gone[0].topic,
        topic_id=topic.topic_id,
        replaced=gone,
        at_ms=engine.clock.now_ms(),
    )
    step("expired_unlisted")
    report["segments"] += len(gone)
    report["rows"] += sum(each.rows for each in gone)
    report["bytes"] += sum(size for each, size in old if each in gone)


def delete_replaced(engine: Engine) -> int:
    """Delete replaced and expired files whose grace period is over; return how many."""
    segments, now_ms = engine.segments, engine.clock.now_ms()
    grace_ms, deleted = engine.settings.replaced_grace_ms, 0
    for topic in [each.topic for each in list(engine.state.topics.values())]:
        with segments.changing:
            names = manifest.delete_replaced(
                segments.root,
                topic=topic.name,
                topic_id=topic.topic_id,
                is_over=lambda at_ms: at_ms + grace_ms <= now_ms,
            )
            if names:
                left = segments.of_topic(topic.topic_id)
                about = {"topic": topic.name, "topic_id": topic.topic_id}
                manifest.write(segments.root, left, forget=names, **about)  # type: ignore[arg-type]
            deleted += len(names)
    return deleted


def overdue(engine: Engine, topic: Topic, *, now_ms: int) -> list[tuple[Segment, int]]:
    """Return the segments that a topic no longer retains, and their bytes, oldest first."""
    keeps_ms, keeps_bytes = retention(topic, engine.settings)
    if keeps_ms is None and keeps_bytes is None:
        return []
    listed = _listed(engine, topic)
    excess = sum(size for _, size, _ in listed) - (keeps_bytes if keeps_bytes is not None else 0)
    found = []
    for segment, size, newest_ms in listed:
        too_old = keeps_ms is not None and newest_ms + keeps_ms <= now_ms
        too_much = keeps_bytes is not None and excess > 0
        if not (too_old or too_much) or now_ms <= _needed_to_ms(engine, topic, newest_ms=newest_ms):
            break
        found.append((segment, size))
        excess -= size
    return found


def next_overdue_ms(engine: Engine, topic: Topic, *, now_ms: int) -> int | None:
    """Return when the topic stops to retain its oldest segment; None if unknown."""
    keeps_ms, _ = retention(topic, engine.settings)
    if overdue(engine, topic, now_ms=now_ms):
        return now_ms
    listed = _listed(engine, topic)
    if keeps_ms is None or not listed:
        return None
    newest_ms = listed[0][2]
    return max(now_ms, newest_ms + keeps_ms, _needed_to_ms(engine, topic, newest_ms=newest_ms) + 1)


def retention(topic: Topic, settings: Settings) -> tuple[int | None, int | None]:
    """Return how long a topic retains messages, and how many bytes of them; None: no limit."""
    if topic.topic_id in _SYSTEM:
        return settings.system_retention_ms, None
    return topic.retention_ms, topic.retention_bytes


def _needed_to_ms(engine: Engine, topic: Topic, *, newest_ms: int) -> int:
    """Return until when a message stored at ``newest_ms`` may be repeated; -1: never."""
    topics = [topic]
    if topic.topic_id == SCHEDULE_TOPIC_ID:  # scheduled messages of any topic
        topics = [each.topic for each in list(engine.state.topics.values())]
    windows = [each.deduplicate_window_ms for each in topics if each.deduplicate != "none"]
    return newest_ms + max(windows) if windows else -1


def _listed(engine: Engine, topic: Topic) -> list[tuple[Segment, int, int]]:
    """Return a topic's segments, oldest first: bytes, and time of the last message."""
    segments = engine.segments
    registered = segments.of_topic(topic.topic_id)
    if not registered:
        return []
    listed = manifest.read(segments.root, registered[0].folder).files
    known = {entry["name"]: entry for entry in listed}
    entries = [(each, known.get(each.name)) for each in registered]
    facts = [
        (each, found["bytes"], found["max_stored_at_ms"] or 0) for each, found in entries if found
    ]
    return sorted(facts, key=lambda fact: (fact[2], fact[0].queue_id, fact[0].base))
