"""Disk room set aside, so that receive, settle and upkeep go on when the disk is full.

It is one preallocated file. Drawing on it makes it shorter, and the log takes the freed room; until
it is whole again nothing may be written that only adds to the store.
"""

import os
import threading
from pathlib import Path
from typing import Final

from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.store import log_file

NAME: Final = "reserve"


class Reserve:
    """The reserve file of a commit log. For any thread."""

    def __init__(self, folder: Path, *, wanted_bytes: int) -> None:
        self._wanted_bytes = wanted_bytes
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(folder / NAME, flags, 0o644)
        found = os.fstat(self._descriptor)
        # A copied home may have holes where blocks should be: such a reserve keeps nothing.
        sparse = found.st_blocks * 512 < found.st_size
        #: What is set aside now.
        self.kept_bytes = 0 if sparse else min(found.st_size, wanted_bytes)
        os.ftruncate(self._descriptor, self.kept_bytes)
        self.refill(spare_bytes=0)

    @property
    def whole(self) -> bool:
        """Nothing has been drawn, or all of it was put back."""
        return self.kept_bytes >= self._wanted_bytes

    @property
    def draw_bytes(self) -> int:
        """How much to draw at a time, so that it lasts for several log files."""
        return self._wanted_bytes // 8

    def draw(self, wanted_bytes: int) -> None:
        """Give room back to the disk for somebody to take.

        Raises:
            StoreFullError: less than that is left; nothing was drawn.
        """
        with self._lock:
            left = self.kept_bytes - wanted_bytes
            if left < 0:
                raise StoreFullError("The disk is full and the reserve is used up.")
            os.ftruncate(self._descriptor, left)
            # Some file systems hand freed blocks out only after the truncation is on disk.
            os.fsync(self._descriptor)
            self.kept_bytes = left

    def refill(self, *, spare_bytes: int) -> bool:
        """Make the reserve whole if the disk then still has ``spare_bytes`` free; is it whole?"""
        with self._lock:
            if self.whole:
                return True
            disk = os.fstatvfs(self._descriptor)
            missing_bytes = self._wanted_bytes - self.kept_bytes
            if disk.f_bavail * disk.f_frsize < missing_bytes + spare_bytes:
                return False
            try:
                log_file.allocate(self._descriptor, start=self.kept_bytes, stop=self._wanted_bytes)
            except StoreFullError:
                return False
            os.fsync(self._descriptor)
            self.kept_bytes = self._wanted_bytes
            return True

    def close(self) -> None:
        """Let go of the file; the room stays set aside."""
        os.close(self._descriptor)
