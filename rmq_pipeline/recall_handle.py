"""Recall handles: 48 hex digits that identify a scheduled message.

The hash of the message id distinguishes it from another home's message at the same place.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import receipt
from rmq_pipeline.errors import RecallError
from rmq_pipeline.message import Int32s, Int64s, texts_of_bytes

_LAYOUT: Final = np.dtype(
    [
        ("message_id_hash", ">i8"),
        ("queue_offset", ">i8"),
        ("queue_id", ">i4"),
        ("topic_id", ">i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class RecallHandles:
    """Decoded recall handles, one row each; queue and offset are those in SCHEDULE_TOPIC_XXXX."""

    #: The topic to which the message will be delivered.
    topic_id: Int32s
    queue_id: Int32s
    queue_offset: Int64s
    message_id_hash: Int64s

    def __len__(self) -> int:
        return len(self.queue_offset)


def encode(handles: RecallHandles) -> pa.StringArray:
    """Return the handles as texts."""
    rows = np.empty(len(handles), dtype=_LAYOUT)
    for name in _LAYOUT.names or ():
        rows[name] = getattr(handles, name)
    return texts_of_bytes(rows.view(np.uint8).reshape(len(rows), _LAYOUT.itemsize))


def decode(texts: pa.Array | pa.ChunkedArray) -> RecallHandles:
    """Return the decoded handles.

    Raises:
        RecallError: a text is null or was not made by ``encode``.
    """
    rows = receipt.rows_behind(texts, _LAYOUT, column="recall_handle", error=RecallError)
    return RecallHandles(
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["message_id_hash"].astype(np.int64),
    )
