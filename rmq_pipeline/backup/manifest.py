"""Manifest of a backup: one consistent set of files, and which moments it can restore.

A backup has the derived state at a log position (the snapshot), every file that this state names,
and the log from the first frame that is in none of these files up to ``log_end``. So it restores
every moment from the snapshot's last frame to the time at which the end of the log was read.

This module is pure: ``destination`` reads and writes what is decided here.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.errors import HomeFormatError, RequestError
from rmq_pipeline.limits import MIB
from rmq_pipeline.text import format_ms

FORMAT: Final = 1
#: A new snapshot is taken once the log since the last one has this many bytes: a restore reads it.
LOG_BYTES_MAX: Final = 256 * MIB
_DAY_MS: Final = 86_400_000
_KEEP: Final = re.compile(r"([1-9][0-9]{0,5})(d?)")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the home, by its path there, and the object with its content."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class LogPart:
    """The bytes [start, stop) of the log file with this base, and the object with them."""

    base: int
    start: int
    stop: int
    sha256: str

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LastFrame:
    """The last frame of a copied log: a log that has it there has all frames before it."""

    seed: int
    position: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Derived state at a log position."""

    position: int
    #: Time of the last frame in it.
    at_ms: int
    #: All earlier frames are in files that it names.
    sealed_to: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One backup."""

    number: int
    home: str
    #: When the end of the log was read: no frame of an earlier time can follow.
    taken_at_ms: int
    snapshot: Snapshot
    log_end: int
    #: Time of the last frame.
    log_end_ms: int
    last_frame: LastFrame | None
    files: tuple[StoredFile, ...]
    log: tuple[LogPart, ...]

    @property
    def earliest_ms(self) -> int:
        """First moment that it restores."""
        return self.snapshot.at_ms

    @property
    def latest_ms(self) -> int:
        """Last moment that it restores."""
        return max(self.taken_at_ms, self.log_end_ms)

    @property
    def size(self) -> int:
        """Number of bytes of all that it names."""
        return sum(each.size for each in self.files) + sum(part.size for part in self.log)

    def objects(self) -> set[str]:
        """Return the objects that it names."""
        return {each.sha256 for each in self.files} | {part.sha256 for part in self.log}

    def sizes(self) -> set[tuple[str, int]]:
        """Return the objects that it names, with their sizes."""
        return {(each.sha256, each.size) for each in (*self.files, *self.log)}

    def content(self) -> bytes:
        """Return the content of its file."""
        return durable_files.dump_json({"format": FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read the content of a manifest's file.

        Raises:
            ValueError: it is damaged, or names a path outside of a home.
            HomeFormatError: a newer version wrote it.
        """
        said: dict[str, Any] = durable_files.load_json(content)
        try:
            if said.pop("format") != FORMAT:
                raise HomeFormatError(
                    "A newer version wrote this backup.",
                    remedy="Restore it with the version of rmq_pipeline that wrote it.",
                )
            last = said.pop("last_frame")
            found = cls(
                files=tuple(StoredFile(**each) for each in said.pop("files")),
                log=tuple(LogPart(**each) for each in said.pop("log")),
                snapshot=Snapshot(**said.pop("snapshot")),
                last_frame=None if last is None else LastFrame(**last),
                **said,
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is no manifest: {error!r}") from error
        for file in found.files:
            parts = PurePosixPath(file.path).parts
            if not parts or ".." in parts or PurePosixPath(file.path).is_absolute():
                raise ValueError(f"it names {file.path!r}, which is not in a home")
        return found


def chosen(manifests: Sequence[Manifest], at_ms: int | None) -> Manifest:
    """Return the newest manifest that restores a moment; None: the newest one.

    Raises:
        RequestError: no manifest restores it; the error says which moments can be restored.
    """
    if not manifests:
        raise RequestError("There is no backup.", remedy="Take one: `rmq backup DEST`.")
    if at_ms is None:
        return manifests[-1]
    for manifest in reversed(manifests):
        if manifest.earliest_ms <= at_ms <= manifest.latest_ms:
            return manifest
    spans = ", ".join(
        f"{format_ms(first)} to {format_ms(last)}" for first, last in restorable(manifests)
    )
    raise RequestError(
        f"The backups cannot restore {format_ms(at_ms)}. They restore {spans}.",
        remedy="Give a moment in one of these spans; without --to-time the last one is restored.",
    )


def restorable(manifests: Iterable[Manifest]) -> list[tuple[int, int]]:
    """Return the spans of time that can be restored, in ms since 1970, oldest first."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted((each.earliest_ms, each.latest_ms) for each in manifests):
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], last)
        else:
            spans.append((first, last))
    return spans


def dropped(manifests: Sequence[Manifest], *, keep: str, now_ms: int) -> list[Manifest]:
    """Return the manifests that are no longer kept; the newest one is always kept.

    Args:
        manifests: oldest first.
        keep: a number of backups, or of days with a d: those that restore a moment of these days.
        now_ms: the end of the days.

    Raises:
        RequestError: ``keep`` is neither.
    """
    found = _KEEP.fullmatch(keep)
    if found is None:
        raise RequestError(
            f"{keep!r} says neither how many backups to keep nor for how many days.",
            remedy="Give a number such as 30, or days such as 14d.",
        )
    count = int(found[1])
    if not found[2]:
        return list(manifests[:-count])
    since_ms = now_ms - count * _DAY_MS
    late = [each for each in manifests if each.latest_ms >= since_ms]
    return list(manifests[: len(manifests) - max(1, len(late))])


def continues(previous: Manifest | None, *, first: int, end: int, is_same_log: bool) -> bool:
    """Return True if a backup needs no new snapshot: the log goes on where the last one ended.

    Args:
        previous: the last backup.
        first: position of the first frame that the home has.
        end: end of its log.
        is_same_log: the home's log has the last frame of the backup.
    """
    if previous is None or not is_same_log or first > previous.log_end:
        return False
    return end - previous.snapshot.position <= LOG_BYTES_MAX
