"""Recall handles: which scheduled message a recall speaks of, as 48 hex digits.

The hash of its message id tells a message of this broker from one that another home keeps there.
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
    """Decoded recall handles, one row each; the place is that in SCHEDULE_TOPIC_XXXX."""

    #: The topic that the message is for.
    topic_id: Int32s
    queue_id: Int32s
    queue_offset: Int64s
    message_id_hash: Int64s

    def __len__(self) -> int:
        return len(self.queue_offset)


def encode(handles: RecallHandles) -> pa.StringArray:
    """The texts of these handles."""
    rows = np.empty(len(handles), dtype=_LAYOUT)
    for name in _LAYOUT.names or ():
        rows[name] = getattr(handles, name)
    return texts_of_bytes(rows.view(np.uint8).reshape(len(rows), _LAYOUT.itemsize))


def decode(texts: pa.Array | pa.ChunkedArray) -> RecallHandles:
    """The handles behind these texts.

    Raises:
        RecallError: one is null or was not made by ``encode``.
    """
    rows = receipt.rows_behind(texts, _LAYOUT, column="recall_handle", error=RecallError)
    return RecallHandles(
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["message_id_hash"].astype(np.int64),
    )
