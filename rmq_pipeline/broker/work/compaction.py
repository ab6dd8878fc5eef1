"""Compaction: merging small adjacent segments of a queue into a large one.

The plan is made here; any process may merge the files (archive/segment_file.py). ONE event
registers the large segment in place of the small ones. After that, file globs see the large one
only, the manifest is replaced, and the small files are deleted after a grace period. A crash before
the event leaves an unregistered file. A crash after it leaves file names and a manifest that the
next seal corrects.
"""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.root import Root
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import Merger, check, hide, merge, place, show, sync_shown
from rmq_pipeline.broker.decide.request import Fence
from rmq_pipeline.broker.decide.segments import ReplaceSegments
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import registering, segments_of
from rmq_pipeline.broker.work.retention import retention
from rmq_pipeline.errors import CorruptLogError, RequestError, StorageError, StoreFullError
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.commit_log import FaultPoint
from rmq_pipeline.topic import Topic

log = logging.getLogger(__name__)
_COUNTS: Final = ("compactions", "inputs", "rows", "bytes_before", "bytes")
#: Least number of segments for the retention time or size of a topic, as expiry drops whole
#: segments.
_RETENTION_PARTS: Final = 8


class _Fact(NamedTuple):
    segment: Segment
    bytes: int
    from_ms: int
    to_ms: int


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
            found.append(Merger(segments.root.address, inputs, total))
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
    report = dict.fromkeys(_COUNTS, 0)
    for merger in plan(engine, topic=topic, limit_bytes=limit_bytes):
        if engine.wakeups.closed:
            break
        try:
            added = merge(engine.segments.root, merger.inputs)
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
    with segments.changing:
        counted = segments.of_queue(added.topic_id, added.queue_id)
        if added in counted:
            return _report(engine, removed, added=added)
        try:
            _check(removed, added, counted=counted)
            size = manifest.entry_of(segments.root, added)["bytes"]
        except (RequestError, StorageError):
            _delete(segments.root, added)
            raise
        with registering(segments):
            try:
                engine.submit(ReplaceSegments(tuple(removed), added, size, window))
            except RequestError:
                _delete(segments.root, added)
                raise
            engine.log.sync()
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


def _check(removed: Sequence[Segment], added: Segment, *, counted: Sequence[Segment]) -> None:
    inside = [each for each in counted if added.base <= each.base and each.end <= added.end]
    whole = bool(inside) and (inside[0].base, inside[-1].end) == (added.base, added.end)
    if not whole or sorted(removed) != inside:
        raise RequestError(
            f"The current segments from {added.base} to {added.end} of queue {added.queue_id} of"
            f" topic {added.topic} are not the {len(removed)} segments to be replaced."
        )


def _delete(root: Root, segment: Segment) -> None:
    root.delete(place(root, segment))
    root.delete(segment.index)


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
