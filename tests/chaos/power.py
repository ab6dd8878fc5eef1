"""A file system in a file, whose power can be cut: what was not synced is gone."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

#: Of the smallest xfs.
_DISK_BYTES: Final = 320 << 20
#: EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are one number, and one flag: do not flush the log.
_SHUT_DOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2


class Disk:
    """A new file system of its own, mounted in ``folder``; root only."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / "disk"
        self._image = folder / "image"
        if os.geteuid():
            pytest.skip("only root may mount a file system")
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"there is no mkfs.{kind}")
        self.folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_DISK_BYTES)
        _run(f"mkfs.{kind}", "-q", str(self._image))
        try:
            self._mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no {kind} can be mounted: {error.stderr.strip()}")

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))

    def cut(self) -> None:
        """Let nothing more reach the file system; its users get errors."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUT_DOWN, _NO_LOG_FLUSH.to_bytes(4, "little"))
        finally:
            os.close(handle)

    def power_up(self) -> None:
        """Mount the state that the cut left; no process uses the old mount any more."""
        _run("umount", str(self.folder))
        self._mount()

    def close(self) -> None:
        """Take it away."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
