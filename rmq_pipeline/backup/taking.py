"""Taking a backup: files once, the state now and then, and the log to its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
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
from rmq_pipeline.errors import ConflictError, StorageError
from rmq_pipeline.flight.flags import SETTINGS_FILE
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log.recovery import VALIDATED_FILE, LostLogError

#: Small files of a home that a backup has; they may change at any time.
_SMALL: Final = (FORMAT_FILE, SETTINGS_FILE, ACCESS_FILE, f"{LOG}/{VALIDATED_FILE}")
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
    log_bytes_max: int = deciding.LOG_BYTES_MAX,
    tell: Tell = lambda _name, _size: None,
) -> Report:
    """Back up a home, live or stopped.

    Args:
        home: folder of the home.
        destination: has the earlier backups of this home, or is empty.
        ask_broker: calls ``copy_state`` of the home's broker.
        keep: see ``manifest.dropped``; None: all backups are kept.
        log_bytes_max: a new snapshot is taken once the log since the last one has more bytes.
        unnamed_ms: age of objects that no manifest names, from which on they are deleted.
        tell: reports progress.

    Raises:
        RequestError: this is no home, or ``keep`` is malformed.
        ConflictError: another backup is running, or the destination is another home's.
        CorruptLogError: the log is damaged.
    """
    if keep is not None:
        deciding.kept_days(keep)
    source = SourceHome.open(home)
    if destination.folder is not None:
        source.check_outside(destination.folder)
    with source.alone(), ExitStack() as on_exit:
        destination.claim(source.id)
        on_exit.enter_context(destination.alone())
        earlier = destination.manifests()
        previous = earlier[-1] if earlier else None
        report = _repeated(
            lambda: _Taking(
                source, destination, previous=previous, log_bytes_max=log_bytes_max, tell=tell
            ).run(ask_broker),
            source=source,
        )
        every = [*earlier, *destination.published]
        gone = [] if keep is None else _gone(destination, every, keep=keep)
        every = every[len(gone) :]
        report.deleted_backups = len(gone)
        report.deleted_objects = destination.forget(gone, kept=every, unnamed_ms=unnamed_ms)
        report.spans = deciding.restorable(every)
    return report


def _gone(destination: Destination, every: Sequence[Manifest], *, keep: str) -> list[Manifest]:
    """Return the oldest manifests that are no longer kept, by the log and by the store's times."""
    found = deciding.dropped(every, keep=keep)
    days = deciding.kept_days(keep)
    if days is None:
        return found
    age_ms = destination.age_ms()
    wanted_ms = days * deciding.DAY_MS
    return [*takewhile(lambda each: age_ms.get(each.number, 0) >= wanted_ms, found)]


def _repeated(run: Callable[[], Report], *, source: SourceHome) -> Report:
    missing: set[str] = set()
    for _ in range(_TRIES):
        try:
            return run()
        except DroppedError:
            continue
        except _GoneError as error:
            if (path := str(error)) in missing:
                raise StorageError(
                    f"{path} of {source.path} is missing, and the state names it.",
                    remedy="Look with `rmq verify`. Older backups may still have the file.",
                ) from error
            missing.add(path)
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
        log_bytes_max: int,
        tell: Tell,
    ) -> None:
        self._source = source
        self._destination = destination
        self._previous = previous
        self._tell = tell
        self._written = self._written_bytes = 0
        self._waited_ms = 0.0
        self._log_bytes_max = log_bytes_max
        #: The log has all that the previous backup has, so files of the same name are the same.
        self._is_same_log = False

    def run(self, ask_broker: AskBroker) -> Report:
        """Copy everything, then publish the manifest.

        If a new snapshot is due, a manifest of the old one with the log since comes first, so that
        every moment between the two snapshots can be restored.
        """
        before = self._previous
        with closing(LogFiles.open(self._source.path / LOG)) as log:
            self._is_same_log = before is not None and log.has(before.last_frame)
            goes_on = before is not None and self._is_same_log and self._destination.holds(before)
            if before is None or not goes_on:
                return self._publish(log, self._snapshot(ask_broker), known=None)
            unchanged = [file for file in before.files if not _is_small(file.path)]
            old = before.snapshot, unchanged
            log_bytes = log.end_by_headers() - before.snapshot.position
            if log_bytes <= self._log_bytes_max:
                return self._publish(log, old, known=before)
            new = self._snapshot(ask_broker)
            first = self._publish(log, old, known=before).manifest
            return self._publish(log, new, known=first)

    def _publish(
        self,
        log: LogFiles,
        state: tuple[Snapshot, Sequence[StoredFile]],
        *,
        known: Manifest | None,
    ) -> Report:
        """Publish a snapshot, with the log since.

        Args:
            log: the log of the home.
            state: the snapshot, and the files that it names.
            known: an earlier backup of the same log, whose parts of the log are there.
        """
        snapshot, files = state
        is_new = known is None or known.snapshot != snapshot
        kept = list(known.log) if known is not None else []
        start = 0 if known is None else known.log_end
        if is_new:
            base = log.base_of(snapshot.sealed_to)
            kept = [part for part in kept if part.base >= base]
            start = start if kept else base
        log.look()
        copied = log.whole(start, known=kept)
        if copied.end < snapshot.position:
            raise LostLogError(
                f"The log of {self._source.path} ends at position {copied.end}, and its state is of"
                f" {snapshot.position}: frames are gone."
            )
        parts = [self._store_part(log, part) for part in copied.parts]
        last, at_ms = copied.last_frame, copied.at_ms
        if last is None and known is not None:
            last, at_ms = known.last_frame, known.log_end_ms
        if not snapshot.at_ms:  # nothing was dispatched yet
            snapshot = replace(snapshot, at_ms=log.first_ms())
        manifest = Manifest(
            number=self._destination.next_number(),
            home=str(self._source.path),
            snapshot=snapshot,
            log_end=copied.end,
            log_end_ms=max(at_ms, snapshot.at_ms),
            last_frame=last,
            files=(*files, *self._small_files()),
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
                try:
                    file = root.open(name)
                except FileNotFoundError as error:
                    raise _GoneError(f"{root}/{name}") from error
                with file:
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
        return self._store(path, read)

    def _keyed_states(self, sealed_to: int) -> Iterator[StoredFile]:
        home = self._source.path
        try:
            paths = self._source.keyed_states(sealed_to)
        except FileNotFoundError as error:
            raise _GoneError(str(error.filename)) from error
        for path in paths:
            yield self._store(path.relative_to(home).as_posix(), _reader_of(path))

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


def _is_small(path: str) -> bool:
    return path in _SMALL or path.startswith(f"{TLS}/")


def _whole(content: bytes) -> Iterator[bytes]:
    yield content


def _reader_of(path: Path) -> Reader:
    def read() -> Iterator[bytes]:
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise _GoneError(str(path)) from error
        with file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    return read
