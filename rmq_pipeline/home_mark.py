"""Identity of a home's folder: distinguishes it from a copy by cp, tar or rsync.

A copy has the same files, so content alone cannot identify the folder. The mark is the inode number
and the change time of the file ``lock``, which no tool can copy. One match of the two suffices: a
restored volume keeps both, chown changes the time, and a remounted file system may renumber its
inodes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

#: The lock of a home; contains the pid of its current or last process.
LOCK_FILE: Final = "lock"


@dataclass(frozen=True, slots=True)
class HomeMark:
    """The lock file of a home as it was when the home was opened."""

    inode: int
    changed_ns: int

    @classmethod
    def of(cls, home: Path) -> Self | None:
        """Return the mark of a folder; None if it was never opened as a home."""
        try:
            found = (home / LOCK_FILE).stat()
        except OSError:
            return None
        return cls(found.st_ino, found.st_ctime_ns)

    def is_of(self, home: Path) -> bool:
        """Return True if the folder is the marked one, even after a move."""
        found = HomeMark.of(home)
        return found is not None and (
            found.inode == self.inode or found.changed_ns == self.changed_ns
        )
