"""``<home>/access.json``: users with their secrets, and policies; for the owner's eyes only."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import Final

from rmq_pipeline.access.rules import Rules
from rmq_pipeline.endpoint import write_json
from rmq_pipeline.errors import AccessFileError, RocketMQError, StorageError

log = logging.getLogger(__name__)

FILE_NAME: Final = "access.json"
_OWNER_ONLY: Final = 0o600


def read(home: Path) -> Rules:
    """The rules of a home; none where nobody made any.

    Raises:
        AccessFileError: the file is not one of ours: it never counts as "no users".
    """
    path = home / FILE_NAME
    for leftover in home.glob(f".{FILE_NAME}.*"):
        # Of a process that was killed while it wrote: secrets are not left lying about.
        leftover.unlink(missing_ok=True)
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("%s could be read by others; now only by its owner", path)
            path.chmod(_OWNER_ONLY)
        found = json.loads(path.read_text(encoding="utf-8"))
        return Rules.from_json(found)
    except FileNotFoundError:
        return Rules()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RocketMQError) as error:
        # The error may quote what the file has in it.
        raise AccessFileError(f"{path} cannot be read: {type(error).__name__}.") from None


def exists(home: Path) -> bool:
    """Whether somebody has made rules for a home."""
    return (home / FILE_NAME).exists()


def write(home: Path, rules: Rules) -> None:
    """Put these rules in the place of those before, at once; they are on the disk then.

    Raises:
        StorageError: they are not; those before still are, unless only the last sync failed.
    """
    try:
        write_json(home / FILE_NAME, rules.to_json())
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{home / FILE_NAME} was not written: {error.strerror}.") from error
