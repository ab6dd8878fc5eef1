"""How the interpreter runs in a process that answers calls."""

import atexit
import ctypes
import faulthandler
import gc
import signal
import sys
from typing import Final

#: A thread that waits for the GIL asks for it after this long: at the default of 5 ms a single
#: busy thread makes every sync of the commit log 10 ms late.
SWITCH_INTERVAL_S: Final = 0.0002
#: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h.
_MALLOC_OPTIONS: Final = ((-8, 2), (-3, 4 << 20), (-1, 16 << 20))


def prepare() -> None:
    """Set what has to be set before the first thread."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _bound_allocator()
    # SIGUSR1 writes what every thread does to stderr, which tells why a broker hangs.
    faulthandler.register(signal.SIGUSR1)


def _bound_allocator() -> None:
    """Let glibc keep less of what is freed: by default each of many threads has its own heap.

    After five million messages and acks that is some 300 MB.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOC_OPTIONS:
            libc.mallopt(parameter, value)


def calm_garbage_collection() -> None:
    """Keep the collector away from what lives as long as the process, and let it run less often.

    A full collection of the modules of DuckDB, Arrow and pydantic takes tens of ms, in which no
    call is answered.
    """
    gc.collect()
    gc.freeze()
    # At an end in order what was kept away from it is to be collected: DuckDB tells what is left.
    atexit.register(gc.unfreeze)
    gc.set_threshold(50_000, 20, 50)
