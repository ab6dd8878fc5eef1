"""The manifest of a topic: the list of its current segments, for readers without a broker.

``<topic>/<topic_id>/_manifest.json`` is replaced atomically. Tools that read the folder as a table
of Parquet files ignore names with an underscore.

    {"format": 2, "topic": …, "topic_id": …, "files": [{"path": ".segments/queue_id=0/….kept",
     "name": "queue_id=0/….parquet", "queue_id": 0, "base": 0, "end": 500, "rows": 500,
     "bytes": 61234, "min_stored_at_ms": …, "max_stored_at_ms": …, "min_born_at_ms": …,
     "max_born_at_ms": …}, …],
     "replaced": [{"path": ".segments/….kept", "name": …, "at_ms": …}, …]}

If the commit log is in a store, ``epoch`` is that of the leader that wrote the manifest.

``path`` and ``name`` are two names of one file, relative to the manifest. Files are sorted by
queue_id and base; a time is null if no message has it. A file that was replaced or has expired
stays under its ``path`` for a grace period after ``at_ms``, for readers of an older manifest.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import durable_files
from rmq_pipeline.archive.segment import Segment, epoch_of, topic_folder
from rmq_pipeline.archive.segment_file import place, show, sync_shown
from rmq_pipeline.durable_files import DamagedFileError
from rmq_pipeline.errors import LogFencedError, StorageError
from rmq_pipeline.storage.root import Root

log = logging.getLogger(__name__)

NAME: Final = "_manifest.json"
FORMAT: Final = 2
_TIMES: Final = ("stored_at_ms", "born_at_ms")

Entry = dict[str, Any]


@dataclass(slots=True)
class Manifest:
    """Content of a manifest: the current files, and the replaced ones that still exist."""

    files: list[Entry] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)
    #: Epoch of the leader that wrote it; 0: only one home has the log.
    epoch: int = 0


def read(root: Root, folder: str) -> Manifest:
    """Return the manifest of a topic's folder; an empty one if it is missing or damaged.

    An empty one loses nothing: ``write`` reads the segments, and ``tidy`` writes the manifest
    again.

    Raises:
        ValueError: a newer version wrote the manifest.
    """
    try:
        return parsed(root.read(f"{folder}/{NAME}"), where=folder)
    except FileNotFoundError:
        return Manifest()
    except DamagedFileError as error:
        log.warning("%s", error)
        return Manifest()


def parsed(content: bytes, *, where: str) -> Manifest:
    """Parse a manifest.

    Raises:
        DamagedFileError: the content does not match its checksum.
        ValueError: a newer version wrote the manifest.
    """
    try:
        listed = durable_files.load_json(content)
    except ValueError as error:
        raise DamagedFileError(f"{where}/{NAME} is damaged: {error}.") from error
    if listed["format"] > FORMAT:
        raise ValueError(f"{where}/{NAME} was written by a newer version.")
    return Manifest(listed["files"], listed.get("replaced", []), listed.get("epoch", 0))


def write(
    root: Root,
    segments: Sequence[Segment],
    *,
    topic: str,
    topic_id: int,
    replaced: Sequence[Segment] = (),
    at_ms: int = 0,
    forget: Collection[str] = (),
    epoch: int = 0,
) -> None:
    """List exactly these segments of one topic, in queue and offset order.

    Args:
        replaced: segments that are no longer current from ``at_ms`` on.
        forget: names of files replaced earlier that have been deleted.
        epoch: of the leader that writes; 0: only one home has the log.

    Raises:
        StorageError: a segment cannot be read.
        LogFencedError: a later leader wrote the manifest.
    """
    folder = topic_folder(topic, topic_id)
    before = read(root, folder)
    if before.epoch > epoch:
        raise LogFencedError(f"{folder}/{NAME} was written by a later leader of the log.")
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
    if epoch:
        content["epoch"] = epoch
    root.replace(f"{folder}/{NAME}", durable_files.dump_json(content))


def tidy(
    root: Root,
    registered: Sequence[Segment],
    *,
    exists: Callable[[int], bool],
    now_ms: int,
    epoch: int = 0,
) -> None:
    """Make the archive's folders match the registered segments.

    Deletes unregistered files, and the folders of deleted topics, that a crash left. Restores
    missing names of segments and manifests that differ. Replaced and expired files stay for their
    grace.

    Args:
        root: of the archive.
        registered: all current segments.
        exists: returns whether a topic with this id exists.
        now_ms: start of the grace of files that only the manifest lists as current.
        epoch: of the leader that calls; files of later leaders stay. 0: only one home has the log.
    """
    by_topic: dict[tuple[str, int], list[Segment]] = {}
    for segment in registered:
        by_topic.setdefault((segment.topic, segment.topic_id), []).append(segment)
    for topic in root.folders(""):
        for topic_id in (int(name) for name in root.folders(topic) if name.isdecimal()):
            if exists(topic_id):
                segments = by_topic.get((topic, topic_id), [])
                _tidy_topic(
                    root, topic, topic_id=topic_id, segments=segments, now_ms=now_ms, epoch=epoch
                )
            else:
                remove_topic(root, topic=topic, topic_id=topic_id, epoch=epoch)


def _tidy_topic(
    root: Root, topic: str, *, topic_id: int, segments: Sequence[Segment], now_ms: int, epoch: int
) -> None:
    folder = topic_folder(topic, topic_id)
    listed = read(root, folder)
    if listed.epoch > epoch:
        raise LogFencedError(f"{folder}/{NAME} was written by a later leader of the log.")
    names = {each.name for each in segments}
    late = [entry for entry in listed.files if entry["name"] not in names]
    waiting = [Segment.from_path(f"{folder}/{entry['name']}") for entry in listed.replaced + late]
    wanted = {path for each in segments for path in (place(root, each), each.relative, each.index)}
    wanted |= {place(root, each) for each in waiting}
    for file in root.files(folder):
        if file not in wanted and not file.endswith(NAME) and _is_mine(file, epoch):
            log.info("Deleting %s, which is not a registered segment.", file)
            root.delete(file)
    show(root, segments)
    sync_shown(root, segments)
    if [each["name"] for each in listed.files] != [each.name for each in segments]:
        log.info("Writing the manifest of %s again.", folder)
        gone = waiting[len(listed.replaced) :]
        write(
            root,
            segments,
            topic=topic,
            topic_id=topic_id,
            replaced=gone,
            at_ms=now_ms,
            epoch=epoch,
        )


def _is_mine(file: str, epoch: int) -> bool:
    """Return True if no later leader wrote a file; one without an epoch may be anybody's."""
    if not epoch:
        return True
    found = epoch_of(file)
    return found is not None and found <= epoch


def remove_topic(root: Root, *, topic: str, topic_id: int, epoch: int = 0) -> None:
    """Delete the folder of a deleted topic; succeeds if there is none.

    Args:
        epoch: of the leader that calls. It may be fenced, and not know a new topic: files of later
            leaders stay, and so do empty folders. 0: only one home has the log.
    """
    folder = topic_folder(topic, topic_id)
    if not epoch:
        root.delete_folder(folder)
        return
    if read(root, folder).epoch > epoch:
        return
    for file in root.files(folder):
        if file.endswith(NAME) or _is_mine(file, epoch):
            root.delete(file)


def delete_replaced(
    root: Root,
    *,
    topic: str,
    topic_id: int,
    is_over: Callable[[int], bool],
    counted: Collection[str] = (),
    epoch: int = 0,
) -> set[str]:
    """Delete the replaced files for whose ``at_ms`` ``is_over`` returns True; return their names.

    The manifest still lists them: pass the names to ``write`` as ``forget``.

    Args:
        counted: names of registered segments, which stay in any case.
        epoch: of the leader that calls; files of later leaders stay.
    """
    folder = topic_folder(topic, topic_id)
    gone = [
        entry
        for entry in read(root, folder).replaced
        if is_over(entry["at_ms"])
        and entry["name"] not in counted
        and _is_mine(entry["name"], epoch)
    ]
    for entry in gone:
        segment = Segment.from_path(f"{folder}/{entry['name']}")
        # The visible name went long ago, but a leader that was stopped may have shown it again.
        for path in (f"{folder}/{entry['path']}", segment.relative, segment.index):
            root.delete(path)
    return {entry["name"] for entry in gone}


def entry_of(root: Root, segment: Segment) -> Entry:
    """Return the manifest's entry of a segment, from its footer.

    Raises:
        StorageError: the segment cannot be read, or holds other offsets than its name says.
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
        raise StorageError(
            f"{path} holds {footer.num_rows} messages with offsets {low} to {high}; its name says"
            f" {segment.base} to {segment.end - 1}."
        )
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
    """Return the smallest and the largest value of a column, from the row groups' statistics."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    paths = [groups[0].column(i).path_in_schema for i in range(footer.num_columns)]
    leaf = paths.index(column)
    found = [group.column(leaf).statistics for group in groups]
    known = [each for each in found if each is not None and each.has_min_max]
    low = min((each.min for each in known), default=None)
    return low, max((each.max for each in known), default=None)
