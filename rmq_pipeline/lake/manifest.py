"""The manifest of a sink: the list of its current files, for readers without a broker.

Each version of a sink is one settle or one replacement; the broker numbers them without gaps.
Format 2 is a log of versions with checkpoints, so a version costs one small file however many
files are current:

    <sink>/_manifest.json                      {"format": 2, "folder": "_manifest-1a2b3c4d"}
    <sink>/_manifest-1a2b3c4d/<version>.json   {"version": 7, "add": [{"path": …, "rows": …,
                                                "bytes": …, "partition": …, "offsets": …}],
                                                "remove": ["hour=…/….parquet"]}
    <sink>/_manifest-1a2b3c4d/<version>.checkpoint  Parquet: all current files of the version

Versions have 20 digits. The current state is the newest checkpoint and the versions after it, up to
the first gap. Readers see a version whole or not at all. Writing a version again, or late, changes
nothing. Format 1, one ``_manifest.json`` with all files in it, is still read.
"""

import logging
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import checked_parquet, durable_files, schema

logger = logging.getLogger(__name__)

#: Maximum length of a path on Linux.
_LENGTH: Final = 4096
_OWN: Final = "_manifest"


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
        return f"names that begin with {_OWN} are reserved for the manifest"
    return None


def within(sink: Path, path: str) -> Path:
    """Return the absolute path of a sink file.

    Raises:
        ValueError: the path leads out of the sink, by its name or by a link to another folder.
    """
    fault = fault_of(path)
    if fault is not None:
        raise ValueError(f"{path!r} is not a valid path in the sink {sink}: {fault}.")
    whole = sink / path
    if not whole.parent.resolve().is_relative_to(sink.resolve()):
        raise ValueError(f"{path!r} leads out of the sink {sink} through a link.")
    return whole


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
FORMAT: Final = 2
#: Versions between two checkpoints: this many, or more if many files are current.
CHECKPOINT_VERSIONS: Final = 64
_FILES_PER_VERSION: Final = 16
#: Reads that are repeated because a writer deleted a file behind a newer checkpoint.
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The current files of one version of the sink."""

    version: int
    #: schema.SINK_FILE, in the order in which the files were added.
    files: pa.Table


NOTHING: Final = Snapshot(0, schema.SINK_FILE.empty_table())


@dataclass(frozen=True, slots=True)
class _Listing:
    """Versions that a manifest's folder has files of."""

    checkpoints: list[int]
    entries: frozenset[int]

    @property
    def base(self) -> int:
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def version(self) -> int:
        version = self.base
        while version + 1 in self.entries:
            version += 1
        return version


def read(sink: Path) -> Snapshot:
    """Return the current files; NOTHING if there is no manifest.

    Raises:
        ValueError: a newer version of this library wrote the manifest.
    """
    for looks_left in reversed(range(_LOOKS)):
        try:
            return _read(sink)
        except FileNotFoundError:
            if not looks_left:
                raise
    raise AssertionError("unreachable")


def _read(sink: Path) -> Snapshot:
    pointer = _pointer(sink)
    if pointer is None:
        return NOTHING
    if "folder" not in pointer:
        return Snapshot(0, named_below(as_files(pointer["files"]), sink=sink))
    folder = sink / pointer["folder"]
    listing = _list(folder)
    files = NOTHING.files
    if listing.base:
        found = checked_parquet.read(folder / _name(listing.base, "checkpoint"))
        files = found.select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
    version = listing.version
    added: dict[str, dict[str, Any]] = {}
    removed: set[str] = set()
    for number in range(listing.base + 1, version + 1):
        entry = _load(folder / _name(number, "json"))
        for path in entry["remove"]:
            if added.pop(path, None) is None:
                removed.add(path)
        added |= {described["path"]: described for described in entry["add"]}
    if removed:
        kept = [path not in removed for path in files["path"].to_pylist()]
        files = files.filter(pa.array(kept, pa.bool_()))
    files = pa.concat_tables([files, as_files(list(added.values()))])
    return Snapshot(version, named_below(files, sink=sink))


def as_files(described: list[dict[str, Any]]) -> pa.Table:
    """Return descriptions of files as a table, schema.SINK_FILE."""
    return pa.Table.from_pylist(described, schema=schema.SINK_FILE)


def publish(sink: Path, listed: pa.Table, *, known: Snapshot) -> None:
    """Make the manifest list exactly the broker's files; repeating the call is harmless.

    The group may have been deleted and created again. Its old manifest then differs in the same
    version, or has a newer one, and a new manifest replaces it.

    Args:
        sink: the sink's folder.
        listed: the result of ``sink_files``.
        known: the manifest, read before ``sink_files`` was called.
    """
    version = version_of(listed)
    files = listed.select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
    stranger = known.version > version or (
        known.version == version and _paths(known.files) != _paths(files)
    )
    folder = _folder(sink)
    if folder is None or stranger:
        before = folder
        folder = sink / f"_manifest-{uuid.uuid4().hex[:8]}"
        durable_files.make_folder(folder)
        _checkpoint(folder, version, files=files)
        content = durable_files.dump_json({"format": FORMAT, "folder": folder.name})
        _write(sink / NAME, lambda path: path.write_bytes(content))
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
    elif known.version < version:
        _checkpoint(folder, version, files=files)
        _tidy(folder)


def record(sink: Path, version: int, *, add: pa.Table, remove: Iterable[str] = ()) -> bool:
    """Add one version to the manifest; repeating the call is harmless.

    Args:
        sink: the sink's folder, with a manifest of format 2.
        version: from the broker's answer.
        add: schema.SINK_FILE, all files that the version adds.
        remove: the paths of all files that the version removes.

    Returns:
        True if readers see the version; False while an earlier one is missing.
    """
    folder = _folder(sink)
    if folder is None:
        return False
    entry = {"version": version, "add": add.to_pylist(), "remove": list(remove)}
    content = durable_files.dump_json(entry)
    _write(folder / _name(version, "json"), lambda path: path.write_bytes(content))
    listing = _list(folder)
    if listing.version < version:
        return False
    if listing.version - listing.base >= CHECKPOINT_VERSIONS:
        known = read(sink)
        if known.version - listing.base >= known.files.num_rows // _FILES_PER_VERSION:
            _checkpoint(folder, known.version, files=known.files)
            _tidy(folder)
    return True


def version_of(listed: pa.Table) -> int:
    """Return the version of the sink at which ``sink_files`` answered."""
    return int(listed.schema.metadata[b"version"])


def _paths(files: pa.Table) -> set[str]:
    return set(files["path"].to_pylist())


def _pointer(sink: Path) -> dict[str, Any] | None:
    try:
        pointer = _load(sink / NAME)
    except FileNotFoundError:
        return None
    if pointer["format"] > FORMAT:
        raise ValueError(f"{sink / NAME} was written by a newer version.")
    return pointer


def _load(path: Path) -> dict[str, Any]:
    try:
        return durable_files.load_json(path.read_bytes())
    except ValueError as error:
        raise durable_files.DamagedFileError(f"{path} is damaged: {error}.") from error


def _folder(sink: Path) -> Path | None:
    pointer = _pointer(sink)
    return sink / pointer["folder"] if pointer and "folder" in pointer else None


def _list(folder: Path) -> _Listing:
    found: dict[str, list[int]] = {"checkpoint": [], "json": []}
    for path in folder.iterdir():
        version, _, ending = path.name.partition(".")
        if ending in found and version.isdigit():
            found[ending].append(int(version))
    return _Listing(sorted(found["checkpoint"]), frozenset(found["json"]))


def _name(version: int, ending: str) -> str:
    return f"{version:020}.{ending}"


def _checkpoint(folder: Path, version: int, *, files: pa.Table) -> None:
    _write(
        folder / _name(version, "checkpoint"),
        lambda path: checked_parquet.write(files, path, compression="zstd"),
    )


def _tidy(folder: Path) -> None:
    """Delete what the last two checkpoints replace; readers of the older one can finish."""
    listing = _list(folder)
    if len(listing.checkpoints) < 2:
        return
    needed = listing.checkpoints[-2]
    for version in listing.checkpoints[:-2]:
        (folder / _name(version, "checkpoint")).unlink(missing_ok=True)
    for version in listing.entries:
        if version <= needed:
            (folder / _name(version, "json")).unlink(missing_ok=True)


def _write(path: Path, fill: Callable[[Path], object]) -> None:
    """Write a file atomically and durably."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    fill(temporary)
    durable_files.publish(temporary, path)
