"""A file that takes the place of another one, if there is one, once it is complete."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

#: Why a file that may be written has none beside it, or cannot be exchanged for that: its folder is
#: not ours to write, it is mounted by itself, or what was to take its place is on another disk.
_IN_PLACE: Final = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV}
#: Of a file's name, in that of its part: a name has 255 bytes at most.
_NAME_LETTERS: Final = 50


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which nobody else may read until it is complete.

    The mode stays as it was, and a link stays one. Where nothing may take the place of the file, it
    is written over, then, too, only once the rest is there.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        # A pipe or a device: nothing is lost, and nothing may take its place.
        with path.open("wb") as file:
            yield file
        return
    # A link stays one; what it leads to is replaced.
    place = path.resolve()
    descriptor, name = _part_of(place)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        _put(part, place)
    finally:
        part.unlink(missing_ok=True)


def _part_of(place: Path) -> tuple[int, str]:
    prefix = f".{place.name[:_NAME_LETTERS]}."
    try:
        return tempfile.mkstemp(prefix=prefix, dir=place.parent)
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        return tempfile.mkstemp(prefix=prefix)


def _put(part: Path, place: Path) -> None:
    with suppress(OSError):  # a file system of another kind may know of no modes
        if place.exists():
            shutil.copymode(place, part)
        else:
            part.chmod(0o666 & ~_umask())
    try:
        part.replace(place)
    except OSError as error:
        if error.errno not in _IN_PLACE:
            raise
        with part.open("rb") as whole, place.open("wb") as file:
            shutil.copyfileobj(whole, file)


def _umask() -> int:
    """What new files are not allowed; the system tells it only to who sets it."""
    found = os.umask(0o077)
    os.umask(found)
    return found
