"""System calls of a broker's process that fail when a test says so, by a preloaded library."""

import ctypes
import enum
import errno
import mmap
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).with_suffix(".c")
#: Not an errno: a write takes half of what it is given.
SHORT: Final = 0


class Call(enum.IntFlag):
    """The kinds of call, as ``enum call`` of the library has them."""

    WRITE = 1
    SYNC = 2
    OPEN = 4
    TRUNCATE = 8
    RENAME = 16
    ALLOCATE = 32


class _Control(ctypes.Structure):
    """``struct control`` of the library."""

    _fields_ = (
        ("armed", ctypes.c_int32),
        ("calls", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("left", ctypes.c_int64),
        ("hits", ctypes.c_int64),
        ("until_ns", ctypes.c_int64),
        ("pattern", ctypes.c_char * 232),
    )


@dataclass(frozen=True)
class Fault:
    """Which calls on which files fail, with which errno; once, or for a while."""

    pattern: str
    calls: Call
    error: int
    seconds: float = 0.0

    def __str__(self) -> str:
        what = errno.errorcode[self.error] if self.error else "short"
        lasts = f"{self.seconds:g} s" if self.seconds else "once"
        return f"{self.pattern} {self.calls.name} {what} {lasts}"


class FailingCalls:
    """Faults of the processes that are started with ``environment``."""

    def __init__(self, folder: Path) -> None:
        """Compile the library; a test is skipped where there is no compiler."""
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler is installed (gcc or cc)")
        folder.mkdir(parents=True, exist_ok=True)
        library, said = folder / "failing_calls.so", folder / "faults"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        said.write_bytes(bytes(ctypes.sizeof(_Control)))
        with said.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._mapping)
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "RMQ_FAULTS": str(said),
        }

    @property
    def hits(self) -> int:
        """How many calls have failed since ``begin``."""
        return int(self._control.hits)

    def begin(self, fault: Fault) -> None:
        """Have calls fail from now on."""
        control = self._control
        control.armed = 0
        control.calls, control.error = int(fault.calls), fault.error
        control.left, control.hits = 1, 0
        lasts_ns = int(fault.seconds * 1e9)
        control.until_ns = time.monotonic_ns() + lasts_ns if lasts_ns else 0
        control.pattern = fault.pattern.encode()
        control.armed = 1

    def end(self) -> None:
        """Have all calls succeed."""
        self._control.armed = 0
