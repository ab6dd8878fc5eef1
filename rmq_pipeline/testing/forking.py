"""Fork: the state of a home at a moment, as a home of its own.

The log is the truth. A fork is the beginning of the log, up to the last frame that is not later
than the moment, and a database that is made from it. Nothing of the home is opened for writing, so
that a broker may run on it. The bookkeeping of files is left out: all messages and events of the
fork are in its log and its database, and its sinks are empty.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.home import FORMAT_FILE, FORMATS
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES
from rmq_pipeline.errors import ConflictError, RequestError
from rmq_pipeline.limits import TIME_MAX_MS
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.database import FILE_NAME, Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.commit_log import CommitLog, Section
from rmq_pipeline.store.log.recovery import MARK_FILE, VALIDATED_FILE
from rmq_pipeline.store.log.stretch import Rows, Stretch, Stretches

#: A moment: a datetime with a time zone, the same as ISO text, or ms since 1970.
Moment: TypeAlias = datetime | str | int

#: Events about files of the home, which a fork does not have.
_OF_FILES: Final = (
    Kind.SEGMENT,
    Kind.SEGMENTS_REPLACED,
    Kind.EVENT_SEGMENT,
    Kind.EVENT_SEGMENTS_REPLACED,
    Kind.SNAPSHOT,
    Kind.SINK_FILE,
    Kind.SINK_REPLACED,
)
#: Columns with the time of a frame, by kind of section.
_TIMES: Final = {MESSAGES: "stored_at_ms", EVENTS: "at_ms"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOG: Final = "log"
_PIECE_BYTES: Final = 16 << 20
_EMPTY: Final = "Start its broker once, and create a topic."
#: Rows of one transaction: a row group of DuckDB.
_ROWS: Final = 122_880
#: Times that the log is copied again because files were dropped from it meanwhile.
_TRIES: Final = 5


def moment_ms(at: Moment | None) -> int | None:
    """Return a moment in ms since 1970; None for None.

    Raises:
        RequestError: it is no moment, or has no time zone.
    """
    if at is None:
        return None
    found: object = at
    if isinstance(at, str):
        try:
            found = datetime.fromisoformat(at)
        except ValueError:
            found = None
    if isinstance(found, datetime) and found.tzinfo is not None:
        return (found - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= TIME_MAX_MS:
        return found
    raise RequestError(
        f"{at!r} is no moment.",
        remedy='Give a datetime with a time zone, text such as "2026-03-07T02:31:00+00:00", or ms'
        " since 1970.",
    )


def fork_home(source: Path, target: Path, *, at_ms: int | None, settings: Settings) -> int:
    """Write the state of a home at a moment to an empty home, and return the moment in ms.

    Args:
        source: a home; a broker may have it open.
        target: a closed home whose database has no frame; its log is replaced.
        at_ms: None: the last moment of the log.
        settings: of the fork.

    Raises:
        RequestError: ``source`` is no home, or the moment is in the future or before its first one.
        ConflictError: the log no longer has its beginning.
    """
    _check_home(source)
    log = target / _LOG
    shutil.rmtree(log)
    log.mkdir()
    _copy_log(source / _LOG, log)
    with _opened(log, settings) as opened:
        cut = _Cut.find(opened, at_ms=at_ms)
    _check_moment(source, cut, at_ms=at_ms)
    _truncate(log, cut.position)
    _make_database(target, settings)
    return cut.at_ms if at_ms is None else at_ms


def _check_home(source: Path) -> None:
    try:
        text = (source / FORMAT_FILE).read_bytes().strip(b"\0 \n").decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        text = None
    if text is None or not (source / _LOG).is_dir():
        raise RequestError(
            f"{source} is no home of a broker.",
            remedy=f"Give the folder with the file {FORMAT_FILE} and the folder {_LOG};"
            " `rmq status` prints it.",
        )
    if text not in FORMATS:
        raise RequestError(
            f"{source} has format {text!r}; this version reads {' and '.join(FORMATS)}.",
            remedy="Fork it with the version of rmq_pipeline that wrote it.",
        )


# -------------------------------------------------------------------------------- copying the log


@dataclass(frozen=True, slots=True)
class _Source:
    """A file of the log, open for reading; it stays readable if the broker deletes its name."""

    path: Path
    descriptor: int
    header: frame.FileHeader

    @classmethod
    def open(cls, path: Path, *, on_exit: ExitStack) -> Self:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        on_exit.callback(os.close, descriptor)
        page = os.pread(descriptor, frame.FILE_HEADER_BYTES, 0)
        header = frame.unpack_file_header(memoryview(page))
        if header is None:
            raise ConflictError(
                f"{path} has a damaged header.",
                remedy="Check the home: stop its broker, and run `rmq verify`.",
            )
        return cls(path, descriptor, header)

    def end(self) -> int:
        """Return the byte after the last frame whose header is written now.

        The broker appends frames while the file is copied. Bytes of later frames are not copied, so
        that a half-copied frame is the last one.
        """
        offset, size = frame.FILE_HEADER_BYTES, os.fstat(self.descriptor).st_size
        while offset < size:
            data = os.pread(self.descriptor, frame.HEADER_BYTES, offset)
            position = self.header.base + offset - frame.FILE_HEADER_BYTES
            found = frame.unpack_frame_header(
                memoryview(data), 0, position=position, seed=self.header.seed
            )
            if found is None:
                break
            offset += found.length
        return min(offset, size)

    def copy(self, target: Path) -> None:
        """Copy the frames; the rest of the last page is zeros."""
        end, at = self.end(), 0
        into = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            while at < end and (data := os.pread(self.descriptor, min(_PIECE_BYTES, end - at), at)):
                at += os.write(into, data)
            os.ftruncate(into, log_file.whole_pages(end + frame.HEADER_BYTES))
        finally:
            os.close(into)


def _copy_log(source: Path, target: Path) -> None:
    for _ in range(_TRIES):
        with ExitStack() as on_exit:
            paths = sorted(source.glob(f"*{log_file.SUFFIX}"))
            try:
                files = [_Source.open(path, on_exit=on_exit) for path in paths]
            except FileNotFoundError:  # a seal has just dropped it
                continue
            _check_whole(source, files)
            for file in files:
                file.copy(target / file.path.name)
            break
    else:
        raise ConflictError(
            f"The files of {source} change faster than they can be copied.",
            remedy="Fork again, or stop the broker first.",
        )
    if (source / VALIDATED_FILE).exists():
        shutil.copyfile(source / VALIDATED_FILE, target / VALIDATED_FILE)


def _check_whole(source: Path, files: Sequence[_Source]) -> None:
    if not files:
        raise RequestError(f"{source} has no log yet.", remedy=_EMPTY)
    if (base := files[0].header.base) > 0:
        raise ConflictError(
            f"The log of {source.parent} begins at position {base}: its first files were sealed and"
            " dropped. A fork needs all of them, so no moment of this home is possible.",
            remedy="Raise the setting log_file_bytes of a home that is to be forked, before its"
            " first file is full: the log keeps its last file.",
        )


# -------------------------------------------------------------------------------- cutting the log


class _Cut(NamedTuple):
    """Where a log is cut: before the first frame that is later than a moment."""

    position: int
    #: Time of the last frame before it.
    at_ms: int
    #: Time of the first frame of the log.
    first_ms: int

    @classmethod
    def find(cls, log: CommitLog, *, at_ms: int | None) -> "_Cut":
        """Read frames until one is later; None: until the end."""
        position, reached, first = 0, 0, -1
        for end, sections in log.frames(0, log.end):
            time_ms = max((_time_of(section) for section in sections), default=0)
            if at_ms is not None and time_ms > at_ms:
                first = time_ms if first < 0 else first
                break
            position, reached = end, max(reached, time_ms)
            first = time_ms if first < 0 else first
        return cls(position, reached, first)


def _time_of(section: Section) -> int:
    """Return when a section was written, as its rows say."""
    name = _TIMES.get(section.kind)
    if name is None or not section.batch.num_rows:
        return 0
    return int(pc.max(section.batch.column(name)).as_py() or 0)


def _check_moment(source: Path, cut: _Cut, *, at_ms: int | None) -> None:
    if cut.first_ms < 0:
        raise RequestError(f"The log of {source} is empty.", remedy=_EMPTY)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    if at_ms is not None and at_ms > max(now_ms, cut.at_ms):
        raise RequestError(
            f"{_text(at_ms)} is in the future of {source}: the last moment of its log is"
            f" {_text(cut.at_ms)}, and it is {_text(now_ms)}.",
            remedy="Give a moment of the past. at=None means the last moment.",
        )
    if not cut.position:
        raise RequestError(
            f"{source} began at {_text(cut.first_ms)}, after {_text(at_ms or 0)}.",
            remedy=f"Give {_text(cut.first_ms)} or a later moment.",
        )


def _text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _truncate(log: Path, position: int) -> None:
    """Drop all frames of a closed log from a position on."""
    (log / MARK_FILE).unlink()
    for path in sorted(log.glob(f"*{log_file.SUFFIX}")):
        base = int(path.stem)
        if base and base >= position:
            path.unlink()
            continue
        end = frame.FILE_HEADER_BYTES + position - base
        if end < path.stat().st_size:
            os.truncate(path, end)
            os.truncate(path, log_file.whole_pages(end + frame.HEADER_BYTES))


@contextmanager
def _opened(log: Path, settings: Settings) -> Iterator[CommitLog]:
    opened = CommitLog.open(
        log,
        schemas=SCHEMAS,
        file_bytes=settings.log_file_bytes,
        reserve_bytes=settings.reserve_bytes,
        flush="async",
    )
    try:
        yield opened
    finally:
        opened.close()


# ---------------------------------------------------------------------------- making the database


def _make_database(home: Path, settings: Settings) -> None:
    """Apply all frames of the log to the empty database, without the events about files."""
    database = Database.open(home / FILE_NAME, memory_bytes=settings.duckdb_memory_bytes)
    try:
        with _opened(home / _LOG, settings) as log:
            some: list[Stretch] = []
            count = 0
            for stretch in Stretches(log).between(0, log.end):
                some.append(_without_files(stretch))
                count += sum(rows.batch.num_rows for rows in stretch.rows)
                if count >= _ROWS:
                    database.dispatch(some)
                    some, count = [], 0
            database.dispatch(some)
    finally:
        database.close()


def _without_files(stretch: Stretch) -> Stretch:
    return Stretch(
        stretch.end,
        [_kept(rows) if rows.kind == EVENTS else rows for rows in stretch.rows],
    )


def _kept(rows: Rows) -> Rows:
    """Return the events that are not about files."""
    kinds = rows.batch.column("kind").to_numpy()
    keep = ~np.isin(kinds, np.array(_OF_FILES))
    if keep.all():
        return rows
    section = np.repeat(np.arange(len(rows.counts)), rows.counts)
    counts = np.bincount(section[keep], minlength=len(rows.counts)).tolist()
    return rows._replace(batch=rows.batch.filter(pa.array(keep)), counts=counts)
