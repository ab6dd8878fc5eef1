"""Side sinks: folders that replays fill range by range, in which the rows of an hour are once.

The names of their files say of which group and range they are, so that a later replay finds what
its own files replace. Runs of one backfill may publish at the same time: one after the other.
"""

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import RequestError, SinkChangedError
from rmq_pipeline.lake import manifest
from rmq_pipeline.spark.replay import staged

#: Whoever has locked it publishes. It begins as readers of folders expect of what is no data.
LOCK: Final = "_publish.lock"
_LABEL: Final = r"(?P<group>[0-9a-f]{16})-(?P<first>[-\d]+T\d\d)-(?P<end>[-\d]+T\d\d)"
_NAME: Final = re.compile(f"/{staged.prefix(_LABEL)}-")


@dataclass(frozen=True, slots=True)
class SideRange:
    """Hours of a consumer group in a side sink, half-open."""

    group: str
    from_ms: int
    to_ms: int

    @property
    def label(self) -> str:
        """The name of its files, the same for every replay of the range."""
        return f"{_digest(self.group)}-{_hour(self.from_ms)}-{_hour(self.to_ms)}"

    def of(self, path: str) -> "SideRange | None":
        """The range of a file; None when it is of another group."""
        # Before names said the range, they were made of all of it.
        whole = _digest(f"{self.group}//{self.from_ms}/{self.to_ms}")
        if f"/{staged.prefix(whole)}-" in path:
            return self
        found = _NAME.search(path)
        if found is None or found["group"] != _digest(self.group):
            return None
        return SideRange(self.group, _ms(found["first"]), _ms(found["end"]))

    def holds(self, other: "SideRange") -> bool:
        """Whether all of the other range is in this one."""
        return self.from_ms <= other.from_ms and other.to_ms <= self.to_ms

    def touches(self, other: "SideRange") -> bool:
        """Whether they have hours in common."""
        return self.from_ms < other.to_ms and other.from_ms < self.to_ms

    def __str__(self) -> str:
        return f"[{_hour(self.from_ms)}, {_hour(self.to_ms)})"


def replaced(folder: Path, files: pa.Table, *, mine: SideRange) -> list[bool]:
    """Which files of a side sink cease to count once those of a range do.

    Args:
        folder: of the side sink.
        files: schema.SINK_FILE, those that count.
        mine: the range.

    Raises:
        RequestError: a file has rows of hours in the range and of others: it can neither stay nor
            go.
    """
    ranges = [mine.of(path) for path in files["path"].to_pylist()]
    wider = {each for each in ranges if each and mine.touches(each) and not mine.holds(each)}
    if wider:
        both = SideRange(
            mine.group,
            min(each.from_ms for each in (mine, *wider)),
            max(each.to_ms for each in (mine, *wider)),
        )
        raise RequestError(
            f"The side sink {folder} was filled with the hours {min(map(str, wider))} at once, and"
            f" {mine} is not all of them: replay {both}, or into another folder."
        )
    return [each is not None and mine.holds(each) for each in ranges]


def check(folder: Path, mine: SideRange) -> None:
    """See to it that a side sink takes the rows of a range.

    Raises:
        RequestError: it does not; see ``replaced``.
    """
    replaced(folder, manifest.read(folder).files, mine=mine)


def publish(folder: Path, files: pa.Table, *, mine: SideRange) -> int:
    """Let these files count in place of what the side sink has of their range.

    Args:
        folder: of the side sink.
        files: schema.SINK_FILE, staged under the range's label.
        mine: the range.

    Returns:
        How many files count no longer.

    Raises:
        RequestError: the side sink does not take them; they were deleted.
        SinkChangedError: another replay of the same range was faster, and deleted them.
    """
    with _alone(folder):
        before = manifest.read(folder)
        try:
            gone = pa.array(replaced(folder, before.files, mine=mine), pa.bool_())
        except RequestError:
            staged.delete(folder, files)
            raise
        if not all((folder / path).exists() for path in files["path"].to_pylist()):
            raise SinkChangedError(f"Another replay of {mine} has filled the side sink {folder}.")
        old = before.files.filter(gone)
        counting = pa.concat_tables([before.files.filter(pc.invert(gone)), files])
        listed = counting.replace_schema_metadata({"version": str(before.version + 1)})
        manifest.publish(folder, listed, known=before)
        staged.delete(folder, old)
        staged.sweep(folder, label=mine.label, counting=counting["path"].to_pylist())
    return int(old.num_rows)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hour(ms: int) -> str:
    return str(np.datetime64(ms // staged.HOUR_MS, "h"))


def _ms(hour: str) -> int:
    return int(np.datetime64(hour, "h").astype(np.int64)) * staged.HOUR_MS
