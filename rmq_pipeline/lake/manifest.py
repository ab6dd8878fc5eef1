"""The manifest of a sink: which of its files count, for readers that do not ask the broker.

Each version of a sink is one settle or one replacement, numbered by the broker without a gap.
Format 2 is a log of them with checkpoints, so that a version costs a small file however many files
count:

    <sink>/_manifest.json                      {"format": 2, "folder": "_manifest-1a2b3c4d"}
    <sink>/_manifest-1a2b3c4d/<version>.json   {"version": 7, "add": [{"path": …, "rows": …,
                                                "bytes": …, "partition": …, "offsets": …}],
                                                "remove": ["hour=…/….parquet"]}
    <sink>/_manifest-1a2b3c4d/<version>.checkpoint  Parquet: all files that count with it

Versions have 20 digits. What counts is the newest checkpoint and the versions that follow it up to
the first gap: a version is seen whole or not at all, and whoever writes one again, or late, changes
nothing. Format 1 was one ``_manifest.json`` with all files in it; it is still read.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import schema

NAME: Final = "_manifest.json"
FORMAT: Final = 2
#: Versions between two checkpoints: this many, or more where many files count.
CHECKPOINT_VERSIONS: Final = 64
_FILES_PER_VERSION: Final = 16
#: A reader that finds a file gone looks again: somebody has tidied up behind a checkpoint.
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What counts with a version of the sink."""

    version: int
    #: schema.SINK_FILE, in the order they came to count.
    files: pa.Table


NOTHING: Final = Snapshot(0, schema.SINK_FILE.empty_table())


@dataclass(frozen=True, slots=True)
class _Listing:
    """The names in a manifest's folder, as versions."""

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
    """What counts; nothing, where there is no manifest.

    Raises:
        ValueError: a newer version of this library wrote it.
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
        return Snapshot(0, as_files(pointer["files"]))
    folder = sink / pointer["folder"]
    listing = _list(folder)
    files = NOTHING.files
    if listing.base:
        with pq.ParquetFile(folder / _name(listing.base, "checkpoint")) as file:
            files = file.read().select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
    version = listing.version
    added: dict[str, dict[str, Any]] = {}
    removed: set[str] = set()
    for number in range(listing.base + 1, version + 1):
        entry = json.loads((folder / _name(number, "json")).read_text(encoding="utf-8"))
        for path in entry["remove"]:
            if added.pop(path, None) is None:
                removed.add(path)
        added |= {described["path"]: described for described in entry["add"]}
    if removed:
        kept = [path not in removed for path in files["path"].to_pylist()]
        files = files.filter(pa.array(kept, pa.bool_()))
    return Snapshot(version, pa.concat_tables([files, as_files(list(added.values()))]))


def as_files(described: list[dict[str, Any]]) -> pa.Table:
    """Descriptions of files as a table, schema.SINK_FILE."""
    return pa.Table.from_pylist(described, schema=schema.SINK_FILE)


def publish(sink: Path, listed: pa.Table, *, known: Snapshot) -> None:
    """Let readers see exactly what the broker lists; repeating it is harmless.

    A manifest that says otherwise of the same version, or knows a newer one, is of another life of
    the sink (its group was made anew): it is given up.

    Args:
        sink: the sink's folder.
        listed: what ``sink_files`` answered.
        known: what the manifest said before the broker was asked.
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
        folder.mkdir(parents=True)
        _checkpoint(folder, version, files=files)
        content = json.dumps({"format": FORMAT, "folder": folder.name})
        _write(sink / NAME, lambda path: path.write_text(content, encoding="utf-8"))
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
    elif known.version < version:
        _checkpoint(folder, version, files=files)
        _tidy(folder)


def record(sink: Path, version: int, *, add: pa.Table, remove: Iterable[str] = ()) -> bool:
    """Let readers see one more version; repeating it is harmless.

    Args:
        sink: the sink's folder, with a manifest of format 2.
        version: as the broker answered it.
        add: schema.SINK_FILE, all files that came to count with it.
        remove: the paths of all that ceased to.

    Returns:
        Whether readers see it: not while an earlier version is missing.
    """
    folder = _folder(sink)
    if folder is None:
        return False
    entry = {"version": version, "add": add.to_pylist(), "remove": list(remove)}
    content = json.dumps(entry)
    _write(folder / _name(version, "json"), lambda path: path.write_text(content, encoding="utf-8"))
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
    """Of which version of the sink an answer of ``sink_files`` is."""
    return int(listed.schema.metadata[b"version"])


def _paths(files: pa.Table) -> set[str]:
    return set(files["path"].to_pylist())


def _pointer(sink: Path) -> dict[str, Any] | None:
    try:
        pointer: dict[str, Any] = json.loads((sink / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if pointer["format"] > FORMAT:
        raise ValueError(f"{sink / NAME} was written by a newer version.")
    return pointer


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
        lambda path: pq.write_table(files, path, compression="zstd"),
    )


def _tidy(folder: Path) -> None:
    """Delete what two checkpoints have made superfluous; who reads by the last but one goes on."""
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
    """A file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    fill(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
