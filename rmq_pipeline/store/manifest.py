"""The manifest of a topic: which segments count, for readers that do not ask the broker.

``<topics>/<topic>/<topic_id>/_manifest.json`` is replaced atomically. The underscore hides it from
whoever reads the folder as a table of Parquet files.

    {"format": 1, "topic": …, "topic_id": …, "files": [{"path": "queue_id=0/….parquet",
     "queue_id": 0, "base": 0, "end": 500, "rows": 500, "bytes": 61234,
     "min_stored_at_ms": …, "max_stored_at_ms": …, "min_born_at_ms": …, "max_born_at_ms": …}, …]}

``path`` is relative to the manifest; files are in the order of queue_id and base. A time is null
where no message has one.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.errors import StorageError
from rmq_pipeline.store.log_file import sync_folder
from rmq_pipeline.store.segments import Segment, topic_folder

log = logging.getLogger(__name__)

NAME: Final = "_manifest.json"
FORMAT: Final = 1
_TIMES: Final = ("stored_at_ms", "born_at_ms")


def read(folder: Path) -> list[dict[str, Any]]:
    """The files that count in the folder of a topic; none without a manifest."""
    try:
        listed = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        return []
    if listed["format"] > FORMAT:
        raise ValueError(f"{folder / NAME} was written by a newer version.")
    files: list[dict[str, Any]] = listed["files"]
    return files


def write(topics: Path, segments: Sequence[Segment]) -> None:
    """List exactly these segments of one topic, at least one, in queue and offset order.

    Raises:
        StorageError: one of them cannot be read.
    """
    topic, topic_id = segments[0].topic, segments[0].topic_id
    folder = topic_folder(topics, topic=topic, topic_id=topic_id)
    known = {entry["path"]: entry for entry in read(folder)}
    files = [known.get(segment.name) or _entry(folder, segment) for segment in segments]
    content = {"format": FORMAT, "topic": topic, "topic_id": topic_id, "files": files}
    unfinished = folder / f"{NAME}.new"
    with unfinished.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / NAME)
    sync_folder(folder)


def tidy(topics: Path, registered: Sequence[Segment]) -> None:
    """Bring the folders to what is registered.

    What a crash left goes: files that nobody registered, topics that were deleted. Manifests that
    do not say what is registered are written again.
    """
    by_folder: dict[Path, list[Segment]] = {}
    for segment in registered:
        folder = topic_folder(topics, topic=segment.topic, topic_id=segment.topic_id)
        by_folder.setdefault(folder, []).append(segment)
    for folder in sorted(topics.glob("*/*")):
        if folder in by_folder:
            _tidy_topic(folder, {segment.name for segment in by_folder[folder]})
        else:
            remove_topic(topics, topic=folder.parent.name, topic_id=int(folder.name))
    for folder, segments in by_folder.items():
        listed = [entry["path"] for entry in read(folder)]
        if listed != [segment.name for segment in segments]:
            write(topics, segments)


def remove_topic(topics: Path, *, topic: str, topic_id: int) -> None:
    """Delete what a topic that is gone has left; nothing there: nothing happens."""
    folder = topic_folder(topics, topic=topic, topic_id=topic_id)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:  # another topic had this name, or has it now
        return


def _tidy_topic(folder: Path, names: set[str]) -> None:
    for file in folder.glob("queue_id=*/*"):
        name = f"{file.parent.name}/{file.name}"
        if name not in names:
            log.info("Deleting %s, which was never registered.", file)
            file.unlink()


def _entry(folder: Path, segment: Segment) -> dict[str, Any]:
    path = folder / segment.name
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    entry: dict[str, Any] = {
        "path": segment.name,
        "queue_id": segment.queue_id,
        "base": segment.base,
        "end": segment.end,
        "rows": footer.num_rows,
        "bytes": path.stat().st_size,
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
