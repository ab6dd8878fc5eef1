"""Files that a replay stages in sinks, and side sinks, which replays fill range by range.

Names of staged files begin with ``replay-`` and the replay's label. A consumer's window, which
deletes stale files of other windows, skips them. A repeated replay finds the files of its dead
attempts. In a side sink the label contains the group and the range, so a later replay finds the
files that it replaces, and each hour's rows are there once. Runs of one backfill may publish
concurrently; a lock serializes them.
"""

import fcntl
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import BusyError, RequestError, SinkChangedError
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.manifest import checked
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.root import Root

HOUR_MS: Final = 3_600_000
#: Times that a replay publishes its files, if others are faster.
_TRIES: Final = 20
_PREFIX: Final = "replay-"
#: File whose lock serializes publishing. The underscore marks it as no data for readers of folders.
PUBLISH_LOCK: Final = "_publish.lock"
_LABEL: Final = r"(?P<group>[0-9a-f]{16})-(?P<first>[-\d]+T\d\d)-(?P<end>[-\d]+T\d\d)"
_FILE_NAME: Final = re.compile(f"/{_PREFIX}{_LABEL}-")


def prefix(label: str) -> str:
    """Return the prefix of a replay's file names."""
    return f"{_PREFIX}{label}"


def delete_files(folder: Place, files: pa.Table) -> None:
    """Delete staged files."""
    root = at(folder)
    for path in files["path"].to_pylist():
        root.delete(checked(root, path))


def sweep(folder: Place, *, label: str, counting: Iterable[str]) -> list[str]:
    """Delete files left by dead attempts of the same replay.

    Args:
        folder: folder of the sink.
        label: label of the replay.
        counting: paths to keep.

    Returns:
        The deleted paths.
    """
    root, named = at(folder), set(counting)
    found = root.matching(f"hour=*/{prefix(label)}-*.parquet")
    left = [path for path in found if path not in named]
    for path in left:
        root.delete(path)
    return left


def hour_partitions(from_ms: int, to_ms: int) -> list[str]:
    """Return the partitions of [from_ms, to_ms), which must be whole hours.

    Raises:
        ValueError: the range is not made of whole hours.
    """
    if from_ms % HOUR_MS or to_ms % HOUR_MS or from_ms >= to_ms:
        raise ValueError(f"[{from_ms}, {to_ms}) is not made of whole hours.")
    return [str(np.datetime64(h, "h")) for h in range(from_ms // HOUR_MS, to_ms // HOUR_MS)]


@dataclass(frozen=True, slots=True)
class SideRange:
    """Hours of a consumer group in a side sink, half-open."""

    group: str
    from_ms: int
    to_ms: int

    @property
    def label(self) -> str:
        """Label in the file names, the same for every replay of the range."""
        return f"{_digest(self.group)}-{_hour(self.from_ms)}-{_hour(self.to_ms)}"

    def of(self, path: str) -> "SideRange | None":
        """Return the range of a file; None if it belongs to another group."""
        # Older versions named files by a digest of group and range.
        whole = _digest(f"{self.group}//{self.from_ms}/{self.to_ms}")
        if f"/{prefix(whole)}-" in path:
            return self
        found = _FILE_NAME.search(path)
        if found is None or found["group"] != _digest(self.group):
            return None
        return SideRange(self.group, _ms_of(found["first"]), _ms_of(found["end"]))

    def holds(self, other: "SideRange") -> bool:
        """Return True if this range contains the other one."""
        return self.from_ms <= other.from_ms and other.to_ms <= self.to_ms

    def touches(self, other: "SideRange") -> bool:
        """Return True if the ranges have hours in common."""
        return self.from_ms < other.to_ms and other.from_ms < self.to_ms

    def __str__(self) -> str:
        return f"[{_hour(self.from_ms)}, {_hour(self.to_ms)})"


def replaced_files(folder: Place, files: pa.Table, *, mine: SideRange) -> list[bool]:
    """Return a mask of the side sink's files that the files of a range replace.

    Args:
        folder: folder of the side sink.
        files: schema.SINK_FILE, the current files.
        mine: the range.

    Raises:
        RequestError: a file has rows both inside and outside the range, or its range is unknown.
            Such a file can be neither kept nor replaced.
    """
    _check_names(folder, files, mine=mine)
    ranges = [mine.of(path) for path in files["path"].to_pylist()]
    wider = {each for each in ranges if each and mine.touches(each) and not mine.holds(each)}
    if wider:
        both = SideRange(
            mine.group,
            min(each.from_ms for each in (mine, *wider)),
            max(each.to_ms for each in (mine, *wider)),
        )
        raise RequestError(
            f"One replay filled the hours {min(map(str, wider))} of the side sink {at(folder)}; the"
            f" range {mine} is only a part of them.",
            remedy=f"Replay {both}, or replay into another folder.",
        )
    return [each is not None and mine.holds(each) for each in ranges]


def _check_names(folder: Place, files: pa.Table, *, mine: SideRange) -> None:
    """Refuse files in hours of a range whose names do not contain their range.

    An older version named files by a digest of group and range, which only the same range matches.
    """
    hours = set(hour_partitions(mine.from_ms, mine.to_ms))
    unknown = [
        path
        for path, hour in zip(
            files["path"].to_pylist(), files["partition"].to_pylist(), strict=True
        )
        if hour in hours and mine.of(path) is None and _FILE_NAME.search(path) is None
    ]
    if unknown:
        raise RequestError(
            f"The side sink {at(folder)} has {len(unknown)} files in the hours {mine} without a"
            f" replay's range in their names, such as {unknown[0]}. Their rows could appear twice.",
            remedy="Replay into another folder.",
        )


def check_side_sink(folder: Place, mine: SideRange) -> None:
    """Check that a side sink accepts the rows of a range.

    Raises:
        RequestError: it does not; see ``replaced_files``.
    """
    replaced_files(folder, manifest.read(folder).files, mine=mine)


def publish_side_sink(folder: Place, files: pa.Table, *, mine: SideRange) -> int:
    """Publish files in place of the side sink's files of their range.

    Args:
        folder: folder of the side sink.
        files: schema.SINK_FILE, staged under the range's label.
        mine: the range.

    Returns:
        The number of replaced files.

    Raises:
        RequestError: the side sink does not accept the files; they were deleted.
        SinkChangedError: another replay of the same range was faster, and deleted the files.
        BusyError: other replays were faster each time. The staged files stay.
    """
    root = at(folder)
    with _locked(root):
        old = _publish(root, files, mine=mine)
        delete_files(root, old)
        if isinstance(root, LocalRoot):
            # Elsewhere another replay of the range may still be about to publish its files.
            counting = manifest.read(root).files["path"].to_pylist()
            sweep(root, label=mine.label, counting=counting)
    return int(old.num_rows)


def _publish(root: Root, files: pa.Table, *, mine: SideRange) -> pa.Table:
    """Publish files of a range, and return the files that they replace."""
    staged = files["path"].to_pylist()
    old = manifest.NOTHING.files
    for _ in range(_TRIES):
        before = manifest.read(root)
        if staged and set(staged) <= set(before.files["path"].to_pylist()):
            return old
        try:
            gone = pa.array(replaced_files(root, before.files, mine=mine), pa.bool_())
        except RequestError:
            delete_files(root, files)
            raise
        if not all(root.exists(path) for path in staged):
            raise SinkChangedError(f"Another replay of {mine} has filled the side sink {root}.")
        old = before.files.filter(gone)
        counting = pa.concat_tables([before.files.filter(pc.invert(gone)), files])
        listed = counting.replace_schema_metadata({"version": str(before.version + 1)})
        manifest.publish(root, listed, known=before)
        # The answer of ``publish`` does not decide: the store's may be lost, and of a version that
        # other replays have passed, nothing is written.
        offset = 0 if before.table is None else before.table.offset
        if manifest.has_changed(root, before.version + 1 + offset, add=files, remove=old):
            return old
    raise BusyError(f"Other replays into the side sink {root} were faster {_TRIES} times.")


@contextmanager
def _locked(root: Root) -> Iterator[None]:
    """Serialize publishers of a local folder; elsewhere, the faster one of a version wins."""
    root.create_folder()
    if not isinstance(root, LocalRoot):
        yield
        return
    with (root.folder / PUBLISH_LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hour(ms: int) -> str:
    return str(np.datetime64(ms // HOUR_MS, "h"))


def _ms_of(hour: str) -> int:
    return int(np.datetime64(hour, "h").astype(np.int64)) * HOUR_MS
