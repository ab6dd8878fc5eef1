"""Manifest of a backup: one consistent set of files, and which moments it can restore.

A backup has the derived state at a log position (the snapshot), every file that this state names,
and the log from the first frame that is in none of these files up to ``log_end``. So it restores
every moment from the snapshot's last frame to before the last frame: more frames of the same ms may
follow that one. All times are those of frames: the clock of the machine plays no part.

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
DAY_MS: Final = 86_400_000
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
        """Last moment that it restores; before the first one if only its end can be restored."""
        return self.log_end_ms - 1

    @property
    def size(self) -> int:
        """Number of bytes of all that it names."""
        return sum(each.size for each in self.files) + sum(part.size for part in self.log)

    def objects(self) -> set[str]:
        """Return the objects that it names."""
        return {each.sha256 for each in self.files} | {part.sha256 for part in self.log}

    def sizes(self) -> set[tuple[str, int]]:
        """Return the objects that it names, with their sizes."""
        files = {(each.sha256, each.size) for each in self.files}
        return files | {(part.sha256, part.size) for part in self.log}

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
            said.pop("taken_at_ms", None)  # manifests had it, by the clock of the machine
            found = cls(
                files=tuple(StoredFile(**each) for each in said.pop("files")),
                log=tuple(LogPart(**each) for each in said.pop("log")),
                snapshot=Snapshot(**said.pop("snapshot")),
                last_frame=None if last is None else LastFrame(**last),
                **said,
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is no manifest: {error!r}") from error
        for each in (found, found.snapshot, *found.files, *found.log, found.last_frame):
            _check_types(each)
        base, stop = -1, 0
        for part in found.log:
            if part.start != (stop if part.base == base else 0) or part.stop <= part.start:
                raise ValueError(f"its log has a hole in file {part.base}")
            base, stop = part.base, part.stop
        for file in found.files:
            parts = PurePosixPath(file.path).parts
            if not parts or ".." in parts or PurePosixPath(file.path).is_absolute():
                raise ValueError(f"it names {file.path!r}, which is not in a home")
        return found


def _check_types(part: Any) -> None:
    """Check the numbers and texts of a part of a manifest."""
    for name, kind in getattr(type(part), "__annotations__", {}).items():
        value = getattr(part, name)
        if kind in {int, str} and type(value) is not kind:
            raise ValueError(f"{name} is {value!r}")
        if kind is int and value < 0:
            raise ValueError(f"{name} is {value}")


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
        f"The backups cannot restore {format_ms(at_ms)}. They restore {spans or 'their ends'}. The"
        f" last frame is of {format_ms(manifests[-1].log_end_ms)}.",
        remedy="Give a moment in one of these spans; without --to-time the last one is restored.",
    )


def restorable(manifests: Iterable[Manifest]) -> list[tuple[int, int]]:
    """Return the spans of time that can be restored, in ms since 1970, oldest first."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted((each.earliest_ms, each.latest_ms) for each in manifests):
        if first > last:
            continue
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], max(spans[-1][1], last)
        else:
            spans.append((first, last))
    return spans


def dropped(manifests: Sequence[Manifest], *, keep: str) -> list[Manifest]:
    """Return the manifests that are no longer kept; the newest one is always kept.

    Args:
        manifests: oldest first.
        keep: a number of backups, or of days with a d: those that restore a moment of the days
            before the newest frame.

    Raises:
        RequestError: ``keep`` is neither.
    """
    if (days := kept_days(keep)) is None:
        return list(manifests[: -int(keep)])
    since_ms = manifests[-1].log_end_ms - days * DAY_MS
    late = [each for each in manifests if each.log_end_ms >= since_ms]
    return list(manifests[: len(manifests) - max(1, len(late))])


def kept_days(keep: str) -> int | None:
    """Return for how many days backups are kept; None: a number of backups is kept.

    Raises:
        RequestError: it says neither.
    """
    found = _KEEP.fullmatch(keep)
    if found is None:
        raise RequestError(
            f"{keep!r} says neither how many backups to keep nor for how many days.",
            remedy="Give a number such as 30, or days such as 14d.",
        )
    return int(found[1]) if found[2] else None
