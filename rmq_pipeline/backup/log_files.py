"""The log files of a home, read while a broker may append to them and drop the oldest.

A frame is copied once it is whole. A frame that is being written has not been answered, and
is left for the next time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Self

import pyarrow.compute as pc

from rmq_pipeline.backup.manifest import LastFrame, LogPart
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES
from rmq_pipeline.errors import ConflictError, CorruptLogError, RequestError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.commit_log import Section
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES, SectionHeader, crc32, decode
from rmq_pipeline.store.log.log_file import LogFile

#: Columns with the time of a frame, by kind of section.
TIMES: Final = {MESSAGES: "stored_at_ms", EVENTS: "at_ms"}
#: A part of the log ends after the frame that reaches this size.
_PART_BYTES: Final = 64 * MIB
_PIECE_BYTES: Final = 8 * MIB
#: Frames at the end of a part in which its time is looked for.
_RECENT: Final = 64
_TRIES: Final = 5


def time_of(sections: Sequence[Section]) -> int:
    """Return the largest time of a frame's rows; 0 if none has a time."""
    found = [
        int(pc.max(section.batch.column(TIMES[section.kind])).as_py() or 0)
        for section in sections
        if section.kind in TIMES and section.batch.num_rows
    ]
    return max(found, default=0)


class DroppedError(Exception):
    """The log no longer has a position: its file was sealed and dropped; ``taking`` repeats."""


@dataclass(slots=True)
class Copied:
    """Frames from a position to ``end``."""

    end: int
    at_ms: int = 0
    last_frame: LastFrame | None = None
    #: Parts of files, each with [start, stop) in bytes of the file, without checksum.
    parts: list[LogPart] = field(default_factory=list)


class LogFiles:
    """The open files of a log; they stay readable if the broker drops them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[LogFile] = []
        self._on_close = ExitStack()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open all files.

        Raises:
            RequestError: there is none.
            ConflictError: they are dropped faster than they can be opened.
            CorruptLogError: a header is damaged, or a file is missing between two others.
        """
        found = cls(folder)
        try:
            for _ in range(_TRIES):
                try:
                    found.look()
                    break
                except FileNotFoundError:  # a seal has just dropped it
                    continue
            else:
                raise ConflictError(f"The files of {folder} change too fast to be opened.")
            if not found._files:
                raise RequestError(
                    f"{folder} has no log yet.", remedy="Start its broker once, and create a topic."
                )
        except BaseException:
            found.close()
            raise
        return found

    def look(self) -> None:
        """Open the files that are new, and the last one again if another has replaced it.

        Raises:
            FileNotFoundError: a file was dropped meanwhile; only if none was open.
            DroppedError: frames after those of the open files were dropped.
        """
        known = {file.base for file in self._files}
        for path in sorted(self._folder.glob(f"*{log_file.SUFFIX}")):
            if known and int(path.stem) < max(known):
                continue
            try:
                file = LogFile.open(path, schemas=SCHEMAS)
            except FileNotFoundError as error:
                if not known:
                    raise
                raise DroppedError(f"The log has dropped {path}.") from error
            self._on_close.callback(file.finish)
            if file.base in known:  # a roll replaces a file without a frame by a larger one
                self._files[-1] = file
                continue
            if self._files and file.base != (end := self.end_by_headers()):
                if known:  # those between were sealed and dropped meanwhile
                    raise DroppedError(f"The log has dropped position {end}.")
                raise self._files[-1].damage(end, f"no frame, before {path.name}")
            self._files.append(file)

    def close(self) -> None:
        """Release the files."""
        self._on_close.close()

    @property
    def first(self) -> int:
        """Position of the first frame."""
        return self._files[0].base

    @property
    def seed(self) -> int:
        """Number that tells this log from others."""
        return self._files[0].seed

    def first_ms(self) -> int:
        """Return the time of the first frame that has one; 0: none of the first ones has."""
        file = self._files[0]
        for _, sections in islice(_sound(file, file.base, stop=None), _RECENT):
            if at_ms := _time_of(file, [sections]):
                return at_ms
        return 0

    def end_by_headers(self) -> int:
        """Return the position after the last frame header; only headers of one file are read."""
        file = self._files[-1]
        position = file.base
        while (header := file.frame_at(position)) is not None:
            position += header.length
        return position

    def has(self, last: LastFrame | None) -> bool:
        """Return True if the log has this frame."""
        if last is None or last.seed != self.seed or last.position < self.first:
            return False
        file = self._file_of(last.position)
        header = file.frame_at(last.position)
        if header is None or header.length != last.length:
            return False
        return crc32(file.copy(last.position, last.position + last.length)) == last.crc

    def base_of(self, position: int) -> int:
        """Return the base of the file with a position.

        Raises:
            DroppedError: the position was dropped.
        """
        if position < self.first:
            raise DroppedError(f"The log has dropped position {position}.")
        return self._file_of(position).base

    def _file_of(self, position: int) -> LogFile:
        return next(file for file in reversed(self._files) if file.base <= position)

    def whole(self, start: int, *, known: Sequence[LogPart] = ()) -> Copied:
        """Return the parts of all whole frames from a position on, after checking each frame.

        Args:
            start: the base of a file, or the end of an earlier copy.
            known: parts of the earlier copy.

        Raises:
            CorruptLogError: a frame is damaged.
        """
        copied = Copied(start)
        files = [file for file in self._files if file.base >= self._file_of(start).base]
        for file, following in zip(files, [*files[1:], None], strict=True):
            stop = None if following is None else following.base
            if file.base > copied.end:
                break
            begin = max((each.stop for each in known if each.base == file.base), default=0)
            self._walk(file, copied, stop=stop, begin=begin)
            if stop is not None and copied.end != stop:
                raise file.damage(copied.end, "no sound frame, though the log goes on")
        return copied

    def _walk(self, file: LogFile, copied: Copied, *, stop: int | None, begin: int) -> None:
        position, since = copied.end, begin
        recent: deque[list[SectionHeader]] = deque(maxlen=_RECENT)
        last_start = -1
        for end, sections in _sound(file, position, stop=stop):
            recent.append(sections)
            last_start, position = position, end
            if file.offset_of(end) - since >= _PART_BYTES:
                copied.parts.append(LogPart(file.base, since, file.offset_of(end), ""))
                since = file.offset_of(end)
        copied.end = position
        if file.offset_of(position) > max(since, FILE_HEADER_BYTES):
            copied.parts.append(LogPart(file.base, since, file.offset_of(position), ""))
        if last_start >= 0:
            crc = crc32(file.copy(last_start, position))
            copied.last_frame = LastFrame(self.seed, last_start, position - last_start, crc)
            copied.at_ms = max(copied.at_ms, _time_of(file, recent))

    def pieces(self, part: LogPart) -> Iterator[bytes]:
        """Yield the bytes of a part."""
        file = self._file_of(part.base)
        for at in range(part.start, part.stop, _PIECE_BYTES):
            start = part.base - FILE_HEADER_BYTES + at
            yield file.copy(start, start + min(_PIECE_BYTES, part.stop - at))


def _sound(
    file: LogFile, position: int, *, stop: int | None
) -> Iterator[tuple[int, list[SectionHeader]]]:
    """Yield the whole frames of a file, each with its end.

    Raises:
        CorruptLogError: a frame is damaged: later frames say that it was on disk.
    """
    while stop is None or position < stop:
        try:
            end, sections = _checked(file, position)
        except CorruptLogError:
            if not _was_synced(file, position):
                return
            # It may have been written since it was read.
            end, sections = _checked(file, position)
        yield end, sections
        position = end


def _checked(file: LogFile, position: int) -> tuple[int, list[SectionHeader]]:
    end, sections = file.frame_sections(position)
    for section in sections:
        file.payload(section)
    return end, sections


def _was_synced(file: LogFile, position: int) -> bool:
    if file.offset_of(position) >= file.size:
        return False
    after = file.frames_after(position, file.written_end(position))
    return any(each.synced > position for each in after)


def _time_of(file: LogFile, recent: Sequence[list[SectionHeader]]) -> int:
    """Return the time of the last of these frames that has one."""
    for sections in reversed(recent):
        timed = [
            Section(each.position, each.kind, decode(file.payload(each), file.schemas[each.kind]))
            for each in sections
            if each.kind in TIMES
        ]
        if at_ms := time_of(timed):
            return at_ms
    return 0
