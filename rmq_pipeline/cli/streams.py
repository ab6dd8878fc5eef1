"""Standard streams that may be closed, as under cron or after ``<&-`` or ``>&-``."""

import os
import sys
from pathlib import Path
from typing import TextIO

from rmq_pipeline.errors import RequestError


def open_closed() -> None:
    """Connect closed standard streams to /dev/null; call it at the start of a command.

    Python sets a closed stream to None. Its descriptor must be taken too. Otherwise the next
    opened file, perhaps one of a home, would get the number, and output of libraries with it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open returns the lowest free number, which is this one. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nobody = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, nobody)


def stdin() -> TextIO:
    """Return stdin, for the argument -.

    Raises:
        RequestError: stdin is closed.
    """
    if sys.stdin is None:
        raise RequestError(
            "- reads stdin, but stdin is closed.", remedy="Redirect stdin from a file or a pipe."
        )
    return sys.stdin
