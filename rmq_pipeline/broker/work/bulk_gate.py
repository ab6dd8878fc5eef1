"""Large sends are prepared one at a time; small sends are not held up.

Threads that prepare large sends in parallel compete with each other and with the writer for the
interpreter lock. They also evict each other's bodies from the CPU caches (docs/decisions/0017).

A prepared send may hold a copy of its bodies, sorted by queue or cast to the log's type. So
prepared sends that wait for the disk have a limit in bytes, too.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.publish import BULK_BYTES
from rmq_pipeline.broker.decide.request import BULK_ROWS

#: Most bytes of large sends that are prepared but not written; a single send may exceed it.
UNWRITTEN_BYTES: Final = 256 * limits.MIB

_OPEN: Final = nullcontext()


class BulkGate:
    """Gate for sends: small ones pass, large ones one at a time; safe for all threads."""

    def __init__(self) -> None:
        self._place = threading.Lock()
        #: Held by the large send that waits for space, so that no later one overtakes it.
        self._next = threading.Lock()
        self._written = threading.Condition()
        self._unwritten_bytes = 0

    def preparing(self, messages: pa.Table) -> AbstractContextManager[object]:
        """Return a lock to hold while a send is prepared."""
        return self._place if _bytes_of_bulk(messages) else _OPEN

    def sending(self, messages: pa.Table) -> AbstractContextManager[object]:
        """Return a context to hold from before a send is prepared until it is written.

        Entering waits while other large sends of more than UNWRITTEN_BYTES, with this one, are
        not written. One alone is never held up.
        """
        size = _bytes_of_bulk(messages)
        return self._counted(size) if size else _OPEN

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        with self._next, self._written:
            self._written.wait_for(lambda: self._fits(size))
            self._unwritten_bytes += size
        try:
            yield
        finally:
            with self._written:
                self._unwritten_bytes -= size
                self._written.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._unwritten_bytes or self._unwritten_bytes + size <= UNWRITTEN_BYTES


def _bytes_of_bulk(messages: pa.Table) -> int:
    """Return the bytes of a large send, and 0 for a small one."""
    if not isinstance(messages, pa.Table):  # columns_of refuses it
        return 0
    try:
        size: int = messages.get_total_buffer_size()
    except UnicodeDecodeError:  # from the name of a column, which columns_of refuses
        return 0
    return size if size >= BULK_BYTES or messages.num_rows >= BULK_ROWS else 0
