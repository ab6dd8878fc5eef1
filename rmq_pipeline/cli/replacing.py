"""Atomic replacement of an output file."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

#: Errors after which a writable file is overwritten in place: the folder is not writable, the
#: file is a mount point of its own, or the temporary file is on another disk.
_IN_PLACE: Final = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV}
#: Characters of the file's name in the temporary name, which is limited to 255 bytes.
_NAME_LETTERS: Final = 50


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` when the block ends without an error.

    Other users cannot read the temporary file. The replacement keeps the mode of the old file
    and follows symbolic links. If the file cannot be replaced, it is overwritten with the
    complete content.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():
        # A pipe or a device has no content to preserve and cannot be replaced.
        with path.open("wb") as file:
            yield file
        return
    # Replace the target of a symbolic link, not the link.
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
    with suppress(OSError):  # some file systems have no modes
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
    """Return the umask; POSIX can read it only by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found
