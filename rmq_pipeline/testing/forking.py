"""Fork: the state of a home at a moment, as a home of its own.

The log is the truth. A fork is the beginning of the log, up to the last frame that is not later
than the moment, and a database that is made from it. Nothing of the home is opened for writing, so
that a broker may run on it. The bookkeeping of files is left out: all messages and events of the
fork are in its log and its database, and its sinks are empty.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self, TypeAlias

from rmq_pipeline.backup import deriving
from rmq_pipeline.backup.deriving import LOG, OF_HISTORY, OF_SINKS, Cut
from rmq_pipeline.broker.work.home import FORMAT_FILE, FORMATS
from rmq_pipeline.errors import ConflictError, RequestError
from rmq_pipeline.limits import TIME_MAX_MS
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.recovery import VALIDATED_FILE

#: A moment: a datetime with a time zone, the same as ISO text, or ms since 1970.
Moment: TypeAlias = datetime | str | int

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PIECE_BYTES: Final = 16 << 20
_EMPTY: Final = "Start its broker once, and create a topic."
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
    log = target / LOG
    shutil.rmtree(log)
    log.mkdir()
    _copy_log(source / LOG, log)
    with deriving.opened(target, settings) as opened:
        cut = Cut.find(opened, start=0, at_ms=at_ms)
    _check_moment(source, cut, at_ms=at_ms)
    deriving.truncate(target, cut.position)
    # Its sinks are empty, too.
    deriving.derive(target, settings, without=OF_HISTORY | OF_SINKS)
    return cut.at_ms if at_ms is None else at_ms


def _check_home(source: Path) -> None:
    try:
        text = (source / FORMAT_FILE).read_bytes().strip(b"\0 \n").decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        text = None
    if text is None or not (source / LOG).is_dir():
        raise RequestError(
            f"{source} is no home of a broker.",
            remedy=f"Give the folder with the file {FORMAT_FILE} and the folder {LOG};"
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


def _check_moment(source: Path, cut: Cut, *, at_ms: int | None) -> None:
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
