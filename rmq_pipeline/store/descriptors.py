"""File descriptors reserved for the store, because connections may use all others.

The soft limit of open files is kept below the possible maximum. The store raises the limit when it
cannot open a file; the code that closes connections lowers it again.
"""

import errno
import logging
import resource
import threading
from collections.abc import Callable
from typing import Final, TypeVar

log = logging.getLogger(__name__)

#: Descriptors reserved for the store.
RESERVED: Final = 64
#: Upper bound: some programs iterate over all descriptor numbers up to the limit.
_MOST: Final = 65_536

_Answer = TypeVar("_Answer")
_lock = threading.Lock()
#: The limits without and with the reserve; empty until ``reserve`` is called.
_kept: list[int] = []


def reserve() -> int:
    """Raise the soft limit of open files to the maximum minus the reserve; return the limit."""
    with _lock:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        soft = max(most - RESERVED, most // 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        _kept[:] = [soft, most]
        return soft


def use_reserve() -> bool:
    """Make the reserved descriptors usable; return False if there are none."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _kept or soft >= _kept[1]:
            return False
        resource.setrlimit(resource.RLIMIT_NOFILE, (_kept[1], hard))
        log.warning("%d files are open: the store uses those kept for it", soft)
        return True


def with_reserve(action: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``action``; if no descriptor is free, retry with the reserved ones."""
    try:
        return action()
    except OSError as error:
        if error.errno != errno.EMFILE or not use_reserve():
            raise
    return action()
