"""Repairing a stopped home that a start refuses: all up to the damage is kept, the rest set aside.

| damage | repair |
| --- | --- |
| a frame that the database does not have yet, or a log file there | the log is cut before it |
| the header of a log file whose frames are sound | it is written again |
| a log file that was sealed | it and the earlier ones are set aside |
| the content of ``state.duckdb``, and the log has its beginning | it is made again from the log |

A plan is tried on a scratch copy first: what a start would still refuse is refused, and nothing is
changed. What is taken out is on disk in ``damaged/<time>/`` of the home before anything is changed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rmq_pipeline import durable_files
from rmq_pipeline.archive.segment import HIDDEN, KEPT, SUFFIX, Segment
from rmq_pipeline.archive.segment_file import place, write_part
from rmq_pipeline.backup import deriving, log_damage
from rmq_pipeline.backup.deriving import LOG
from rmq_pipeline.backup.log_damage import DamagedLog, Lost, Reached, SoundEnd
from rmq_pipeline.broker.work.home import ARCHIVE_FILE, FORMAT_FILE, FORMATS
from rmq_pipeline.broker.work.replicating import STORE_FILE
from rmq_pipeline.endpoint import LOCK_FILE
from rmq_pipeline.errors import (
    CorruptLogError,
    HomeLockedError,
    OperatorError,
    RequestError,
)
from rmq_pipeline.flight.flags import Flags, checked
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.place import at, opened
from rmq_pipeline.storage.root import Root
from rmq_pipeline.store import history
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.log.recovery import ACCEPTED, MARK_FILE, VALIDATED_FILE, SyncedMark
from rmq_pipeline.store.stored_state import DatabaseFacts, Ends, read_database, read_ends

#: Folder of what repairs took out.
ASIDE: Final = "damaged"
_RESTORE: Final = "Restore a backup: `rmq restore DEST HOME`."
_WAL: Final = f"{FILE_NAME}.wal"
_TOPICS: Final = "topics/"
_PIECE_BYTES: Final = 8 << 20
#: Texts of DuckDB's errors about the bytes of its file; all others are not about damage.
_OF_CONTENT: Final = (
    "Corrupt database file",
    "Corrupt WAL file",
    "is not a valid DuckDB database file",
    "Could not read enough bytes",
)

#: What a damaged database says.
_NOTHING: Final = DatabaseFacts(0, frozenset())
_NO_ENDS: Final = Ends(0, 0, {}, {})


class UnrepairableError(OperatorError):
    """A home has damage that cannot be cut off or made again."""

    remedy = _RESTORE


@dataclass(frozen=True, slots=True)
class _Stored:
    """A database; empty if it is damaged."""

    facts: DatabaseFacts = _NOTHING
    ends: Ends = _NO_ENDS
    damage: str | None = None

    @classmethod
    def read(cls, path: Path) -> "_Stored":
        """Read a database.

        Raises:
            UnrepairableError: it cannot be read, and not because its content is damaged.
        """
        if not path.exists():
            return cls(damage=f"{path} is missing.")
        try:
            return cls(read_database(path), read_ends(path))
        except ValueError as error:
            if any(sign in str(error) for sign in _OF_CONTENT):
                return cls(damage=f"{path}: {error}")
            raise UnrepairableError(
                f"{path} cannot be read, and may be sound: {error}.",
                remedy="Check the rights, the disk and the free memory, and the version of"
                " rmq_pipeline: a start of the version that wrote it says more.",
            ) from error

    @property
    def dispatched(self) -> int:
        """Log position that the tables reflect."""
        return self.facts.dispatched

    @property
    def sealed_to(self) -> int:
        """All earlier frames are in the files."""
        return self.ends.sealed_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a repair does to a home."""

    home: Path
    settings: Settings
    #: Description of each damage.
    damage: tuple[str, ...]
    #: Position at which the log is cut, and its end before; None: its end is whole.
    cut: tuple[int, int] | None
    lost: Lost
    #: Names of topics, by id.
    topics: Mapping[int, str]
    #: The database is made again from the log.
    is_derived: bool
    #: Position at which the log begins; earlier files are sealed, and set aside.
    first: int
    #: First pages of log files that are written again, by base.
    headers: Mapping[int, bytes]
    #: Segments that are missing, each with one that has its messages.
    missing: tuple[tuple[Segment, Segment], ...] = ()

    @property
    def is_needed(self) -> bool:
        """Return True if there is something to do."""
        return bool(self.damage)

    @property
    def sets_aside(self) -> bool:
        """Return True if sealed files at the beginning of the log are set aside."""
        paths = (self.home / LOG).glob(f"*{log_file.SUFFIX}")
        return any(int(path.stem) < self.first for path in paths)


@contextmanager
def locked(home: Path) -> Iterator[Path]:
    """Keep brokers away from a home.

    Raises:
        RequestError: it is no home, or has another format, or its log is in a store.
        HomeLockedError: a process has it open.
    """
    path = home.absolute()
    try:
        text = (path / FORMAT_FILE).read_bytes().strip(b"\0 \n").decode(errors="replace")
    except OSError as error:
        raise RequestError(
            f"{path} is no home of a broker, or cannot be read: {error}.",
            remedy="Give the folder of a home, and run the command as the user of the broker.",
        ) from error
    if text == "restoring":
        raise RequestError(
            f"{path} is incomplete: a restore or a fork has not ended.",
            remedy="Delete the folder, and restore it again.",
        )
    if text not in FORMATS:
        raise RequestError(
            f"{path} has format {text!r}; this version reads {' and '.join(FORMATS)}.",
            remedy="Repair it with the version of rmq_pipeline that wrote it.",
        )
    if (path / STORE_FILE).exists():
        raise RequestError(
            f"The log of {path} is in log_store.",
            remedy="Start a broker with log_store on an empty home: it takes the log from there.",
        )
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
    settings = checked(Flags.remembered(home).settings)
    stored = _Stored.read(home / FILE_NAME)
    with closing(DamagedLog(home / LOG)) as log:
        return _Planning(home, settings, stored=stored, log=log).plan()


class _Planning:
    def __init__(self, home: Path, settings: Settings, *, stored: _Stored, log: DamagedLog) -> None:
        self._home = home
        self._settings = settings
        self._stored = stored
        self._log = log

    def plan(self) -> Plan:
        """Return what is to be done."""
        stored, log = self._stored, self._log
        damage = [stored.damage] if stored.damage else []
        first = self._first(damage)
        marked, accepted = _mark(self._home / LOG, log.seeds)
        try:
            sound = log_damage.sound_end(log, first=first, start=stored.dispatched, marked=marked)
        except CorruptLogError as error:
            raise UnrepairableError(error.message) from error
        cut, lost = None, Lost()
        reached = Reached(dict(stored.ends.heads), dict(stored.ends.topics))
        if sound.why is not None:
            damage.append(sound.why)
            cut = self._cut(sound, accepted=accepted)
            self._read_up_to(cut[0], reached)
            lost = log_damage.lost_of(sound.behind, reached)
        if sound.why is not None or stored.damage:
            self._check_sealed(sound.position, lost)
        headers = {
            base: each.header
            for base, each in log.files.items()
            if each.is_headless
            and base >= first
            and (cut is None or base < cut[0] or base == first)
        }
        damage += [log.damage[base] for base in headers]
        found = Plan(
            home=self._home,
            settings=self._settings,
            damage=tuple(damage),
            cut=cut,
            lost=lost,
            topics=reached.topics,
            is_derived=stored.damage is not None,
            first=first,
            headers=headers,
        )
        return self._tried(found)

    def _first(self, damage: list[str]) -> int:
        """Return where the log begins: behind sealed files that are damaged or missing."""
        stored, log, folder = self._stored, self._log, self._home / LOG
        if not log.paths:
            raise UnrepairableError(f"{folder} has no file of the log.")
        if len(log.seeds) > 1:
            raise UnrepairableError(f"{folder} has files of different logs.")
        first = log.bases[0]
        if stored.damage and first:
            raise UnrepairableError(
                f"{stored.damage} It cannot be made from the log, which begins at position {first}."
            )
        for base, following in pairwise([*log.bases, -1]):
            read = log.files.get(base)
            end = base if read is None else read.file.capacity_end
            if read is not None and following <= end:
                continue
            why = log.damage.get(base) or (
                f"{log_file.path_of(folder, base)}: the file after it, from {end} on, is gone."
            )
            if 0 <= following <= stored.sealed_to:
                first = following
                damage.append(why)
            elif end < stored.dispatched:
                raise UnrepairableError(
                    f"{why} The database has read the log up to position {stored.dispatched};"
                    f" it is sealed up to {stored.sealed_to}."
                )
        if stored.dispatched < first or first not in log.files:
            raise UnrepairableError(
                f"{log.damage.get(first, '')} The log begins at {first}, and the database has read"
                f" it up to {stored.dispatched}.".strip()
            )
        return first

    def _cut(self, sound: SoundEnd, *, accepted: int) -> tuple[int, int]:
        position, dispatched = sound.position, self._stored.dispatched
        if position < dispatched:
            raise UnrepairableError(f"{sound.why} The database has reached position {dispatched}.")
        if position < accepted:
            raise UnrepairableError(
                f"{sound.why} A loss of the log before position {accepted} was accepted."
            )
        ends = [header.position + header.length for _, header in sound.behind]
        return position, max([position, *ends])

    def _read_up_to(self, cut: int, reached: Reached) -> None:
        bases = self._log.bases
        for base, following in zip(bases, [*bases[1:], cut], strict=True):
            start, stop = max(base, self._stored.dispatched), min(following, cut)
            if start < stop:
                reached.read(self._log.files[base].file, start=start, stop=stop)

    def _check_sealed(self, end: int, lost: Lost) -> None:
        """Refuse to lose messages that are in files."""
        known = [self._stored.sealed_to, lost.sealed_to]
        names = (each.stem for each in (self._home / history.EVENTS).glob(f"*-*{SUFFIX}"))
        ends = (name.partition("-")[2] for name in names)
        known += [int(each) for each in ends if each.isdigit()]
        if max(known) > end:
            raise UnrepairableError(
                f"The log is sound up to position {end}, and sealed up to {max(known)}: the sealed"
                " messages behind the damage would be lost."
            )

    def _tried(self, found: Plan) -> Plan:
        """Do the plan to a scratch copy, as a start reads it; return it with missing segments."""
        with TemporaryDirectory(prefix="rmq-repair-") as name:
            scratch = Path(name)
            _copy_log(found, scratch / LOG, seeds=self._log.seeds)
            stored = self._stored
            try:
                if found.is_derived:
                    deriving.derive(scratch, found.settings, without=())
                    stored = _Stored.read(scratch / FILE_NAME)
                else:
                    with deriving.opened(scratch, found.settings, dispatched=stored.dispatched):
                        pass
            except CorruptLogError as error:
                remedy = _RESTORE if type(error) is CorruptLogError else error.remedy
                why = error.message.replace(name, str(self._home))
                raise UnrepairableError(why, remedy=remedy) from error
        if found.cut is None and not found.is_derived:
            return found
        root = _archive(self._home)
        files = root.files("")
        if found.is_derived:
            _check_behind(files, stored)
        missing = tuple(self._missing(root, files, registered=stored.facts.files))
        return replace(found, missing=missing)

    def _missing(
        self, root: Root, files: Mapping[str, int], *, registered: frozenset[str]
    ) -> Iterator[tuple[Segment, Segment]]:
        """Yield the registered segments that are gone, each with a later one of its messages.

        A merge that is behind the cut has replaced them.
        """
        there = {each for each in _segments(files) if place(root, each) in files}
        for path in sorted(registered):
            if not path.startswith(_TOPICS):
                if not (self._home / path).exists():
                    raise UnrepairableError(f"{self._home / path} is missing.")
                continue
            segment = Segment.from_path(path.removeprefix(_TOPICS))
            if place(root, segment) in files:
                continue
            found = [
                each
                for each in there
                if (each.folder, each.queue_id) == (segment.folder, segment.queue_id)
                and each.base <= segment.base
                and segment.end <= each.end
            ]
            if not found:
                raise UnrepairableError(
                    f"The database names {root}/{segment.relative}, which is gone: it was"
                    " replaced, expired or deleted behind the damage."
                )
            yield segment, min(found)


def _segments(files: Mapping[str, int]) -> Iterator[Segment]:
    for path in files:
        if path.endswith((KEPT, SUFFIX)):
            name = path.replace(f"/{HIDDEN}/", "/").removesuffix(KEPT)
            try:
                yield Segment.from_path(name)
            except ValueError:
                continue


def _check_behind(files: Mapping[str, int], stored: _Stored) -> None:
    """Refuse a database that lacks messages that are in files."""
    for segment in _segments(files):
        key = (segment.topic_id, segment.queue_id)
        is_deleted = segment.topic_id < stored.ends.next_topic_id and (
            segment.topic_id not in stored.ends.topics
        )
        if not is_deleted and segment.end > stored.ends.heads.get(key, 0):
            raise UnrepairableError(
                f"{segment.relative} has messages up to offset {segment.end}, and the sound log"
                f" only up to {stored.ends.heads.get(key, 0)}: they would be lost."
            )


def _archive(home: Path) -> Root:
    try:
        said = durable_files.load_json((home / ARCHIVE_FILE).read_bytes())
        return opened(home / "topics") if said["root"] is None else at(said["root"])
    except FileNotFoundError:
        return opened(home / "topics")
    except (OSError, ValueError, KeyError) as error:
        raise UnrepairableError(
            f"The archive of {home} cannot be read: {error}.",
            remedy=f"Restore {ARCHIVE_FILE}, and set the variables by which the broker opens it.",
        ) from error


def _mark(folder: Path, seeds: set[int]) -> tuple[int, int]:
    """Return the position up to which the log was on disk, and the accepted loss."""
    if len(seeds) != 1 or not (folder / MARK_FILE).exists():
        return 0, 0
    with closing(SyncedMark(folder)) as mark:
        return mark.read(seed=min(seeds)), mark.accepted


def _copy_log(found: Plan, folder: Path, *, seeds: set[int]) -> None:
    """Write the log as a repair leaves it; its large files are links."""
    log = found.home / LOG
    folder.mkdir()
    for name in (MARK_FILE, VALIDATED_FILE, ACCEPTED):
        if (log / name).exists():
            shutil.copyfile(log / name, folder / name)
    paths = sorted(log.glob(f"*{log_file.SUFFIX}"))
    kept = [path for path in paths if int(path.stem) >= found.first and not _is_cut(path, found)]
    for path in kept:
        base = int(path.stem)
        if path != kept[-1] and base not in found.headers:
            (folder / path.name).symlink_to(path)
            continue
        _copy_sparse(path, folder / path.name)
        if base in found.headers:
            _write_header(folder / path.name, found.headers[base])
    if found.cut is not None:
        _lower_mark(folder, found.cut[0], seeds=seeds)
        _truncate(folder, found.cut[0])


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("xb") as written:
        while piece := read.read(_PIECE_BYTES):
            if piece.count(0) == len(piece):
                written.seek(len(piece), os.SEEK_CUR)
            else:
                written.write(piece)
        written.truncate(source.stat().st_size)


def _is_cut(path: Path, found: Plan) -> bool:
    """Return True if a file goes as a whole; the first one stays, for its header."""
    return found.cut is not None and found.first < int(path.stem) >= found.cut[0]


def _write_header(path: Path, header: bytes) -> None:
    with path.open("r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())


def _lower_mark(folder: Path, position: int, *, seeds: set[int]) -> None:
    """Say that the log is on disk only up to a position; an accepted loss stays accepted."""
    if _mark(folder, seeds)[0] > position:
        with closing(SyncedMark(folder)) as mark:
            mark.read(seed=min(seeds))
            mark.write(position)
            mark.sync()


def _truncate(folder: Path, position: int) -> None:
    """Drop all frames from a position on, which is in the last file."""
    last = max(folder.glob(f"*{log_file.SUFFIX}"))
    end = frame.FILE_HEADER_BYTES + position - int(last.stem)
    if end < last.stat().st_size:
        with last.open("r+b") as file:
            file.truncate(end)
            file.truncate(log_file.whole_pages(end + frame.HEADER_BYTES))
            os.fsync(file.fileno())


def repair(found: Plan) -> Path:
    """Do what a plan says to a locked home; return the folder of what was taken out.

    An interrupted repair can be planned and done again.

    Raises:
        UnrepairableError: this user must not write the home, or a segment is damaged; nothing was
            changed.
    """
    home = found.home
    owner = (home / FORMAT_FILE).stat().st_uid
    if os.geteuid() != owner:
        raise UnrepairableError(
            f"{home} belongs to user {owner}, and this is user {os.geteuid()}: the broker could"
            " not write what the repair writes.",
            remedy="Run the command as the user of the broker.",
        )
    aside = _aside(home)
    try:
        for segment, source in found.missing:
            write_part(_archive(home), segment, source=source)
        _copy_aside(found, aside)
    except BaseException:
        shutil.rmtree(aside)
        raise
    log = home / LOG
    for base, header in found.headers.items():
        _write_header(log_file.path_of(log, base), header)
    paths = sorted(log.glob(f"*{log_file.SUFFIX}"))
    for path in paths:
        if int(path.stem) < found.first:
            _move(path, aside)
    if found.cut is not None:
        _cut_log(found, aside)
    if found.is_derived:
        for name in (_WAL, FILE_NAME):
            if (home / name).exists():
                _move(home / name, aside)
        deriving.derive(home, found.settings, without=())
    os.sync()
    return aside


def _aside(home: Path) -> Path:
    """Create the folder of what is taken out, for the owner only.

    Raises:
        UnrepairableError: ``damaged`` is not a folder of the home's file system.
    """
    parent = home / ASIDE
    if not parent.is_symlink() and not parent.exists():
        parent.mkdir(mode=0o700)
    if parent.is_symlink() or not parent.is_dir() or parent.stat().st_dev != home.stat().st_dev:
        raise UnrepairableError(
            f"{parent} is not a folder of the file system of the home.", remedy=f"Move {parent}."
        )
    parent.chmod(0o700)
    aside = parent / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside.mkdir(mode=0o700)
    durable_files.sync(parent)
    durable_files.sync(home)
    return aside


def _copy_aside(found: Plan, aside: Path) -> None:
    """Copy what is changed in place, and sync the copies."""
    log = found.home / LOG
    for base in found.headers:
        path = log_file.path_of(log, base)
        with path.open("rb") as file:
            durable_files.replace(
                aside / f"{path.name}.header", file.read(log_file.PAGE_BYTES), mode=0o600
            )
    if found.cut is not None:
        kept = [path for path in log.glob(f"*{log_file.SUFFIX}") if not _is_cut(path, found)]
        copy = aside / max(kept).name
        end = frame.FILE_HEADER_BYTES + found.cut[0] - int(copy.stem)
        if end < max(kept).stat().st_size:
            _copy_sparse(max(kept), copy)
            durable_files.sync(copy)
    if (log / MARK_FILE).exists():
        shutil.copyfile(log / MARK_FILE, aside / MARK_FILE)
        durable_files.sync(aside / MARK_FILE)
    durable_files.sync(aside)


def _move(path: Path, aside: Path) -> None:
    path.rename(aside / path.name)
    durable_files.sync(aside)
    durable_files.sync(path.parent)


def _cut_log(found: Plan, aside: Path) -> None:
    """Move the files behind the cut away, the last one first, then truncate the file before it.

    The mark is lowered first: after a crash in between, the log would seem to have lost frames.
    """
    assert found.cut is not None
    log = found.home / LOG
    with closing(DamagedLog(log)) as files:
        _lower_mark(log, found.cut[0], seeds=files.seeds)
    for path in sorted(log.glob(f"*{log_file.SUFFIX}"), reverse=True):
        if _is_cut(path, found):
            _move(path, aside)
    _truncate(log, found.cut[0])
