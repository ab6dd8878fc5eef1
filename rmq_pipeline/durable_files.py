"""Durable files: after a power cut a file is whole under its name or not there.

A file system may keep a name and lose the content that was not synced. It may also keep the
content and lose the name, if the folder was not synced. A file is therefore written under another
name, synced and renamed, and then its folder is synced. A new folder's parent is synced, too.

A small JSON file has a checksum: a flipped bit raises an error and never yields a value. ``crc32``
is the checksum of the other entries, as compact JSON with sorted keys. A file without it was
written by an older version or edited by hand, and is accepted.
"""

import fcntl
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rmq_pipeline.errors import OperatorError

#: Modes of a file that everybody may read (less the umask), and of one for its owner only.
FOR_ALL: Final = 0o666
FOR_OWNER: Final = 0o600
CHECKSUM: Final = "crc32"
#: Linux: make a file share the blocks of another one.
_FICLONE: Final = 0x40049409
_PIECE_BYTES: Final = 8 << 20


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names_in(folder: Path) -> None:
    """Sync the names in a folder, even if this process may not list it."""
    try:
        sync(folder)
    except PermissionError:
        os.sync()  # sync all file systems: the folder cannot be opened


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and sync their names; it may exist."""
    made = []
    for each in (folder, *folder.parents):
        if each.is_dir():
            break
        made.append(each)
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync_names_in(each.parent)


def publish(finished: Path, path: Path) -> None:
    """Sync a written file and rename it, replacing an existing one; sync the new name."""
    sync(finished)
    finished.rename(path)
    sync(path.parent)


def replace(path: Path, content: bytes, *, mode: int = FOR_ALL) -> None:
    """Replace a file atomically and durably: a reader sees the old or the new content.

    Raises:
        OSError: writing failed. The old content is intact unless only the last sync failed.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def copy_open(source: int, target: Path) -> None:
    """Copy an open file to a new one for the owner only, not synced.

    The copy shares the blocks of the file where the file system can (Btrfs, XFS).

    Raises:
        OSError: copying failed, for example on a full disk.
    """
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FOR_OWNER)
    try:
        if _is_cloned(source, handle):
            return
        at, size = 0, os.fstat(source).st_size
        while at < size:
            data = os.pread(source, min(_PIECE_BYTES, size - at), at)
            if not data:
                raise OSError(f"{target}: the file that is copied became shorter")
            at += os.write(handle, data)
    finally:
        os.close(handle)


def share(source: Path, target: Path) -> bool:
    """Give a file that never changes a copy, or a second name, without copying its content.

    Returns:
        False: the file system can do neither, and the content was copied.

    Raises:
        OSError: the file is missing, or the disk is full.
    """
    with source.open("rb") as old, target.open("xb") as new:
        if _is_cloned(old.fileno(), new.fileno()):
            return True
    target.unlink()
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        return False
    return True


def _is_cloned(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


class DamagedFileError(OperatorError):
    """A small file of a home does not match its checksum, or is not JSON."""

    remedy = "Restore it from a copy; if it was edited by hand, delete its entry crc32."


def dump_json(value: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return the content of a file with this value and its checksum."""
    return f"{json.dumps({**value, CHECKSUM: _json_crc(value)}, indent=indent)}\n".encode()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a small JSON file, on disk, that only its owner may read."""
    replace(path, dump_json(value, indent=2), mode=FOR_OWNER)


def load_json(content: bytes) -> dict[str, Any]:
    """Return the value of a file, without its checksum.

    Raises:
        ValueError: it is not a JSON object, or does not match its checksum.
    """
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - not the caller's mistake
    expected = value.pop(CHECKSUM, None)
    if expected is not None and expected != _json_crc(value):
        raise ValueError("it does not match its checksum")
    return value


def _json_crc(value: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, separators=(',', ':')).encode()):08x}"
