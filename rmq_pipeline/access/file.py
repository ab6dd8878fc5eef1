"""``<home>/access.json``: users with their secrets, and policies. Only the owner can read it."""

import logging
import stat
from pathlib import Path
from typing import Final

from rmq_pipeline import checked_json
from rmq_pipeline.access.rules import Rules
from rmq_pipeline.endpoint import write_json
from rmq_pipeline.errors import AccessFileError, RocketMQError, StorageError

log = logging.getLogger(__name__)

FILE_NAME: Final = "access.json"
_OWNER_ONLY: Final = 0o600


def read(home: Path) -> Rules:
    """Read the rules of a home; a missing file means no users.

    Raises:
        AccessFileError: the file cannot be read or parsed. A damaged file must not turn access
            control off.
    """
    path = home / FILE_NAME
    for leftover in home.glob(f".{FILE_NAME}.*"):
        # A process killed during a write leaves a temporary file with secrets.
        leftover.unlink(missing_ok=True)
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("other users could read %s; restricting it to its owner", path)
            path.chmod(_OWNER_ONLY)
        found = checked_json.load(path.read_bytes())
        return Rules.from_json(found)
    except FileNotFoundError:
        return Rules()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RocketMQError) as error:
        # The cause may quote secrets of the file, so it is neither shown nor chained.
        raise AccessFileError(f"{path} is damaged or unreadable: {type(error).__name__}.") from None


def exists(home: Path) -> bool:
    """Return True if the home has an access file."""
    return (home / FILE_NAME).exists()


def write(home: Path, rules: Rules) -> None:
    """Replace the access file atomically and sync it.

    Raises:
        StorageError: the write failed. The old rules remain, unless only the last sync failed.
    """
    try:
        write_json(home / FILE_NAME, rules.to_json())
    except OSError as error:
        raise StorageError(f"{home / FILE_NAME} was not written: {error.strerror}.") from error
