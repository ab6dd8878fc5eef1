"""Settings of the interpreter and of malloc for a broker process."""

import atexit
import ctypes
import faulthandler
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Final

import pyarrow as pa
from typing_extensions import override

#: Time after which a waiting thread requests the GIL. At Python's default of 5 ms, one busy thread
#: delays every sync of the commit log by 10 ms.
SWITCH_INTERVAL_S: Final = 0.0002
#: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h.
_MALLOC_OPTIONS: Final = ((-8, 2), (-3, 4 << 20), (-1, 16 << 20))


class _NoPandas(MetaPathFinder):
    """Refuses to find pandas."""

    @override
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("The broker works without pandas.", name=fullname)
        return None


@contextmanager
def without_pandas() -> Iterator[None]:
    """Let the import of pandas fail within the block, as if pandas were not installed.

    Enter the block before importing the broker. pyarrow imports an installed pandas at the first
    ``pa.array`` of a list, which takes 0.3 s of the processor and 37 MB in every broker process.
    """
    refusal = _NoPandas()
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


def prepare() -> None:
    """Apply the settings that must precede the first thread."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _bound_allocator()
    # Arrow's default pool (mimalloc) has a heap per thread and retains the memory of large calls.
    pa.set_memory_pool(pa.system_memory_pool())
    # SIGUSR1 writes the stack of every thread to stderr, to diagnose a broker that hangs. A crash
    # in a library writes them, too.
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()


def _bound_allocator() -> None:
    """Limit the freed memory that glibc retains; by default each thread may have its own heap.

    Without the limit, five million messages and acks leave about 300 MB of freed memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOC_OPTIONS:
            libc.mallopt(parameter, value)


def calm_garbage_collection() -> None:
    """Exclude all present objects from garbage collection, and collect less often.

    A full collection over the modules of DuckDB, Arrow and pydantic takes tens of milliseconds.
    The broker answers no call during that time.
    """
    gc.collect()
    gc.freeze()
    # A regular exit must collect the frozen objects, or DuckDB reports them as leaked.
    atexit.register(gc.unfreeze)
    gc.set_threshold(50_000, 20, 50)
