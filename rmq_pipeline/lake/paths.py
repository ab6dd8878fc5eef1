"""Valid paths of sink files: below the sink's folder, and nowhere else.

A client that settles for the group chooses the path. Compaction reads, merges and deletes the file
with the permissions of its own process.
"""

import logging
from pathlib import Path
from typing import Final

import pyarrow as pa

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
