"""Standard streams where some are closed: under cron, after ``<&-`` or ``>&-``."""

import os
import sys
from pathlib import Path
from typing import TextIO

from rmq_pipeline.errors import RequestError


def open_closed() -> None:
    """Have what is printed where nobody is go to nobody; for the start of a command.

    Python has None in place of such a stream. Its number goes to nobody as well: the next file that
    is opened would get it, one of a home perhaps, and with it what a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one, and what this process starts gets it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nobody = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, nobody)


def stdin() -> TextIO:
    """What a - on the command line means.

    Raises:
        RequestError: it is closed.
    """
    if sys.stdin is None:
        raise RequestError("There is no stdin to read: it is closed.")
    return sys.stdin
