"""Upkeep of the archive: merge small segments, expire old ones, and tell what is due.

Compaction merges small adjacent segments of a queue into a large one. The plan is made here; any
process may merge the files (archive/segment_file.py). ONE event registers the large segment in
place of the small ones. After that, file globs see the large one only, the manifest is replaced,
and the small files are deleted after a grace period. A crash before the event leaves an
unregistered file. A crash after it leaves file names and a manifest that the next seal corrects.

Expiry drops the oldest sealed messages of a queue: its min_offset rises to the end of a segment. It
does not depend on whether a group has read them. But pending messages stay, and so do all messages
behind them: unsettled deliveries, parked, scheduled and half messages. Messages that a repetition
may still repeat stay, too.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rmq_pipeline import limits
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment import Segment, topic_folder
from rmq_pipeline.archive.segment_file import Merger, check, hide, merge, place, show, sync_shown
from rmq_pipeline.broker.decide.request import CheckFence, Fence
from rmq_pipeline.broker.decide.segments import ExpireSegments, ReplaceSegments
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import registering, segments_of
from rmq_pipeline.errors import CorruptLogError, RequestError, StorageError, StoreFullError
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.root import is_uri, shown
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.commit_log import FaultPoint
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID, Topic

log = logging.getLogger(__name__)
_COUNTS: Final = ("compactions", "inputs", "rows", "bytes_before", "bytes")
#: Least number of segments for the retention time or size of a topic, as expiry drops whole
#: segments.
_RETENTION_PARTS: Final = 8
_EXPIRED: Final = ("segments", "rows", "bytes", "held_back", "deleted_files")
#: Time after which retained segments with pending messages are looked at again.
_LOOK_AGAIN_MS: Final = 10 * 60_000
_SYSTEM: Final = (SCHEDULE_TOPIC_ID, HALF_TOPIC_ID)
#: Longest age of a status; and its least age, even if segments have changed since.
_LOOK_EVERY_MS: Final = 60_000
_LOOK_AT_MOST_MS: Final = 1_000


class _Fact(NamedTuple):
    segment: Segment
    bytes: int
    from_ms: int
    to_ms: int


def _claim(engine: Engine) -> None:
    try:
        engine.segments.claim()
    except OSError as error:
        raise StorageError(
            f"{engine.segments.root} cannot be reached: {error}.",
            remedy="Check the store of the setting archive_root.",
        ) from error


def plan(engine: Engine, *, topic: str | None, limit_bytes: int) -> list[Merger]:
    """Return the merges that are worthwhile now, for one topic or all.

    Args:
        engine: the open store.
        topic: its name; None: all topics.
        limit_bytes: most bytes of inputs; one merge may exceed it.
    """
    if limit_bytes <= 0:
        raise RequestError(f"limit_bytes is {limit_bytes} and must be positive.")
    wanted = (
        [engine.state.topic(topic)] if topic is not None else list(engine.state.topics.values())
    )
    found: list[Merger] = []
    left = limit_bytes
    segments = segments_of(engine)
    for each in [state.topic for state in wanted]:
        for some in _of_topic(engine, each):
            if left <= 0:
                return found
            total = sum(fact.bytes for fact in some)
            inputs = tuple(fact.segment for fact in some)
            found.append(Merger(segments.root.address, inputs, total, engine.epoch))
            left -= total
    return found


def _of_topic(engine: Engine, topic: Topic) -> list[list[_Fact]]:
    segments, settings = engine.segments, engine.settings
    damaged = segments.damaged
    registered = [each for each in segments.of_topic(topic.topic_id) if each not in damaged]
    if len(registered) < 2:
        return []
    listed = manifest.read(segments.root, registered[0].folder).files
    known = {entry["name"]: entry for entry in listed}
    keeps_ms, keeps_bytes = retention(topic, settings)
    target = settings.compact_target_bytes
    if keeps_bytes is not None:
        target = min(target, keeps_bytes // _RETENTION_PARTS)
    span_ms = None if keeps_ms is None else keeps_ms // _RETENTION_PARTS
    found = []
    for queue_id in sorted({each.queue_id for each in registered}):
        facts = [
            _Fact(each, entry["bytes"], entry["min_stored_at_ms"], entry["max_stored_at_ms"])
            for each in registered
            if each.queue_id == queue_id and (entry := known.get(each.name)) is not None
        ]
        found.extend(_runs(facts, target, min_inputs=settings.compact_min_inputs, span_ms=span_ms))
    return found


def _runs(
    facts: Sequence[_Fact], target: int, *, min_inputs: int, span_ms: int | None
) -> list[list[_Fact]]:
    """Return runs of adjacent segments that add up to about ``target`` bytes.

    At the end of the queue, return many small ones. Their oldest is left out while it is larger
    than all the others. So each message is rewritten a few times only, until it is in a large
    segment.
    """
    found: list[list[_Fact]] = []
    run: list[_Fact] = []
    for fact in facts:
        large = 2 * fact.bytes > target
        full = sum(each.bytes for each in run) + fact.bytes > target
        long = bool(run) and span_ms is not None and fact.to_ms - run[0].from_ms > span_ms
        apart = bool(run) and fact.segment.base != run[-1].segment.end
        if large or full or long or apart:
            found.append(run)
            run = []
        if not large:
            run.append(fact)
    found = [each for each in found if len(each) > 1]
    while run and 2 * run[0].bytes > sum(each.bytes for each in run):
        run = run[1:]
    if len(run) >= min_inputs:
        found.append(run)
    return found


def compact(
    engine: Engine,
    *,
    topic: str | None,
    limit_bytes: int,
    window: Fence | None,
    fault: FaultPoint | None = None,
) -> dict[str, int]:
    """Plan, merge and replace in this process; see ``plan``.

    Args:
        engine: the open store.
        topic: its name; None: all topics.
        limit_bytes: most bytes of inputs; one merge may exceed it.
        window: window of the caller; refused if a newer epoch has opened it.
        fault: called with the name of each step.

    Returns:
        compactions, inputs and their bytes_before, and the rows and bytes of the new segments.

    Raises:
        FencedError: a newer epoch has opened the window; earlier replacements remain.
        StoreFullError: the disk has no space for the large file.
    """
    _claim(engine)
    report = dict.fromkeys(_COUNTS, 0)
    for merger in plan(engine, topic=topic, limit_bytes=limit_bytes):
        if engine.wakeups.closed:
            break
        try:
            added = merge(engine.segments.root, merger.inputs, epoch=merger.epoch)
        except CorruptLogError:
            _set_damaged_aside(engine, merger.inputs)
            continue
        except OSError as error:
            kind = StoreFullError if error.errno in log_file.FULL else StorageError
            raise kind(f"Compaction failed: {error}.") from error
        if fault:
            fault("merged")
        done = replace_segments(engine, merger.inputs, added=added, window=window, fault=fault)
        for name in _COUNTS:
            report[name] += done[name]
    return report


def replace_segments(
    engine: Engine,
    removed: Sequence[Segment],
    *,
    added: Segment,
    window: Fence | None,
    fault: FaultPoint | None = None,
) -> dict[str, int]:
    """Register one published segment in place of others with the same offsets.

    A repeated call returns the same report. If the call is refused, the file is deleted.

    Raises:
        RequestError: the removed segments do not hold its offsets, or are not all registered.
        StorageError: the file is unreadable, or does not hold the offsets in its name.
        FencedError: a newer epoch has opened the window.
    """
    segments = segments_of(engine)
    step = fault or _no_fault
    _claim(engine)
    with segments.changing:
        counted = segments.of_queue(added.topic_id, added.queue_id)
        if added in counted:
            return _report(engine, removed, added=added)
        _check_epoch(engine, added)
        try:
            _check(removed, added, counted=counted)
            size = manifest.entry_of(segments.root, added)["bytes"]
        except RequestError:
            _delete_refused(engine, added)
            raise
        except StorageError:  # an earlier call may have registered the file
            segments.tidy = False
            raise
        with registering(segments):
            try:
                engine.submit(ReplaceSegments(tuple(removed), added, size, window))
            except RequestError:
                _delete_refused(engine, added)
                raise
            engine.confirm()
        step("replaced")
        segments.replace(removed, [added])
        hide(segments.root, removed)
        step("replaced_hidden")
        show(segments.root, [added])
        sync_shown(segments.root, [added])
        step("replaced_shown")
        report = _report(engine, removed, added=added)
        manifest.write(
            segments.root,
            segments.of_topic(added.topic_id),
            topic=added.topic,
            topic_id=added.topic_id,
            replaced=removed,
            at_ms=engine.clock.now_ms(),
            epoch=engine.epoch,
        )
        step("replaced_listed")
    return report


def _no_fault(_step: str) -> None:
    return


def _set_damaged_aside(engine: Engine, inputs: Sequence[Segment]) -> None:
    """Exclude damaged segments from later plans; keep their files."""
    root = engine.segments.root
    for segment in inputs:
        try:
            check(root, segment)
        except (CorruptLogError, StorageError) as error:
            log.warning("A segment is not merged: %s", error)
            # A file that cannot be read now may be sound; the next compaction tries again.
            if isinstance(error, CorruptLogError):
                engine.segments.damaged.add(segment)


def _check_epoch(engine: Engine, added: Segment) -> None:
    """Check that this leader planned the merge; an earlier one may still delete its files.

    Raises:
        RequestError: another leader did, or the file has no epoch; it stays until it is tidied up.
    """
    replication = engine.replication
    first = 0 if replication is None else replication.first_epoch
    if not first <= added.epoch <= engine.epoch:
        raise RequestError(
            f"{added.relative} was merged under epoch {added.epoch} of the log, and this broker"
            f" leads since epoch {first}.",
            remedy="Plan the merge again.",
        )


def _check(removed: Sequence[Segment], added: Segment, *, counted: Sequence[Segment]) -> None:
    inside = [each for each in counted if added.base <= each.base and each.end <= added.end]
    whole = bool(inside) and (inside[0].base, inside[-1].end) == (added.base, added.end)
    if not whole or sorted(removed) != inside:
        raise RequestError(
            f"The current segments from {added.base} to {added.end} of queue {added.queue_id} of"
            f" topic {added.topic} are not the {len(removed)} segments to be replaced."
        )


def _delete_refused(engine: Engine, added: Segment) -> None:
    """Delete a file whose registration was refused, unless an earlier call has registered it."""
    engine.submit(CheckFence(None))  # the state has all that is stored
    engine.segments.outdate()
    segments = segments_of(engine)
    if added not in segments.of_queue(added.topic_id, added.queue_id):
        segments.root.delete(place(segments.root, added))
        segments.root.delete(added.index)


def _report(engine: Engine, removed: Sequence[Segment], *, added: Segment) -> dict[str, int]:
    root = engine.segments.root
    before = 0
    for each in removed:
        try:
            before += root.size(place(root, each))
        except FileNotFoundError:  # deleted after its grace period
            continue
    counts = (1, len(removed), added.rows, before, root.size(place(root, added)))
    return dict(zip(_COUNTS, counts, strict=True))


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
    _claim(engine)
    report = dict.fromkeys(_EXPIRED, 0)
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
        engine.confirm()
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
        epoch=engine.epoch,
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
                counted={each.name for each in segments.of_topic(topic.topic_id)},
                epoch=engine.epoch,
            )
            if names:
                manifest.write(
                    segments.root,
                    segments.of_topic(topic.topic_id),
                    topic=topic.name,
                    topic_id=topic.topic_id,
                    forget=names,
                    epoch=engine.epoch,
                )
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
    try:
        return _looked(engine, now_ms, version=version)
    except OSError as error:
        if not is_uri(engine.settings.archive_root):
            raise
        log.warning("archive away why=%s", error)
        return ArchiveStatus(version, now_ms, 0, None)


def _looked(engine: Engine, now_ms: int, *, version: int) -> ArchiveStatus:
    segments = engine.segments
    mergers = plan(engine, topic=None, limit_bytes=limits.COMPACT_SPARK_BYTES)
    moments = []
    for topic in [each.topic for each in list(engine.state.topics.values())]:
        moments.append(next_overdue_ms(engine, topic, now_ms=now_ms))
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
    return {"root": shown(segments.root.address), **totals, "topics": topics}
