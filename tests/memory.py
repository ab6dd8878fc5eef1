"""The memory of a process while a test runs: measured, and bounded."""

import logging
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_GROUPS: Final = Path("/sys/fs/cgroup/memory")


def bytes_of(pid: int, name: str) -> int:
    """Return what a process has (VmRSS), or the most that it has had (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class MemoryWatch:
    """How far the memory of a process rises."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak is what it has now
        self._before = bytes_of(pid, "VmRSS")

    def rise(self) -> int:
        """Return how far its peak lies above what it had, in bytes."""
        return bytes_of(self._pid, "VmHWM") - self._before


def limit_memory(pid: int, limit_bytes: int) -> Path | None:
    """Bound the memory of a process by a control group of its own.

    Returns: the group, or None where this machine lets nobody make one.
    """
    group = _GROUPS / f"rmq-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        log.warning("no memory limit: %s", error)
        return None
    return group
