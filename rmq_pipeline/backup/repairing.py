"""Repairing a stopped home that a start refuses: all up to the damage is kept, the rest set aside.

| damage | repair |
| --- | --- |
| a frame that the database does not have yet | the log is cut before it |
| a log file between two others is gone or has no header | the log is cut at its place |
| ``state.duckdb`` cannot be read, and the log has its beginning | it is made again from the log |

Nothing is deleted: what is taken out lies in ``damaged/<time>/`` of the home.
"""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import durable_files
from rmq_pipeline.backup import deriving
from rmq_pipeline.backup.deriving import LOG
from rmq_pipeline.backup.log_files import TIMES
from rmq_pipeline.backup.snapshot import SourceHome
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.writer import MESSAGES
from rmq_pipeline.endpoint import LOCK_FILE
from rmq_pipeline.errors import CorruptLogError, HomeLockedError, OperatorError
from rmq_pipeline.flight.flags import Flags, checked
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.frame import FrameHeader, completed, decode
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.store.stored_state import read_database

#: Folder of what repairs took out.
ASIDE: Final = "damaged"
_RESTORE: Final = "Restore a backup: `rmq restore DEST HOME`."


class UnrepairableError(OperatorError):
    """A home has damage that cannot be cut off or made again."""

    remedy = _RESTORE


@dataclass(slots=True)
class Lost:
    """Sound frames behind a cut, which go with it."""

    frames: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    #: Number of messages, and first offset, by (topic_id, queue_id).
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    first_offset: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a repair does to a home."""

    home: Path
    #: Description of each damage.
    damage: tuple[str, ...]
    #: Position at which the log is cut, and its end before; None: it is whole.
    cut: tuple[int, int] | None
    lost: Lost
    #: The database is made again from the log.
    is_derived: bool

    @property
    def is_needed(self) -> bool:
        """Return True if there is something to do."""
        return self.cut is not None or self.is_derived


@contextmanager
def locked(home: Path) -> Iterator[Path]:
    """Keep brokers away from a home.

    Raises:
        RequestError: it is no home.
        HomeLockedError: a process has it open.
    """
    path = SourceHome.open(home).path
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HomeLockedError(f"{path} is open in another process.") from error
        yield path
    finally:
        os.close(lock)


def plan(home: Path) -> Plan:
    """Read a locked home, and say what a repair does; nothing is changed.

    Raises:
        UnrepairableError: the damage cannot be repaired.
    """
    damage: list[str] = []
    dispatched, is_derived = 0, False
    try:
        dispatched = read_database(home / FILE_NAME).dispatched
    except ValueError as error:
        damage.append(f"{FILE_NAME}: {error}")
        is_derived = True
    paths = sorted((home / LOG).glob(f"*{log_file.SUFFIX}"))
    if not paths:
        raise UnrepairableError(f"{home / LOG} has no file of the log.")
    first = int(paths[0].stem)
    if is_derived and first:
        raise UnrepairableError(
            f"{damage[0]}. It cannot be made from the log, which begins at position {first}."
        )
    end, why, sound = _sound_end(paths, dispatched)
    cut, lost = None, Lost()
    if why is not None:
        damage.append(why)
        cut = end, max([end, *(header.position + header.length for _, header in sound)])
        lost = _lost(sound)
    return Plan(home, tuple(damage), cut, lost, is_derived)


def _sound_end(
    paths: Sequence[Path], dispatched: int
) -> tuple[int, str | None, list[tuple[LogFile, FrameHeader]]]:
    """Return where the sound frames end, the damage there, and the frame headers behind it.

    Frames before ``dispatched`` are not read, as a start does not.
    """
    end, why = int(paths[0].stem), None
    behind: list[tuple[LogFile, FrameHeader]] = []
    for number, path in enumerate(paths):
        is_last = number + 1 == len(paths)
        following = None if is_last else int(paths[number + 1].stem)
        if following is not None and following <= dispatched and why is None:
            end = following  # a start does not read it
            continue
        try:
            file = LogFile.open(path, schemas=SCHEMAS)
        except CorruptLogError as error:
            why = why or error.message
            continue
        try:
            if why is None and file.base > max(end, dispatched):
                why = f"{path}: the log file before it is gone, from position {end} on."
            start = max(file.base, dispatched)
            if why is None:
                end, why = _walk(file, start, following=following)
                start = end
            if why is not None:
                behind += _frames_from(file, start)
        finally:
            file.finish()
    if why is not None and end < dispatched:
        raise UnrepairableError(f"{why} The database has reached position {dispatched}.")
    return end, why, behind


def _walk(file: LogFile, position: int, *, following: int | None) -> tuple[int, str | None]:
    while following is None or position < following:
        try:
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
        except CorruptLogError as error:
            after = file.frames_after(position, file.written_end(position))
            is_torn = following is None and not any(each.synced > position for each in after)
            return position, None if is_torn else error.message
        position = end
    return position, None


def _frames_from(file: LogFile, start: int) -> Iterator[tuple[LogFile, FrameHeader]]:
    stop = file.written_end(start)
    first = file.frame_at(start)
    for header in [*([first] if first else []), *file.frames_after(start, stop)]:
        yield file, header


def _lost(frames: Sequence[tuple[LogFile, FrameHeader]]) -> Lost:
    """Describe the frames that can still be read."""
    lost = Lost()
    for file, header in frames:
        try:
            _, sections = file.frame_sections(header.position)
            batches = [
                (each.kind, decode(file.payload(each), file.schemas[each.kind]))
                for each in sections
                if each.kind in TIMES
            ]
        except CorruptLogError:
            continue
        lost.frames += 1
        for kind, found in batches:
            rows = completed(found, SCHEMAS[kind])
            if not rows.num_rows:
                continue
            times = pc.min_max(rows.column(TIMES[kind])).as_py()
            lost.first_ms = min(times["min"], lost.first_ms or times["min"])
            lost.last_ms = max(times["max"], lost.last_ms or 0)
            if kind == MESSAGES:
                _count(lost, rows)
    return lost


def _count(lost: Lost, rows: pa.RecordBatch) -> None:
    names = ("topic_id", "queue_id", "queue_offset")
    for topic_id, queue_id, offset in zip(
        *(rows.column(name).to_pylist() for name in names), strict=True
    ):
        key = (topic_id, queue_id)
        lost.messages[key] += 1
        lost.first_offset[key] = min(offset, lost.first_offset.get(key, offset))


def repair(found: Plan) -> Path:
    """Do what a plan says to a locked home; return the folder of what was taken out."""
    home = found.home
    name = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = home / ASIDE / name
    durable_files.make_folder(aside)
    (home / ASIDE).chmod(0o700)
    if found.cut is not None:
        _cut_log(home, found.cut[0], aside=aside)
    if found.is_derived:
        for name in (FILE_NAME, f"{FILE_NAME}.wal"):
            if (home / name).exists():
                (home / name).rename(aside / name)
        deriving.derive(home, checked(Flags.remembered(home).settings), without=())
    os.sync()
    return aside


def _cut_log(home: Path, position: int, *, aside: Path) -> None:
    for path in sorted((home / LOG).glob(f"*{log_file.SUFFIX}")):
        base = int(path.stem)
        if base and base >= position:
            path.rename(aside / path.name)
        elif position < base + path.stat().st_size:
            shutil.copyfile(path, aside / path.name)
    deriving.truncate(home, position)
