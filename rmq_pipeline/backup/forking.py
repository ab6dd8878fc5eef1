"""Fork: the state of a home at a moment, as a home of its own, for tests and development.

Of an earlier moment a fork is the beginning of the log, up to the last frame that is not later, and
a database that is made from it. Events about files are left out: all messages and events of
the fork are in its log and its database, and its sinks are empty.

Of now it is a snapshot of the database, the log since, and the files that the snapshot names, which
share their blocks with the files of the home, or are the same files by a second name. Files of
messages and of the history never change, so neither home sees what the other one does.

A fork has no users, certificates, addresses and records of sinks. No file of the home is changed
but the lock of backups, so that a broker may run on it.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import place
from rmq_pipeline.backup import deriving
from rmq_pipeline.backup.deriving import LOG, OF_HISTORY, OF_SINKS, Cut, derive
from rmq_pipeline.backup.log_files import DroppedError, LogFiles
from rmq_pipeline.backup.restoring import finish_home, settings_of, start_home, tidy
from rmq_pipeline.backup.snapshot import TOPICS, AskBroker, SourceHome
from rmq_pipeline.broker.work.home import FORMAT_FILE, FORMATS
from rmq_pipeline.errors import ConflictError, RequestError, StorageError
from rmq_pipeline.flight.flags import SETTINGS_FILE
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.recovery import VALIDATED_FILE
from rmq_pipeline.store.stored_state import forget_sinks

_PIECE_BYTES: Final = 16 << 20
#: Entries of the settings file that a fork has, too.
_FLAGS: Final = ("upkeep", "flush", "settings")
#: Folders of the history in a home.
HISTORY: Final = ("events", "snapshots", "state")
_EMPTY: Final = "Start its broker once, and create a topic."
#: Times that the log is copied again because files were dropped from it meanwhile.
_TRIES: Final = 5


def fork_home(source: Path, target: Path, *, at_ms: int | None, settings: Settings) -> int:
    """Write the state of a home at a moment to an empty home, and return the moment in ms.

    Args:
        source: a home; a broker may have it open.
        target: an empty folder, or a closed home whose database has no frame.
        at_ms: None: the last moment of the log.
        settings: of the fork.

    Raises:
        RequestError: ``source`` is no home, or the moment is in the future or before its first one.
        ConflictError: the log no longer has its beginning.
    """
    _check_home(source)
    log = target / LOG
    shutil.rmtree(log, ignore_errors=True)
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
            remedy="Restore a backup of that moment: `rmq restore DEST TARGET --to-time`. Or raise"
            " the setting log_file_bytes of a home that is to be forked, before its first file is"
            " full: the log keeps its last file.",
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


# ---------------------------------------------------------------------------------- forking now


@dataclass(frozen=True, slots=True)
class Forked:
    """What was forked."""

    at_ms: int
    #: Files of messages and history that share their content with the home, and that were copied.
    shared: int
    copied: int


def fork(
    source: Path,
    target: Path,
    *,
    at_ms: int | None,
    ask_broker: AskBroker,
    tell: Callable[[str, int], None] = lambda _name, _size: None,
) -> Forked:
    """Write a new home with the state of another one; None: that of now.

    Args:
        source: a home, live or stopped.
        target: a new or an empty folder.
        at_ms: a moment; the log of the source must have its beginning.
        ask_broker: calls ``copy_state`` of the broker of the source.
        tell: called with each file, and its bytes.

    Raises:
        RequestError: ``source`` is no home, or the moment is in the future or before its first one.
        ConflictError: the target is not empty, or the log no longer has its beginning.
    """
    home, target = SourceHome.open(source), target.absolute()
    home.check_outside(target)
    start_home(target)
    try:
        if at_ms is None:
            done = _fork_now(home, target, ask_broker=ask_broker, tell=tell)
        else:
            settings = _give_settings(home.path, target)
            fork_home(home.path, target, at_ms=at_ms, settings=settings)
            done = Forked(at_ms, 0, 0)
    except BaseException:
        _empty(target)
        raise
    finish_home(target, (home.path / FORMAT_FILE).read_bytes())
    return done


def _give_settings(source: Path, target: Path) -> Settings:
    """Give a fork the settings of its home, but no addresses."""
    try:
        said = durable_files.load_json((source / SETTINGS_FILE).read_bytes())
    except FileNotFoundError:
        said = {}
    wanted: dict[str, Any] = {name: said[name] for name in _FLAGS if name in said}
    if wanted:
        durable_files.write_json(target / SETTINGS_FILE, wanted)
    return settings_of(target)


def _fork_now(
    home: SourceHome, target: Path, *, ask_broker: AskBroker, tell: Callable[[str, int], None]
) -> Forked:
    settings = _give_settings(home.path, target)
    missing: set[str] = set()
    for _ in range(_TRIES):
        forking = _Forking(home, target, tell=tell)
        try:
            return forking.run(ask_broker, settings)
        except DroppedError:  # sealed and dropped meanwhile
            pass
        except FileNotFoundError as error:  # merged meanwhile, if it does not happen again
            if (path := str(error.filename or error)) in missing:
                raise StorageError(
                    f"{path} of {home.path} is missing, and the state names it.",
                    remedy="Look with `rmq verify`.",
                ) from error
            missing.add(path)
        for name in (LOG, TOPICS, *HISTORY, FILE_NAME):
            _remove(target / name)
    raise ConflictError(
        f"The files of {home.path} change faster than they can be linked.",
        remedy="Fork again, or stop the broker first.",
    )


class _Forking:
    """One attempt."""

    def __init__(self, home: SourceHome, target: Path, *, tell: Callable[[str, int], None]) -> None:
        self._home = home
        self._target = target
        self._tell = tell
        self._shared = self._copied = 0

    def run(self, ask_broker: AskBroker, settings: Settings) -> Forked:
        home, target = self._home, self._target
        root = LocalRoot(target / TOPICS)
        root.create_folder()
        with home.alone(), closing(LogFiles.open(home.path / LOG)) as log:
            taken = home.snapshot(ask_broker)
            facts = taken.facts
            shutil.move(taken.path, target / FILE_NAME)
            for path in sorted(facts.files):
                if path.startswith(f"{TOPICS}/"):
                    self._segment(Segment.from_path(path.partition("/")[2]), root)
                else:
                    self._share(home.path / path, target / path)
            for state in home.keyed_states(facts.sealed_to):
                self._share(state, target / state.relative_to(home.path))
            copied_ms = self._write_log(log, log.base_of(facts.sealed_to))
        forget_sinks(target / FILE_NAME)
        derive(target, settings, without=OF_HISTORY | OF_SINKS)
        at_ms = max(copied_ms, facts.last_at_ms)
        tidy(target, root, now_ms=at_ms)
        return Forked(at_ms, self._shared, self._copied)

    def _segment(self, segment: Segment, root: LocalRoot) -> None:
        archive = self._home.archive
        names = [(place(archive, segment), place(root, segment))]
        if archive.exists(segment.index):
            names.append((segment.index, segment.index))
        for name, own in names:
            path = root.folder / own
            if isinstance(archive, LocalRoot):
                self._share(archive.folder / name, path)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as file, path.open("xb") as copy:
                shutil.copyfileobj(file, copy, _PIECE_BYTES)
            self._copied += 1
            self._tell(name, path.stat().st_size)

    def _share(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if durable_files.share(source, target):
            self._shared += 1
        else:
            self._copied += 1
        self._tell(str(source), target.stat().st_size)

    def _write_log(self, log: LogFiles, start: int) -> int:
        """Copy the log from a position on, and return the time of its last frame."""
        folder = self._target / LOG
        folder.mkdir()
        log.look()
        copied = log.whole(start)
        for part in copied.parts:
            path = log_file.path_of(folder, part.base)
            with path.open("ab") as file:
                for piece in log.pieces(part):
                    file.write(piece)
            self._tell(path.name, part.size)
        for path in folder.iterdir():
            os.truncate(path, log_file.whole_pages(path.stat().st_size + frame.HEADER_BYTES))
        if (self._home.path / LOG / VALIDATED_FILE).exists():
            shutil.copyfile(self._home.path / LOG / VALIDATED_FILE, folder / VALIDATED_FILE)
        return copied.at_ms


def _empty(target: Path) -> None:
    for path in target.iterdir():
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
