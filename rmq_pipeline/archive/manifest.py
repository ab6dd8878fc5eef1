"""The manifest of a topic: which segments count, for readers that do not ask the broker.

``<topic>/<topic_id>/_manifest.json`` is replaced atomically. The underscore hides it from whoever
reads the folder as a table of Parquet files.

    {"format": 2, "topic": …, "topic_id": …, "files": [{"path": ".segments/queue_id=0/….kept",
     "name": "queue_id=0/….parquet", "queue_id": 0, "base": 0, "end": 500, "rows": 500,
     "bytes": 61234, "min_stored_at_ms": …, "max_stored_at_ms": …, "min_born_at_ms": …,
     "max_born_at_ms": …}, …],
     "replaced": [{"path": ".segments/….kept", "name": …, "at_ms": …}, …]}

``path`` and ``name`` are two names of one file, relative to the manifest. Files are in the order of
queue_id and base; a time is null where no message has one. What was replaced, or has expired, is
still under its ``path`` for a grace after ``at_ms``, for those who read an older manifest.
"""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.archive.root import Root
from rmq_pipeline.archive.segment import Segment, topic_folder
from rmq_pipeline.archive.segment_file import place, show, sync_shown
from rmq_pipeline.errors import StorageError

log = logging.getLogger(__name__)

NAME: Final = "_manifest.json"
FORMAT: Final = 2
_TIMES: Final = ("stored_at_ms", "born_at_ms")

Entry = dict[str, Any]


@dataclass(slots=True)
class Manifest:
    """What a manifest says."""

    files: list[Entry] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)


def read(root: Root, folder: str) -> Manifest:
    """The manifest in the folder of a topic; of nothing when there is none.

    Raises:
        ValueError: a newer version has written it.
    """
    try:
        listed = json.loads(root.read(f"{folder}/{NAME}"))
    except FileNotFoundError:
        return Manifest()
    if listed["format"] > FORMAT:
        raise ValueError(f"{folder}/{NAME} was written by a newer version.")
    return Manifest(listed["files"], listed.get("replaced", []))


def write(
    root: Root,
    segments: Sequence[Segment],
    *,
    topic: str,
    topic_id: int,
    replaced: Sequence[Segment] = (),
    at_ms: int = 0,
    forget: Collection[str] = (),
) -> None:
    """List exactly these segments of one topic, in queue and offset order.

    Args:
        replaced: no longer count from ``at_ms`` on.
        forget: names of files replaced earlier that are deleted.

    Raises:
        StorageError: one of them cannot be read.
    """
    folder = topic_folder(topic, topic_id)
    before = read(root, folder)
    known = {entry["name"]: entry for entry in before.files}
    gone = [
        {"path": place(root, each).removeprefix(f"{folder}/"), "name": each.name, "at_ms": at_ms}
        for each in replaced
    ]
    content = {
        "format": FORMAT,
        "topic": topic,
        "topic_id": topic_id,
        "files": [known.get(each.name) or entry_of(root, each) for each in segments],
        "replaced": [each for each in before.replaced + gone if each["name"] not in forget],
    }
    root.replace(f"{folder}/{NAME}", json.dumps(content).encode())


def tidy(
    root: Root, registered: Sequence[Segment], *, exists: Callable[[int], bool], now_ms: int
) -> None:
    """Bring the folders to what is registered.

    What a crash left goes: files that nobody registered, topics that were deleted. Names and
    manifests that do not say what is registered are made again; what was replaced, or had expired,
    stays for its grace.

    Args:
        root: where the archive is.
        registered: the segments that count.
        exists: whether there still is a topic of this id.
        now_ms: when the grace begins of what a manifest lists that counts no more.
    """
    by_topic: dict[tuple[str, int], list[Segment]] = {}
    for segment in registered:
        by_topic.setdefault((segment.topic, segment.topic_id), []).append(segment)
    for topic in root.folders(""):
        for topic_id in (int(name) for name in root.folders(topic) if name.isdecimal()):
            if exists(topic_id):
                segments = by_topic.get((topic, topic_id), [])
                _tidy_topic(root, topic, topic_id=topic_id, segments=segments, now_ms=now_ms)
            else:
                remove_topic(root, topic=topic, topic_id=topic_id)


def _tidy_topic(
    root: Root, topic: str, *, topic_id: int, segments: Sequence[Segment], now_ms: int
) -> None:
    folder = topic_folder(topic, topic_id)
    listed = read(root, folder)
    names = {each.name for each in segments}
    late = [entry for entry in listed.files if entry["name"] not in names]
    waiting = [Segment.from_path(f"{folder}/{entry['name']}") for entry in listed.replaced + late]
    wanted = {path for each in segments for path in (place(root, each), each.relative, each.index)}
    wanted |= {place(root, each) for each in waiting}
    for file in root.files(folder):
        if file not in wanted and not file.endswith(NAME):
            log.info("Deleting %s, which does not count.", file)
            root.delete(file)
    show(root, segments)
    sync_shown(root, segments)
    if [each["name"] for each in listed.files] != [each.name for each in segments]:
        log.info("Writing the manifest of %s again.", folder)
        gone = waiting[len(listed.replaced) :]
        write(root, segments, topic=topic, topic_id=topic_id, replaced=gone, at_ms=now_ms)


def remove_topic(root: Root, *, topic: str, topic_id: int) -> None:
    """Delete what a topic that is gone has left; nothing there: nothing happens."""
    root.delete_folder(topic_folder(topic, topic_id))


def bury(root: Root, *, topic: str, topic_id: int, is_over: Callable[[int], bool]) -> set[str]:
    """Delete files that were replaced when ``is_over`` says so of their moment; their names.

    The manifest still lists them: ``write`` is to forget them.
    """
    folder = topic_folder(topic, topic_id)
    gone = [entry for entry in read(root, folder).replaced if is_over(entry["at_ms"])]
    for entry in gone:
        root.delete(f"{folder}/{entry['path']}")
        root.delete(Segment.from_path(f"{folder}/{entry['name']}").index)
    return {entry["name"] for entry in gone}


def entry_of(root: Root, segment: Segment) -> Entry:
    """What a manifest says of a segment, from its footer.

    Raises:
        StorageError: it cannot be read, or does not hold what its name says.
    """
    path = place(root, segment)
    try:
        with root.open(path) as file:
            footer = pq.read_metadata(file)
        size = root.size(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    low, high = _bounds(footer, "queue_offset")
    if (footer.num_rows, low, high) != (segment.rows, segment.base, segment.end - 1):
        raise StorageError(f"{path} holds offsets {low} to {high}, {footer.num_rows} messages.")
    entry: Entry = {
        "path": path.removeprefix(f"{segment.folder}/"),
        "name": segment.name,
        "queue_id": segment.queue_id,
        "base": segment.base,
        "end": segment.end,
        "rows": footer.num_rows,
        "bytes": size,
    }
    for column in _TIMES:
        low, high = _bounds(footer, column)
        entry |= {f"min_{column}": low, f"max_{column}": high}
    return entry


def _bounds(footer: pq.FileMetaData, column: str) -> tuple[int | None, int | None]:
    """The smallest and largest value of a column, as the row groups say."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    paths = [groups[0].column(i).path_in_schema for i in range(footer.num_columns)]
    leaf = paths.index(column)
    found = [group.column(leaf).statistics for group in groups]
    known = [each for each in found if each is not None and each.has_min_max]
    low = min((each.min for each in known), default=None)
    return low, max((each.max for each in known), default=None)
