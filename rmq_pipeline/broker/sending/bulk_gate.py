"""Large sends are prepared one at a time, small ones whenever they come.

Callers who prepare beside each other take the interpreter from each other and from the writer, and
push each other's bodies out of the processor's caches (docs/decisions/0017).
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import pyarrow as pa

from rmq_pipeline.broker.request import BULK_ROWS
from rmq_pipeline.broker.sending.publish import BULK_BYTES

_OPEN: Final = nullcontext()


class BulkGate:
    """Lets small sends pass, and one large one at a time. For any thread."""

    def __init__(self) -> None:
        self._place = threading.Lock()

    def of(self, messages: pa.Table) -> AbstractContextManager[object]:
        """To be held while a send is prepared."""
        return self._place if _is_bulk(messages) else _OPEN


def _is_bulk(messages: pa.Table) -> bool:
    if not isinstance(messages, pa.Table):  # which is refused when it is prepared
        return False
    size: int = messages.get_total_buffer_size()
    return size >= BULK_BYTES or messages.num_rows >= BULK_ROWS
