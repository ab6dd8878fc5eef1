"""The manifest of a sink: the list of its current files, for readers without a broker.

Each version of a sink is one settle or one replacement; the broker numbers them without gaps. The
manifest is the log of a Delta table (``lake.delta``), so a version costs one small file however
many files are current, and any reader of Delta tables reads the sink:

    <sink>/_delta_log/<version>.json                what a version adds and removes
    <sink>/_delta_log/<version>.checkpoint.parquet  all current files of the version
    <sink>/_manifest.json                           {"format": 3}

Each commit and each checkpoint has the table's columns and its offset: its version less the
broker's, 0 unless the group was deleted and created again. So the log alone says what is current:
the newest checkpoint and the commits after it. Files of the log are linked to their names and never
replaced, and a commit is written only behind its predecessor: several publishers may work at once,
be late, or die anywhere. Readers see a version whole or not at all. Formats 1 and 2 are still read,
and the next publication replaces them.
"""

import contextlib
import logging
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet, durable_files, schema
from rmq_pipeline.clock import SystemClock
from rmq_pipeline.lake import delta
from rmq_pipeline.storage.local import UNFINISHED, LocalRoot
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.root import Address, Root

logger = logging.getLogger(__name__)

#: Maximum length of a path on Linux.
_LENGTH: Final = 4096
#: Names of the log and of the manifests of formats 1 and 2.
_OWN: Final = ("_manifest", "_delta_log")


def fault_of(path: str) -> str | None:
    """Return why a path is not a valid name below a sink; None if it is valid."""
    if not path or len(path) > _LENGTH:
        return f"it must have 1 to {_LENGTH} characters"
    if "\0" in path or "\\" in path or not path.isprintable():
        return "it must not have a backslash or a control character"
    parts = path.split("/")
    if not parts[0]:
        return "it must be relative to the sink's folder"
    if any(part in {"", ".", ".."} for part in parts):
        return "it must not have an empty part, . or .."
    if parts[0].startswith(_OWN):
        return f"names that begin with {' or '.join(_OWN)} are reserved for the manifest"
    return None


def within(sink: Place, path: str) -> Address:
    """Return the address of a sink file, for other readers.

    Raises:
        ValueError: as for ``checked``.
    """
    root = at(sink)
    return root.location(checked(root, path))


def checked(sink: Root, path: str) -> str:
    """Return the path of a sink file, if it is one.

    Raises:
        ValueError: the path leads out of the sink, by its name or by a link to another folder.
    """
    fault = fault_of(path)
    if fault is not None:
        raise ValueError(f"{path!r} is not a valid path in the sink {sink}: {fault}.")
    sink.check_inside(path)
    return path


def named_below(files: pa.Table, *, sink: object) -> pa.Table:
    """Drop and log files whose paths are not valid names below the sink.

    An older broker accepted such paths.

    Args:
        files: has a column path.
        sink: for the log.
    """
    paths = files["path"].to_pylist()
    sound = [fault_of(path) is None for path in paths]
    if all(sound):
        return files
    wrong = [path for path, is_sound in zip(paths, sound, strict=True) if not is_sound]
    logger.error(
        "ignoring files whose paths lead out of the sink sink=%s files=%d first=%r",
        sink,
        len(wrong),
        wrong[0],
    )
    return files.filter(pa.array(sound))


NAME: Final = "_manifest.json"
LOG: Final = "_delta_log"
FORMAT: Final = 3
_COMMIT: Final = "json"
_CHECKPOINT: Final = "checkpoint.parquet"
#: Versions between two checkpoints: this many, or more if many files are current.
CHECKPOINT_VERSIONS: Final = 64
_FILES_PER_VERSION: Final = 16
_MOST_VERSIONS: Final = 1_000
#: At least this many versions are readable.
KEPT_VERSIONS: Final = 192
#: The publisher of a file that is being written is dead after this long.
_UNFINISHED_MS: Final = 3_600_000
#: Name of the folders of format 2.
_OLD_FOLDER: Final = "_manifest"
#: Reads that are repeated because a writer deleted a file behind a newer checkpoint.
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The current files of one version of the sink."""

    version: int
    #: schema.SINK_FILE, in the order in which the files were added.
    files: pa.Table
    #: The Delta table; None without one.
    table: delta.Metadata | None = None

    @property
    def number(self) -> int:
        """The version of the Delta table; -1 without one."""
        return -1 if self.table is None else self.version + self.table.offset


NOTHING: Final = Snapshot(0, schema.SINK_FILE.empty_table())


@dataclass(frozen=True, slots=True)
class _Listing:
    """Versions of the table that its log has files of."""

    checkpoints: list[int]
    commits: frozenset[int]
    #: Names of files that a publisher was writing.
    unfinished: list[str]

    @property
    def base(self) -> int:
        return self.checkpoints[-1] if self.checkpoints else -1

    @property
    def number(self) -> int:
        """The current version of the table; -1 without one."""
        number = self.base
        while number + 1 in self.commits:
            number += 1
        return number


@dataclass(frozen=True, slots=True)
class _Log:
    """The files of a sink's Delta log."""

    sink: Root

    def file(self, number: int, ending: str) -> str:
        return f"{LOG}/{number:020}.{ending}"

    def listing(self) -> _Listing:
        found: dict[str, list[int]] = {_CHECKPOINT: [], _COMMIT: []}
        unfinished = []
        for name in self.sink.names(LOG):
            version, _, ending = name.partition(".")
            if ending in found and version.isdigit():
                found[ending].append(int(version))
            elif name.endswith(UNFINISHED):
                unfinished.append(name)
        return _Listing(sorted(found[_CHECKPOINT]), frozenset(found[_COMMIT]), unfinished)

    def snapshot(self) -> Snapshot | None:
        """Return the current state; None without a log."""
        listing = self.listing()
        if listing.number < 0:
            return None
        files, table = NOTHING.files, None
        if listing.checkpoints:
            found = self.checkpoint_of(listing.base)
            files, table = delta.files_in(found), delta.table_in(found)
        numbers = range(listing.base + 1, listing.number + 1)
        changes = [self.changes(number) for number in numbers]
        table = changes[-1].table if changes else table
        assert table is not None
        files = _with_changes(files, ((each.add, each.remove) for each in changes))
        return Snapshot(listing.number - table.offset, files, table)

    def table(self, listing: _Listing) -> delta.Metadata:
        """Return the table as the last commit has it."""
        if listing.number in listing.commits:
            return self.changes(listing.number).table
        return delta.table_in(self.checkpoint_of(listing.number))

    def checkpoint_of(self, number: int) -> pa.Table:
        with self.sink.open(self.file(number, _CHECKPOINT)) as file:
            return checked_parquet.read(file)

    def changes(self, number: int) -> delta.Changes:
        path = self.file(number, _COMMIT)
        try:
            return delta.changes_in(self.sink.read(path))
        except (ValueError, KeyError, TypeError) as error:
            raise durable_files.DamagedFileError(
                f"{self.sink}/{path} is damaged: {error}."
            ) from error

    def commit(self, number: int, *, add: pa.Table, remove: Iterable[str], **about: Any) -> bool:
        """Write a commit; return False if another publisher has written one of this number.

        Args:
            number: the table's version.
            add: schema.SINK_FILE.
            remove: paths.
            about: other arguments of ``delta.commit``.
        """
        content = delta.commit(_sized(add, self.sink), remove, at_ms=_now_ms(), **about)
        return self.sink.put_if_absent(self.file(number, _COMMIT), content)

    def checkpoint(self, known: Snapshot) -> None:
        """Write a checkpoint of a state, unless there is one."""
        assert known.table is not None
        rows = delta.checkpoint(_sized(known.files, self.sink), at_ms=_now_ms(), table=known.table)
        buffer = pa.BufferOutputStream()
        checked_parquet.write(rows, buffer, compression="zstd")
        content = buffer.getvalue().to_pybytes()
        self.sink.put_if_absent(self.file(known.number, _CHECKPOINT), content)

    def is_checkpoint_due(self, listing: _Listing, number: int) -> bool:
        """Return True if many versions follow the last checkpoint; more, if it is large."""
        versions = number - listing.base
        if versions < CHECKPOINT_VERSIONS or not listing.checkpoints:
            return versions >= CHECKPOINT_VERSIONS
        with self.sink.open(self.file(listing.base, _CHECKPOINT)) as file:
            rows: int = pq.read_metadata(file).num_rows
        return versions >= min(rows // _FILES_PER_VERSION, _MOST_VERSIONS)

    def tidy(self) -> None:
        """Delete what is older than the kept versions; their readers can finish."""
        listing = self.listing()
        kept = listing.number - KEPT_VERSIONS
        needed = max((number for number in listing.checkpoints if number <= kept), default=-1)
        for ending, numbers in ((_CHECKPOINT, listing.checkpoints), (_COMMIT, listing.commits)):
            for number in numbers:
                if number < needed:
                    self.sink.delete(self.file(number, ending))
        unfinished = [f"{LOG}/{name}" for name in listing.unfinished]
        self.sink.delete_unfinished(unfinished, before_ms=_now_ms() - _UNFINISHED_MS)


def read(sink: Place) -> Snapshot:
    """Return the current files; NOTHING if there is no manifest.

    Raises:
        ValueError: a newer version of this library wrote the manifest.
        FileNotFoundError: the log was deleted.
    """
    root = at(sink)
    for looks_left in reversed(range(_LOOKS)):
        try:
            found = _read(root)
        except FileNotFoundError:
            if not looks_left:
                raise
        else:
            return Snapshot(found.version, named_below(found.files, sink=root), found.table)
    raise AssertionError("unreachable")


def known(sink: Place) -> Snapshot:
    """Return what a publisher goes on from: the current files, or nothing if the log was deleted.

    Raises:
        ValueError: a newer version of this library wrote the manifest.
    """
    try:
        return read(sink)
    except FileNotFoundError:
        return NOTHING


def is_table(sink: Place) -> bool:
    """Return True if the sink is a whole Delta table, with no trace of an older format.

    Raises:
        ValueError: a newer version of this library wrote the manifest.
        DamagedFileError: the manifest is damaged.
    """
    root = at(sink)
    pointer = _pointer(root)
    return pointer is not None and pointer["format"] == FORMAT and _Log(root).listing().number >= 0


def _read(sink: Root) -> Snapshot:
    pointer = _pointer(sink)
    known = _Log(sink).snapshot()
    if known is not None:
        return known
    if pointer is None:
        return NOTHING
    if pointer["format"] == FORMAT:
        raise FileNotFoundError(f"{sink}/{LOG} is missing.")
    return _read_old(sink, pointer)


def _with_changes(
    files: pa.Table, changes: Iterable[tuple[list[dict[str, Any]], list[str]]]
) -> pa.Table:
    added: dict[str, dict[str, Any]] = {}
    removed: set[str] = set()
    for add, remove in changes:
        for path in remove:
            if added.pop(path, None) is None:
                removed.add(path)
        added |= {described["path"]: described for described in add}
    # A commit may add files again that the log has.
    replaced = removed.union(added)
    kept = [path not in replaced for path in files["path"].to_pylist()] if replaced else []
    if not all(kept):
        files = files.filter(pa.array(kept, pa.bool_()))
    return pa.concat_tables([files, as_files(list(added.values()))])


def _read_old(sink: Root, pointer: dict[str, Any]) -> Snapshot:
    """Read a manifest of format 1, one file, or of format 2, a log of another form."""
    if "folder" not in pointer:
        return Snapshot(0, as_files(pointer["files"]))
    if not isinstance(sink, LocalRoot):
        raise durable_files.DamagedFileError(f"{sink}/{NAME} is of a local sink.")
    folder = sink.folder / pointer["folder"]
    found: dict[str, list[int]] = {"checkpoint": [], "json": []}
    for path in folder.iterdir():
        number, _, ending = path.name.partition(".")
        if ending in found and number.isdigit():
            found[ending].append(int(number))
    version = max(found["checkpoint"], default=0)
    files = NOTHING.files
    if version:
        old = checked_parquet.read(folder / f"{version:020}.checkpoint")
        files = old.select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
    changes = []
    while version + 1 in found["json"]:
        version += 1
        entry = _load(sink, f"{pointer['folder']}/{version:020}.json")
        changes.append((entry["add"], entry["remove"]))
    # A publisher that replaces it renames the folder before it deletes a file.
    folder.stat()
    return Snapshot(version, _with_changes(files, changes))


def _delete_old(sink: Root) -> None:
    """Delete the folders of format 2; also those that a killed publisher left."""
    if not isinstance(sink, LocalRoot):
        return
    for folder in sink.folder.glob(f"{_OLD_FOLDER}-*"):
        gone = sink.folder / f".{_OLD_FOLDER}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
    for folder in sink.folder.glob(f".{_OLD_FOLDER}.*"):
        shutil.rmtree(folder, ignore_errors=True)


def as_files(described: list[dict[str, Any]]) -> pa.Table:
    """Return descriptions of files as a table, schema.SINK_FILE."""
    return pa.Table.from_pylist(described, schema=schema.SINK_FILE)


def publish(
    sink: Place, listed: pa.Table, *, known: Snapshot, columns: pa.Schema | None = None
) -> bool:
    """Make the manifest list exactly the broker's files; repeating the call is harmless.

    The group may have been deleted and created again. Its old manifest then differs in the same
    version, or has a newer one, and one commit replaces all its files.

    Args:
        sink: the sink's folder, which exists.
        listed: the result of ``sink_files``.
        known: the manifest, read before ``sink_files`` was called.
        columns: of the rows; None: those of a listed file.

    Returns:
        False if another publisher was faster: read both again, and repeat the call.

    Raises:
        StorageRootError: the sink's file system cannot decide which of two publishers is faster.
    """
    version = version_of(listed)
    files = listed.select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
    root = at(sink)
    log = _Log(root)
    root.create_folder(LOG)
    now = log.snapshot()
    if now is None:
        root.check_put_if_absent()
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, root.uri))
        made = delta.Metadata(identity, _now_ms())
        table = made.with_columns(columns or _columns_of(root, files))
        is_ours = _go_to(log, Snapshot(version, files, table), now=Snapshot(-1, NOTHING.files))
    else:
        assert now.table is not None
        if known.table is None or known.table.offset != now.table.offset:
            return False
        is_stranger = known.version > version or (
            known.version == version and _paths(known.files) != _paths(files)
        )
        table = now.table.with_columns(columns or _columns_of(root, files))
        if is_stranger:
            if now.number != known.number:
                return False
            table = replace(table, offset=now.number + 1 - version)
        wanted = Snapshot(version, files, table)
        is_ours = wanted.number <= now.number or _go_to(log, wanted, now=now)
    if is_ours:
        _finish(log)
    return is_ours


def _go_to(log: _Log, wanted: Snapshot, *, now: Snapshot) -> bool:
    """Write the commit that makes ``wanted`` current; return False if another one was faster."""
    assert wanted.table is not None
    if wanted.number > now.number + 1:
        # Versions before this one are missing: readers go on from its checkpoint.
        log.checkpoint(wanted)
    return log.commit(
        wanted.number,
        add=wanted.files.filter(pa.array(_missing_in(now.files, wanted.files), pa.bool_())),
        remove=_paths(now.files) - _paths(wanted.files),
        table=wanted.table,
        with_protocol=now.table is None or now.table.protocol != wanted.table.protocol,
        is_rearranged=False,
    )


def _finish(log: _Log) -> None:
    """Write what a publisher that was killed has left out, and delete what is no longer needed."""
    listing = log.listing()
    if listing.base >= 0 and listing.base not in listing.commits:
        # Some readers want the commit of a checkpoint's version.
        log.commit(
            listing.base,
            add=NOTHING.files,
            remove=(),
            table=log.table(listing),
            with_protocol=True,
            is_rearranged=False,
        )
    pointer = _pointer(log.sink)
    if pointer is None or pointer["format"] < FORMAT:
        log.sink.replace(NAME, durable_files.dump_json({"format": FORMAT}))
    _delete_old(log.sink)
    log.tidy()


def has_changed(sink: Place, number: int, *, add: pa.Table, remove: pa.Table) -> bool:
    """Return True if a version of the table has added and removed these files.

    A publisher asks this when another one may have written the version, or when the store's answer
    to its own commit may be lost.

    Args:
        sink: the sink's folder.
        number: version of the table.
        add: schema.SINK_FILE.
        remove: schema.SINK_FILE.
    """
    log = _Log(at(sink))
    listing = log.listing()
    if number in listing.checkpoints:
        # Readers go on from it, even if the commit of this version has other files.
        found = _paths(delta.files_in(log.checkpoint_of(number)))
        return _paths(add) <= found and not _paths(remove) & found
    if number not in listing.commits:
        return False
    changes = log.changes(number)
    return _paths(add) <= _paths(as_files(changes.add)) and _paths(remove) <= set(changes.remove)


def record(
    sink: Place,
    version: int,
    *,
    add: pa.Table,
    remove: Iterable[str] = (),
    columns: pa.Schema | None = None,
    is_rearranged: bool = False,
) -> bool:
    """Add one version to the manifest; repeating the call is harmless.

    Args:
        sink: the sink's folder, with a manifest of format 3.
        version: from the broker's answer.
        add: schema.SINK_FILE, all files that the version adds.
        remove: the paths of all files that the version removes.
        columns: of the rows; None: those of an added file.
        is_rearranged: the same rows lie in other files, as after a compaction.

    Returns:
        True if readers see the version; False if an earlier one is missing, so that nothing was
        written.
    """
    root, removed = at(sink), list(remove)
    log = _Log(root)
    for _ in range(_LOOKS):
        listing = log.listing()
        if listing.number < 0:
            return False
        known = log.table(listing)
        number = version + known.offset
        if number != listing.number + 1:
            return number <= listing.number
        # The rows of a compaction have the columns of older files.
        table = known if is_rearranged else known.with_columns(columns or _columns_of(root, add))
        if log.commit(
            number,
            add=add,
            remove=removed,
            table=table,
            with_protocol=table.protocol != known.protocol,
            is_rearranged=is_rearranged,
        ):
            if log.is_checkpoint_due(listing, number) and (now := log.snapshot()) is not None:
                log.checkpoint(now)
                log.tidy()
            return True
    return False


def version_of(listed: pa.Table) -> int:
    """Return the version of the sink at which ``sink_files`` answered."""
    return int(listed.schema.metadata[b"version"])


def _now_ms() -> int:
    return SystemClock().now_ms()


def _columns_of(sink: Root, files: pa.Table) -> pa.Schema:
    """Return the columns of one of these files; none if there is no such file."""
    for path in files["path"].slice(max(0, files.num_rows - 1)).to_pylist():
        try:
            with sink.open(checked(sink, path)) as file:
                return pq.read_schema(file)
        except (OSError, ValueError, pa.ArrowException) as error:
            logger.info("columns unknown file=%s why=%s", path, error)
    return pa.schema([])


def _sized(files: pa.Table, sink: Root) -> pa.Table:
    """Fill in sizes that the broker does not know: without its size no engine reads a file."""
    if not files["bytes"].null_count:
        return files
    described = files.to_pylist()
    for file in described:
        if file["bytes"] is None:
            with contextlib.suppress(OSError, ValueError):
                file["bytes"] = sink.size(checked(sink, file["path"]))
    return as_files(described)


def _paths(files: pa.Table) -> set[str]:
    return set(files["path"].to_pylist())


def _missing_in(known: pa.Table, files: pa.Table) -> list[bool]:
    paths = _paths(known)
    return [path not in paths for path in files["path"].to_pylist()]


def _pointer(sink: Root) -> dict[str, Any] | None:
    try:
        pointer = _load(sink, NAME)
    except FileNotFoundError:
        return None
    if pointer["format"] > FORMAT:
        raise ValueError(f"{sink}/{NAME} was written by a newer version.")
    return pointer


def _load(sink: Root, path: str) -> dict[str, Any]:
    try:
        return durable_files.load_json(sink.read(path))
    except ValueError as error:
        raise durable_files.DamagedFileError(f"{sink}/{path} is damaged: {error}.") from error
