"""Restoring a home from a backup, as it was at a moment.

The files of the backup are written, the log is cut after the last frame of the moment, and the
frames after the snapshot are applied to the database. A home that is not complete yet has the
format ``restoring``, which every start refuses.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rmq_pipeline import durable_files
from rmq_pipeline.archive import manifest as topic_manifest
from rmq_pipeline.archive.segment import SUFFIX, Segment
from rmq_pipeline.archive.segment_file import place
from rmq_pipeline.backup import deriving
from rmq_pipeline.backup.deriving import LOG, OF_HISTORY, Cut
from rmq_pipeline.backup.destination import DamagedBackupError, Destination
from rmq_pipeline.backup.manifest import LogPart, Manifest, StoredFile, chosen
from rmq_pipeline.backup.snapshot import TOPICS
from rmq_pipeline.broker.work.home import FORMAT_FILE
from rmq_pipeline.endpoint import LOCK_FILE
from rmq_pipeline.errors import ConflictError
from rmq_pipeline.flight.flags import SETTINGS_FILE, checked
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.root import Root
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log import frame, log_file
from rmq_pipeline.store.stored_state import finish_copy

#: Content of the format file until the home is complete.
RESTORING: Final = b"restoring\n"
#: Files that everybody may read; the others may have secrets.
_PUBLIC: Final = (f"{TOPICS}/", "events/", "snapshots/", FORMAT_FILE)
_ARCHIVE_ROOT: Final = "archive_root"

#: Called with each file or part, and its bytes.
Tell = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored."""

    manifest: Manifest
    #: Time of the last frame, and the end of the log.
    at_ms: int
    log_end: int
    #: Bytes of log after the moment, which were left out.
    cut_bytes: int


def restore(
    destination: Destination,
    home: Path,
    *,
    to_ms: int | None = None,
    tell: Tell = lambda _name, _size: None,
) -> Restored:
    """Write a home as it was at a moment; None: the last moment that can be restored.

    Raises:
        ConflictError: the folder is not empty.
        RequestError: there is no backup, or none of this moment.
        DamagedBackupError: a file of the backup is missing or damaged; ``home`` is incomplete.
    """
    home = home.absolute()
    manifest = chosen(destination.manifests(), to_ms)
    start_home(home)
    root = LocalRoot(home / TOPICS)
    root.create_folder()
    restoring = _Restoring(destination, home, root=root, tell=tell)
    for file in manifest.files:
        if file.path != FORMAT_FILE:
            restoring.write_file(file)
    restoring.write_log(manifest.log)
    settings = settings_of(home)
    position, at_ms = manifest.log_end, manifest.log_end_ms
    if to_ms is not None:
        with deriving.opened(home, settings, dispatched=manifest.snapshot.position) as log:
            cut = Cut.find(log, start=manifest.snapshot.position, at_ms=to_ms)
        deriving.truncate(home, cut.position)
        position, at_ms = cut.position, max(cut.at_ms, manifest.snapshot.at_ms)
    if (end := deriving.derive(home, settings, without=OF_HISTORY)) != position:
        raise DamagedBackupError(
            f"Backup {manifest.number} of {destination} says that its log ends at {position}, and"
            f" it ends at {end}. Delete {home}: it is incomplete."
        )
    tidy(home, root, now_ms=at_ms)
    finish_home(home, restoring.format_of(manifest))
    return Restored(manifest, at_ms, position, manifest.log_end - position)


class _Restoring:
    def __init__(self, destination: Destination, home: Path, *, root: Root, tell: Tell) -> None:
        self._destination = destination
        self._home = home
        self._root = root
        self._tell = tell

    def write_file(self, file: StoredFile) -> None:
        """Write a file, and check its content."""
        path = self._path_of(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = durable_files.FOR_OWNER
        if file.path.startswith(_PUBLIC):
            mode = durable_files.FOR_ALL
        self._write(path, self._destination.content(file.sha256, file.size), mode=mode)
        self._tell(file.path, file.size)

    def write_log(self, parts: tuple[LogPart, ...]) -> None:
        """Write the files of the log; the rest of the last page is zeros."""
        (self._home / LOG).mkdir(exist_ok=True)
        for base in sorted({part.base for part in parts}):
            own = [part for part in parts if part.base == base]
            path = log_file.path_of(self._home / LOG, base)
            self._write(path, self._bytes_of(own), mode=0o644)
            size = log_file.whole_pages(path.stat().st_size + frame.HEADER_BYTES)
            os.truncate(path, size)

    def _bytes_of(self, parts: list[LogPart]) -> Iterator[bytes]:
        for part in parts:
            yield from self._destination.content(part.sha256, part.size)
            self._tell(f"{LOG}/{part.base:020d}", part.size)

    def _path_of(self, path: str) -> Path:
        if path.startswith(f"{TOPICS}/") and path.endswith(SUFFIX):
            segment = Segment.from_path(path.partition("/")[2])
            return self._home / TOPICS / place(self._root, segment)
        return self._home / path

    def _write(self, path: Path, content: Iterator[bytes], *, mode: int) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def format_of(self, manifest: Manifest) -> bytes:
        """Return the content of the format file."""
        (found,) = (file for file in manifest.files if file.path == FORMAT_FILE)
        return b"".join(self._destination.content(found.sha256, found.size))


def start_home(home: Path) -> None:
    """Begin to write a home, which cannot be started until ``finish_home``.

    Raises:
        ConflictError: the folder is not empty.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConflictError(f"{home} is not empty.", remedy="Give a new or an empty folder.")
    if home.exists() and os.geteuid() and home.stat().st_uid != os.geteuid():
        raise ConflictError(f"{home} belongs to another user.", remedy="Give a new folder.")
    durable_files.make_folder(home)
    durable_files.replace(home / FORMAT_FILE, RESTORING)


def finish_home(home: Path, content: bytes) -> None:
    """Make a folder with all files of a home a home: write its format."""
    (home / LOCK_FILE).touch()
    os.sync()  # the names of all files, before the one that makes this a home
    durable_files.replace(home / FORMAT_FILE, content)


def settings_of(home: Path) -> Settings:
    """Return the settings of the home; its segments are in the home from now on."""
    path = home / SETTINGS_FILE
    try:
        said: dict[str, Any] = durable_files.load_json(path.read_bytes())
    except FileNotFoundError:
        return Settings()
    chosen = dict(said.get("settings") or {})
    if chosen.pop(_ARCHIVE_ROOT, None) is not None:
        durable_files.write_json(path, {**said, "settings": chosen})
    return checked(chosen)


def tidy(home: Path, root: Root, *, now_ms: int) -> None:
    """Show the segments to readers of the folders, and write the manifests of the topics.

    Expired segments do not count any more if the log has expired them after the snapshot.
    """
    segments = [
        Segment.from_path(path.partition("/")[2])
        for path in sorted(finish_copy(home / FILE_NAME).files)
        if path.startswith(f"{TOPICS}/")
    ]
    topic_manifest.tidy(root, segments, exists=lambda _: True, now_ms=now_ms)
