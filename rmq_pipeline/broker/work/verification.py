"""Verifying a closed home: read every file, report damaged ones, change nothing.

Where there are checksums, all bytes that count are compared: log frames, pages of Parquet files,
indexes, blocks of DuckDB. Files without checksums (JSON, footers of Parquet) are parsed and
compared with the other files.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import checked_parquet, durable_files
from rmq_pipeline.access.certificates import CERTIFICATE, FOLDER, KEY, Certificate
from rmq_pipeline.access.users import FILE_NAME as ACCESS_FILE
from rmq_pipeline.access.users import Rules
from rmq_pipeline.archive import key_index, manifest, shared_history
from rmq_pipeline.archive.segment import HIDDEN, INDEX, KEPT, SUFFIX, Segment
from rmq_pipeline.archive.segment_file import open_segment, place
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.broker.work.home import ARCHIVE_FILE, FORMAT_FILE, FORMATS, OPEN_FILE
from rmq_pipeline.endpoint import FILE_NAME as ENDPOINT_FILE
from rmq_pipeline.endpoint import LOCK_FILE
from rmq_pipeline.errors import HomeLockedError, NotFoundError, RocketMQError
from rmq_pipeline.lake import manifest as sink_manifest
from rmq_pipeline.storage.place import Place, at, opened
from rmq_pipeline.storage.root import Root
from rmq_pipeline.store import history
from rmq_pipeline.store.log.recovery import damaged_log_files
from rmq_pipeline.store.stored_state import read_database

RESTORE: Final = "Restore the file from a copy."
#: Remedy for a damaged file, by kind.
REMEDIES: Final = {
    "log": "Restore the file from a copy; its sealed messages are in segments.",
    "database": "Run `rmq repair HOME --dry-run`, or restore a backup: `rmq restore DEST HOME`.",
    "segment": "Restore the file from a copy; other messages are delivered, merges skip the file.",
    "index": "Delete it: the segment is searched without it, and a merge writes another.",
    "manifest": "Delete it: the next seal writes it again.",
    "events": "Restore the file from a copy; queries of that part of the history are wrong.",
    "snapshot": "Restore the file from a copy; queries of past moments fail or are wrong.",
    "endpoint": "Delete it: a start writes it again.",
}
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Verified:
    """Result for one file."""

    path: str
    kind: str
    bytes: int
    #: Description of the damage; None: no damage found.
    damage: str | None = None

    @property
    def remedy(self) -> str:
        """Remedy for the damage."""
        return REMEDIES.get(self.kind, RESTORE)


def verify(home: Path) -> Iterator[Verified]:
    """Read every file of a home that a start or a reader needs, one after the other.

    Raises:
        NotFoundError: the home does not exist.
        HomeLockedError: a process has it open.
    """
    home = home.absolute()
    try:
        lock = os.open(home / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{home} is not the home of a broker.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HomeLockedError(f"{home} is open in another process.") from error
        yield from _Home(home).files()
    finally:
        os.close(lock)


def verify_sink(sink: Place) -> Iterator[Verified]:
    """Read every file of a sink that counts.

    Raises:
        NotFoundError: the sink does not exist.
    """
    root = at(sink)
    if not root.exists(sink_manifest.NAME):
        raise NotFoundError(f"{root} is not a sink: it has no {sink_manifest.NAME}.")
    listed: list[dict[str, Any]] = []

    def read_manifest(_: Root) -> None:
        listed.extend(sink_manifest.read(root).files.to_pylist())

    size = root.size(sink_manifest.NAME)
    yield Verified(sink_manifest.NAME, "manifest", size, _damage(read_manifest, root))
    for file in listed:
        yield Verified(file["path"], "sink", file["bytes"], _damage(_read_part, (root, file)))


def _read_part(part: tuple[Root, dict[str, Any]]) -> None:
    sink, listed = part
    with (
        sink.open(sink_manifest.checked(sink, listed["path"])) as source,
        checked_parquet.open_file(source) as file,
    ):
        if (rows := checked_parquet.count_rows(file)) != listed["rows"]:
            raise ValueError(f"it has {rows} rows, not {listed['rows']}")


class _Home:
    """Home that no process has open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dispatched = 0
        self._registered: frozenset[str] = frozenset()
        #: Paths of history files that the archive has, for all homes of a log in a store.
        self._shared: frozenset[str] = frozenset()

    def files(self) -> Iterator[Verified]:
        """Yield the results of all files, small files and the database first."""
        yield from self._small_files()
        yield self._database()
        for path, damage in damaged_log_files(
            self._path / "log", SCHEMAS, dispatched=self._dispatched
        ):
            yield Verified(self._name(path), "log", path.stat().st_size, damage)
        for folder, kind in (("events", "events"), ("snapshots", "snapshot"), ("state", "state")):
            for path in sorted((self._path / folder).rglob(f"*{SUFFIX}")):
                yield self._of(path, kind=kind, check=_read_history)
        yield from self._archive()
        for name in sorted(self._registered):
            is_there = name in self._shared or (self._path / name).exists()
            if not name.startswith("topics/") and not is_there:
                yield Verified(name, name.partition("/")[0], 0, "it is missing")

    def _small_files(self) -> Iterator[Verified]:
        checks: dict[str, tuple[str, Callable[[Path], object]]] = {
            FORMAT_FILE: ("format", _read_format),
            ACCESS_FILE: ("access", lambda path: Rules.from_json(_read_json(path))),
            ARCHIVE_FILE: ("archive", lambda path: _read_json(path)["id"]),
            "settings.json": ("settings", _read_json),
            ENDPOINT_FILE: ("endpoint", _read_json),
            OPEN_FILE: ("open", lambda path: _read_json(path)["mark"]),
        }
        for name, (kind, check) in checks.items():
            path = self._path / name
            if path.exists():
                yield self._of(path, kind=kind, check=check)
        certificate, key = (self._path / FOLDER / name for name in (CERTIFICATE, KEY))
        if certificate.exists():
            yield self._of(
                certificate, kind="certificate", check=lambda path: Certificate.read(path, key)
            )

    def _database(self) -> Verified:
        path = self._path / "state.duckdb"
        size = path.stat().st_size if path.exists() else 0
        try:
            facts = read_database(path)
        except ValueError as error:
            return Verified(path.name, "database", size, str(error))
        self._dispatched, self._registered = facts.dispatched, facts.files
        return Verified(path.name, "database", size)

    def _archive(self) -> Iterator[Verified]:
        try:
            address = _read_json(self._path / ARCHIVE_FILE)["root"]
        except _UNREADABLE:
            address = None
        root = opened(address or self._path / "topics")
        sizes = root.files("")
        shared = f"{shared_history.FOLDER}/"
        self._shared = frozenset(
            path.removeprefix(shared) for path in sizes if path.startswith(shared)
        )
        wanted = {
            Segment.from_path(path.removeprefix("topics/"))
            for path in self._registered
            if path.startswith("topics/")
        }
        for path, size in sorted(sizes.items()):
            check = _check_of(path, root)
            if check is not None:
                kind, read = check
                yield Verified(path, kind, size, _damage(read, path))
        for segment in sorted(wanted):
            if (path := place(root, segment)) not in sizes:
                yield Verified(path, "segment", 0, "it is missing")

    def _of(self, path: Path, *, kind: str, check: Callable[[Path], object]) -> Verified:
        return Verified(self._name(path), kind, path.stat().st_size, _damage(check, path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._path).as_posix()


def _check_of(path: str, root: Root) -> tuple[str, Callable[[str], object]] | None:
    """Return the kind and the check of a file in the archive; None: the file does not count."""
    if path.startswith(f"{shared_history.FOLDER}/"):
        return None
    if path.endswith(manifest.NAME):
        return "manifest", lambda path: _read_manifest(root, path)
    if path.endswith(INDEX):
        return "index", lambda path: key_index.check(root, path)
    if path.endswith(KEPT) or (path.endswith(SUFFIX) and not root.has_links):
        return "segment", lambda path: _read_segment(root, path)
    return None


def _damage(check: Callable[[Any], object], path: object) -> str | None:
    try:
        check(path)
    except RocketMQError as error:
        return error.message
    except _UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _read_format(path: Path) -> None:
    if (text := path.read_text().strip()) not in FORMATS:
        raise ValueError(f"it contains {text!r}, not {' or '.join(FORMATS)}")


def _read_json(path: Path) -> Any:
    return durable_files.load_json(path.read_bytes())


def _read_history(path: Path) -> None:
    with checked_parquet.open_file(path) as file:
        checked_parquet.count_rows(file)
        columns = file.schema_arrow
    alike = path.with_name(history.NOTHING)
    if alike.exists():
        with checked_parquet.open_file(alike) as file:
            if not columns.equals(file.schema_arrow):
                raise ValueError("its columns differ from those of the other files")


def _read_manifest(root: Root, path: str) -> None:
    folder = path.rpartition("/")[0]
    for entry in manifest.parsed(root.read(path), where=folder).files:
        segment = Segment.from_path(f"{folder}/{entry['name']}")
        if (found := manifest.entry_of(root, segment)) != entry:
            wrong = sorted(name for name in found if found[name] != entry.get(name))
            raise ValueError(f"{', '.join(wrong)} of {entry['name']} differ from the file")


def _read_segment(root: Root, path: str) -> None:
    segment = Segment.from_path(path.replace(f"/{HIDDEN}/", "/").removesuffix(KEPT))
    at = segment.base
    with root.open(path) as source, open_segment(source) as file:
        for group in range(file.num_row_groups):
            offsets = file.read_row_group(group, use_threads=False)["queue_offset"].to_numpy()
            if len(offsets) and (offsets[0], offsets[-1]) != (at, at + len(offsets) - 1):
                raise ValueError(f"its offsets are not consecutive from {at} on")
            at += len(offsets)
    if at != segment.end:
        raise ValueError(f"it ends at offset {at}, not {segment.end}")
