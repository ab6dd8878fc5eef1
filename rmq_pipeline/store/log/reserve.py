"""Reserved disk space, so that receive, settle and upkeep continue when the disk is full.

The reserve is one preallocated file. Drawing on it truncates the file, and the log uses the freed
blocks. Until the reserve is whole again, operations that only add data are refused.
"""

import os
import threading
from pathlib import Path
from typing import Final

from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.store.log import log_file

NAME: Final = "reserve"


class Reserve:
    """The reserve file of a commit log. Thread-safe."""

    def __init__(self, folder: Path, *, wanted_bytes: int) -> None:
        self._wanted_bytes = wanted_bytes
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(folder / NAME, flags, 0o644)
        try:
            found = os.fstat(self._descriptor)
            # In a copied home the file may be sparse: such a reserve holds no blocks.
            sparse = found.st_blocks * 512 < found.st_size
            #: Bytes reserved now.
            self.kept_bytes = 0 if sparse else min(found.st_size, wanted_bytes)
            os.ftruncate(self._descriptor, self.kept_bytes)
            self.refill(spare_bytes=0)
        except BaseException:
            self.close()
            raise

    @property
    def whole(self) -> bool:
        """True if the reserve has its full size."""
        return self.kept_bytes >= self._wanted_bytes

    @property
    def draw_bytes(self) -> int:
        """Bytes to draw at a time; the reserve lasts for several log files."""
        return self._wanted_bytes // 8

    def draw(self, wanted_bytes: int) -> None:
        """Free a part of the reserve for use by the caller.

        Raises:
            StoreFullError: the reserve has less than ``wanted_bytes``; nothing was drawn.
        """
        with self._lock:
            left = self.kept_bytes - wanted_bytes
            if left < 0:
                raise StoreFullError("The disk is full and the reserve is used up.")
            os.ftruncate(self._descriptor, left)
            # Some file systems reuse freed blocks only after the truncation is on disk.
            os.fsync(self._descriptor)
            self.kept_bytes = left

    def refill(self, *, spare_bytes: int) -> bool:
        """Refill the reserve if the disk keeps ``spare_bytes`` free; return True if it is whole."""
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
        """Close the file; the space stays reserved."""
        os.close(self._descriptor)
