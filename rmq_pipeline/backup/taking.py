"""Taking a backup: files once, the state now and then, and the log to its end."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from rmq_pipeline.access.certificates import FOLDER as TLS
from rmq_pipeline.access.users import FILE_NAME as ACCESS_FILE
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import place
from rmq_pipeline.backup import manifest as deciding
from rmq_pipeline.backup.deriving import LOG
from rmq_pipeline.backup.destination import PIECE_BYTES, UNNAMED_MS, Destination, Reader
from rmq_pipeline.backup.log_files import DroppedError, LogFiles
from rmq_pipeline.backup.manifest import LogPart, Manifest, Snapshot, StoredFile
from rmq_pipeline.backup.snapshot import TOPICS, AskBroker, SourceHome
from rmq_pipeline.broker.work.home import FORMAT_FILE
from rmq_pipeline.errors import ConflictError
from rmq_pipeline.flight.flags import SETTINGS_FILE
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log.recovery import VALIDATED_FILE, LostLogError

#: Small files of a home that a backup has; they may change at any time.
_SMALL: Final = (FORMAT_FILE, SETTINGS_FILE, ACCESS_FILE, f"{LOG}/{VALIDATED_FILE}")
#: A frame is on disk this long after the time in it, unless the disk hangs.
_UNDERWAY_MS: Final = 1_000
#: Times that a snapshot is taken again because files that it names went away meanwhile.
_TRIES: Final = 5

#: Called with each file or part, and the bytes that were written for it.
Tell = Callable[[str, int], None]


@dataclass(slots=True)
class Report:
    """What a backup did."""

    manifest: Manifest
    is_new_snapshot: bool
    #: How long dispatch waited for the snapshot.
    waited_ms: float
    #: Objects written now, and their bytes; the others were there.
    written: int
    written_bytes: int
    log_bytes: int
    deleted_backups: int = 0
    deleted_objects: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


class _GoneError(Exception):
    """A file that the snapshot names was merged or has expired meanwhile."""


def back_up(
    home: Path,
    destination: Destination,
    *,
    ask_broker: AskBroker,
    keep: str | None = None,
    unnamed_ms: int = UNNAMED_MS,
    tell: Tell = lambda _name, _size: None,
) -> Report:
    """Back up a home, live or stopped.

    Args:
        home: folder of the home.
        destination: has the earlier backups of this home, or is empty.
        ask_broker: calls ``copy_state`` of the home's broker.
        keep: see ``manifest.dropped``; None: all backups are kept.
        unnamed_ms: age of objects that no manifest names, from which on they are deleted.
        tell: reports progress.

    Raises:
        RequestError: this is no home, or ``keep`` is malformed.
        ConflictError: another backup is running, or the destination is another home's.
        CorruptLogError: the log is damaged.
    """
    if keep is not None:
        deciding.dropped((), keep=keep, now_ms=0)
    source = SourceHome.open(home)
    if destination.folder is not None:
        source.check_outside(destination.folder)
    with source.alone(), ExitStack() as on_exit:
        destination.claim(source.id)
        on_exit.enter_context(destination.alone())
        earlier = destination.manifests()
        report = _taken(source, destination, earlier=earlier, ask_broker=ask_broker, tell=tell)
        every = [*earlier, report.manifest]
        if keep is not None:
            gone = deciding.dropped(every, keep=keep, now_ms=report.manifest.taken_at_ms)
            every = every[len(gone) :]
            report.deleted_backups = len(gone)
            report.deleted_objects = destination.forget(gone, kept=every, unnamed_ms=unnamed_ms)
        else:
            report.deleted_objects = destination.forget((), kept=every, unnamed_ms=unnamed_ms)
        report.spans = deciding.restorable(every)
    return report


def _taken(
    source: SourceHome,
    destination: Destination,
    *,
    earlier: Sequence[Manifest],
    ask_broker: AskBroker,
    tell: Tell,
) -> Report:
    previous = earlier[-1] if earlier else None
    may_continue = True
    for _ in range(_TRIES):
        taking = _Taking(source, destination, previous=previous, tell=tell)
        try:
            return taking.run(ask_broker, may_continue=may_continue)
        except (_GoneError, DroppedError):
            may_continue = False
    raise ConflictError(
        f"The files of {source.path} change faster than they can be copied.",
        remedy="Repeat the command: what was copied stays. Raise replaced_grace_ms.",
    )


class _Taking:
    """One attempt."""

    def __init__(
        self,
        source: SourceHome,
        destination: Destination,
        *,
        previous: Manifest | None,
        tell: Tell,
    ) -> None:
        self._source = source
        self._destination = destination
        self._previous = previous
        self._tell = tell
        self._written = self._written_bytes = 0
        self._waited_ms = 0.0
        #: The log has all that the previous backup has, so files of the same name are the same.
        self._is_same_log = False

    def run(self, ask_broker: AskBroker, *, may_continue: bool) -> Report:
        """Copy everything, then publish the manifest."""
        before = self._previous
        with closing(LogFiles.open(self._source.path / LOG)) as log:
            goes_on_there = before is not None and log.has(before.last_frame)
            self._is_same_log = goes_on_there or (before is not None and _has_passed(log, before))
            is_whole = before is not None and self._destination.holds(before)
            known = before.log if before is not None and goes_on_there and is_whole else ()
            goes_on = may_continue and deciding.continues(
                before, first=log.first, end=log.end_by_headers(), is_same_log=bool(known)
            )
            if before is not None and goes_on:
                snapshot, files = before.snapshot, self._unchanged(before)
            else:
                snapshot, files = self._snapshot(ask_broker)
            files += [*self._small_files()]
            return self._publish(log, snapshot, files=files, known=known, is_new=not goes_on)

    def _publish(
        self,
        log: LogFiles,
        snapshot: Snapshot,
        *,
        files: Sequence[StoredFile],
        known: Sequence[LogPart],
        is_new: bool,
    ) -> Report:
        before = self._previous
        base = log.base_of(snapshot.sealed_to)
        kept = [part for part in known if part.base >= base]
        start = before.log_end if before is not None and kept else base
        taken_at_ms = time.time_ns() // 1_000_000 - _UNDERWAY_MS
        log.look()
        copied = log.whole(start, known=kept)
        if copied.end < snapshot.position:
            raise LostLogError(
                f"The log of {self._source.path} ends at position {copied.end}, and its state is of"
                f" {snapshot.position}: frames are gone."
            )
        parts = [self._store_part(log, part) for part in copied.parts]
        last, at_ms = copied.last_frame, copied.at_ms
        if before is not None and last is None:
            last, at_ms = before.last_frame, before.log_end_ms
        manifest = Manifest(
            number=self._destination.next_number(),
            home=str(self._source.path),
            taken_at_ms=taken_at_ms,
            snapshot=snapshot,
            log_end=copied.end,
            log_end_ms=max(at_ms, snapshot.at_ms),
            last_frame=last,
            files=tuple(files),
            log=(*kept, *parts),
        )
        self._destination.publish(manifest)
        return Report(
            manifest,
            is_new,
            self._waited_ms,
            self._written,
            self._written_bytes,
            sum(part.size for part in parts),
        )

    def _unchanged(self, before: Manifest) -> list[StoredFile]:
        return [file for file in before.files if not _is_small(file.path)]

    def _snapshot(self, ask_broker: AskBroker) -> tuple[Snapshot, list[StoredFile]]:
        taken = self._source.snapshot(ask_broker)
        self._waited_ms = taken.waited_ms
        facts = taken.facts
        files = [self._store(FILE_NAME, _reader_of(taken.path))]
        known = {file.path: file for file in self._previous.files} if self._previous else {}
        for path in sorted(facts.files):
            files += self._named(path, known)
        files += self._keyed_states(facts.sealed_to)
        return Snapshot(facts.dispatched, facts.last_at_ms, facts.sealed_to), files

    def _named(self, path: str, known: dict[str, StoredFile]) -> Iterator[StoredFile]:
        """Store a file that the state names, and the index of a segment."""
        if not path.startswith(f"{TOPICS}/"):
            yield self._once(path, known, read=_reader_of(self._source.path / path))
            return
        root = self._source.archive
        segment = Segment.from_path(path.partition("/")[2])

        def reader(name: str) -> Reader:
            def read() -> Iterator[bytes]:
                with root.open(name) as file:
                    while piece := file.read(PIECE_BYTES):
                        yield piece

            return read

        yield self._once(path, known, read=reader(place(root, segment)))
        if (index := f"{TOPICS}/{segment.index}") in known or root.exists(segment.index):
            yield self._once(index, known, read=reader(segment.index))

    def _once(self, path: str, known: dict[str, StoredFile], *, read: Reader) -> StoredFile:
        """Store an immutable file, unless the last backup of the same log has it."""
        before = known.get(path) if self._is_same_log else None
        if before is not None and self._destination.has(before.sha256, before.size):
            return before
        try:
            return self._store(path, read)
        except FileNotFoundError as error:
            raise _GoneError(path) from error

    def _keyed_states(self, sealed_to: int) -> Iterator[StoredFile]:
        home = self._source.path
        try:
            for path in self._source.keyed_states(sealed_to):
                yield self._store(path.relative_to(home).as_posix(), _reader_of(path))
        except FileNotFoundError as error:
            raise _GoneError(str(error.filename)) from error

    def _small_files(self) -> Iterator[StoredFile]:
        names = [*_SMALL]
        names += [f"{TLS}/{path.name}" for path in sorted((self._source.path / TLS).glob("*.pem"))]
        for name in names:
            try:
                content = (self._source.path / name).read_bytes()
            except FileNotFoundError:
                continue
            yield self._store(name, partial(_whole, content))

    def _store_part(self, log: LogFiles, part: LogPart) -> LogPart:
        name = f"{LOG}/{part.base:020d}"
        stored = self._store(name, lambda: log.pieces(part))
        return replace(part, sha256=stored.sha256)

    def _store(self, path: str, read: Reader) -> StoredFile:
        name, size, written = self._destination.put(read)
        self._written += bool(written)
        self._written_bytes += written
        self._tell(path, written)
        return StoredFile(path, name, size)


def _has_passed(log: LogFiles, before: Manifest) -> bool:
    """Return True if the log has sealed and dropped all that the backup has of it."""
    last = before.last_frame
    return last is not None and last.seed == log.seed and last.position < log.first


def _is_small(path: str) -> bool:
    return path in _SMALL or path.startswith(f"{TLS}/")


def _whole(content: bytes) -> Iterator[bytes]:
    yield content


def _reader_of(path: Path) -> Reader:
    def read() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    return read
