"""Damage in the log files of a home that no broker has open; nothing is changed.

A file with a damaged header is read all the same if the rest of the log says what the header said:
its base is its name, the seed is that of the other files, and its frames are sound with both.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import durable_files
from rmq_pipeline.backup.log_files import TIMES
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES
from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.frame import FileHeader, FrameHeader, completed, decode
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.store.log.recovery import VALIDATED_FILE
from rmq_pipeline.topic import Topic

_GONE: Final = "is gone, or has neither a header nor a sound frame"


@dataclass(slots=True)
class Lost:
    """Frames behind a cut, which go with it."""

    #: Sound ones.
    frames: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    #: First offset that is lost, and the end of the lost ones, by (topic_id, queue_id).
    offsets: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    #: Position up to which a registration behind the cut says that the log is sealed.
    sealed_to: int = 0


@dataclass(frozen=True, slots=True)
class ReadFile:
    """An open log file, and whether its header is to be written again."""

    file: LogFile
    is_headless: bool

    @property
    def header(self) -> bytes:
        """The first page, as it should be."""
        file = self.file
        return frame.pack_file_header(
            FileHeader(file.version, file.seed, file.base, frame.fingerprint(file.schemas))
        )


class DamagedLog:
    """The log files of a folder, and the reason for each that cannot be opened."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob(f"*{log_file.SUFFIX}"))
        self.files: dict[int, ReadFile] = {}
        self.damage: dict[int, str] = {}
        for path in self.paths:
            try:
                self.files[int(path.stem)] = ReadFile(LogFile.open(path, schemas=SCHEMAS), False)
            except CorruptLogError as error:
                self.damage[int(path.stem)] = error.message
        self.seeds = {each.file.seed for each in self.files.values()} or _seed_of(folder)
        for base in list(self.damage):
            found = self._without_header(log_file.path_of(folder, base))
            if found is not None:
                self.files[base] = ReadFile(found, True)

    def close(self) -> None:
        """Close all files."""
        for each in self.files.values():
            each.file.finish()

    @property
    def bases(self) -> list[int]:
        """Positions at which files begin by their names, also those that cannot be read."""
        return [int(path.stem) for path in self.paths]

    def _without_header(self, path: Path) -> LogFile | None:
        """Open a file without its header; None if its frames do not prove what it said."""
        base = int(path.stem)
        before = [each for each in self.files if each < base]
        after = [each for each in self.files if each > base]
        near = [*([max(before)] if before else []), *([min(after)] if after else [])]
        kinds = {
            (each.version, frame.fingerprint(each.schemas))
            for each in (self.files[base].file for base in near)
        } or {(frame.VERSION, frame.fingerprint(SCHEMAS))}
        if len(self.seeds) != 1 or len(kinds) != 1 or path.stat().st_size <= log_file.PAGE_BYTES:
            return None
        ((version, print_),) = kinds
        schemas = frame.written_schemas(print_, SCHEMAS)
        is_current = (version, schemas) == (frame.VERSION, SCHEMAS)
        if schemas is None or (len(near) < 2 and not is_current):
            return None  # the columns may have changed in this file
        (seed,) = self.seeds
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = LogFile(
            path,
            seed=seed,
            base=base,
            descriptor=descriptor,
            schemas=schemas,
            version=version,
            is_current=is_current,
        )
        if _is_readable(found):
            return found
        found.finish()
        return None


def _seed_of(folder: Path) -> set[int]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {int(durable_files.load_json((folder / VALIDATED_FILE).read_bytes())["seed"])}
    return set()


def _is_readable(file: LogFile) -> bool:
    """Return True if the first frame is sound, and has the columns of the file."""
    try:
        sections_of(file, file.base)
    except (CorruptLogError, pa.ArrowException, OSError, ValueError):
        return False
    return True


def sections_of(file: LogFile, position: int) -> tuple[int, list[tuple[int, pa.RecordBatch]]]:
    """Return the end of a frame, and its messages and events.

    Raises:
        CorruptLogError: it is damaged.
    """
    end, sections = file.frame_sections(position)
    payloads = [(each.kind, file.payload(each)) for each in sections]
    return end, [
        (kind, completed(decode(payload, file.schemas[kind]), SCHEMAS[kind]))
        for kind, payload in payloads
        if kind in TIMES
    ]


@dataclass(frozen=True, slots=True)
class SoundEnd:
    """Where the sound frames of a log end."""

    position: int
    #: The damage there; None: the log is whole.
    why: str | None
    #: Sound frame headers behind it, with their files.
    behind: tuple[tuple[LogFile, FrameHeader], ...]


def sound_end(found: DamagedLog, *, first: int, start: int, marked: int) -> SoundEnd:
    """Read the frames from ``start`` on until one is damaged or missing.

    Args:
        found: the files.
        first: base of the file with which the log begins.
        start: the first frame that the database does not have.
        marked: position up to which the log was on disk.

    Raises:
        CorruptLogError: a frame reaches into the next file.
    """
    bases = [base for base in found.bases if base >= first]
    end, why = first, None
    behind: list[tuple[LogFile, FrameHeader]] = []
    for base, following in zip(bases, [*bases[1:], None], strict=True):
        if why is None and following is not None and following <= start:
            end = following  # a start does not read it
            continue
        read = found.files.get(base)
        if read is None:
            why = why or f"{found.damage[base]} The file {_GONE}."
            continue
        file, at = read.file, max(base, start)
        if why is None:
            end, why = _walk(file, at, following=following, marked=marked)
            at = end
            if why is None and following is not None and end > following:
                raise file.damage(end, "a frame reaches into the next file")
        if why is not None:
            behind += [(file, each) for each in _frames_from(file, at)]
    return SoundEnd(end, why, tuple(behind))


def _walk(
    file: LogFile, position: int, *, following: int | None, marked: int
) -> tuple[int, str | None]:
    while following is None or position < following:
        try:
            end, sections = file.frame_sections(position)
            for section in sections:
                file.payload(section)
        except CorruptLogError as error:
            written = file.written_end(position) if position < file.capacity_end else position
            if following is not None and written <= position:
                return position, f"{file.path}: the file after it, from {position} on, is gone."
            after = file.frames_after(position, written)
            is_torn = following is None and not any(each.synced > position for each in after)
            # The bytes of an answered frame are damaged; where there are none, it is lost.
            is_torn = is_torn and not position < min(marked, written)
            return position, None if is_torn else error.message
        position = end
    return position, None


def _frames_from(file: LogFile, start: int) -> Iterator[FrameHeader]:
    if start < file.capacity_end:
        first = file.frame_at(start)
        yield from [first] if first else []
        yield from file.frames_after(start, file.written_end(start))


def offsets_of(rows: pa.RecordBatch) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the first offset and the end of a batch of messages, by (topic_id, queue_id)."""
    keys = ["topic_id", "queue_id"]
    grouped = (
        pa.table(rows).group_by(keys).aggregate([("queue_offset", "min"), ("queue_offset", "max")])
    )
    return {
        (row["topic_id"], row["queue_id"]): (
            row["queue_offset_min"],
            row["queue_offset_max"] + 1,
        )
        for row in grouped.to_pylist()
    }


@dataclass(slots=True)
class Reached:
    """Ends of the queues, and names of the topics, at a position."""

    heads: dict[tuple[int, int], int]
    topics: dict[int, str]

    def read(self, file: LogFile, *, start: int, stop: int) -> None:
        """Take in the sound frames of a file between two positions."""
        position = start
        while position < stop:
            position, batches = sections_of(file, position)
            self.take(batches)

    def take(self, batches: Sequence[tuple[int, pa.RecordBatch]]) -> None:
        """Take in a frame."""
        for kind, rows in batches:
            if kind == MESSAGES and rows.num_rows:
                self.heads.update({key: end for key, (_, end) in offsets_of(rows).items()})
            elif kind == EVENTS:
                self.name(rows)

    def name(self, rows: pa.RecordBatch) -> None:
        """Take in the names of topics that events create."""
        for text in _texts(rows, Kind.TOPIC):
            topic = Topic.from_json(text)
            self.topics[topic.topic_id] = topic.name


def lost_of(behind: Sequence[tuple[LogFile, FrameHeader]], reached: Reached) -> Lost:
    """Describe what is lost behind a cut.

    Args:
        behind: sound frame headers behind it, with their files.
        reached: what was reached at the cut; takes in the names of the topics behind it.
    """
    lost = Lost()
    for file, header in behind:
        try:
            _, batches = sections_of(file, header.position)
        except CorruptLogError:
            continue
        lost.frames += 1
        for kind, rows in batches:
            if rows.num_rows:
                times = pc.min_max(rows.column(TIMES[kind])).as_py()
                lost.first_ms = min(times["min"], lost.first_ms or times["min"])
                lost.last_ms = max(times["max"], lost.last_ms or 0)
            if kind == EVENTS:
                reached.name(rows)
                for detail in _texts(rows, Kind.EVENT_SEGMENT):
                    lost.sealed_to = max(lost.sealed_to, int(json.loads(detail)["to_position"]))
            elif rows.num_rows:
                for key, (first, end) in offsets_of(rows).items():
                    begin, stop = lost.offsets.get(key, (reached.heads.get(key) or first, end))
                    lost.offsets[key] = min(begin, first), max(stop, end)
    return lost


def _texts(rows: pa.RecordBatch, kind: Kind) -> list[str]:
    chosen = rows.filter(pc.equal(rows.column("kind"), int(kind))).column("detail")
    return [text for text in chosen.to_pylist() if text]
