"""Receipt handles: which delivery of which message a settle speaks of, as 56 hex digits.

The delivery number is drawn at random for each receive, so a handle cannot be guessed and one of an
older lease never fits a newer one.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import ReceiptHandleError, TableSchemaError
from rmq_pipeline.message import Int32s, Int64s, texts_of_bytes

_LAYOUT: Final = np.dtype(
    [
        ("delivery", ">i8"),
        ("queue_offset", ">i8"),
        ("queue_id", ">i4"),
        ("topic_id", ">i4"),
        ("group_id", ">i4"),
    ]
)
_WIDTH: Final = _LAYOUT.itemsize * 2


def _nibbles() -> npt.NDArray[np.uint8]:
    table = np.full(256, 255, dtype=np.uint8)
    for value, digit in enumerate(b"0123456789ABCDEF"):
        table[digit] = value
    for value, digit in enumerate(b"abcdef", start=10):
        table[digit] = value
    return table


_NIBBLES: Final = _nibbles()


@dataclass(frozen=True, slots=True)
class Receipts:
    """Decoded receipts, one row each."""

    group_id: Int32s
    topic_id: Int32s
    queue_id: Int32s
    queue_offset: Int64s
    delivery: Int64s

    def __len__(self) -> int:
        return len(self.queue_offset)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Receipts":
        """The receipts of these rows."""
        return Receipts(
            self.group_id[rows],
            self.topic_id[rows],
            self.queue_id[rows],
            self.queue_offset[rows],
            self.delivery[rows],
        )


def encode(receipts: Receipts) -> pa.StringArray:
    """The handles of these receipts."""
    rows = np.empty(len(receipts), dtype=_LAYOUT)
    rows["delivery"] = receipts.delivery
    rows["queue_offset"] = receipts.queue_offset
    rows["queue_id"] = receipts.queue_id
    rows["topic_id"] = receipts.topic_id
    rows["group_id"] = receipts.group_id
    return texts_of_bytes(rows.view(np.uint8).reshape(len(rows), _LAYOUT.itemsize))


def decode(handles: pa.Array | pa.ChunkedArray) -> Receipts:
    """The receipts behind these handles.

    Raises:
        ReceiptHandleError: a handle is null or was not made by ``encode``.
    """
    if isinstance(handles, pa.ChunkedArray):
        handles = handles.combine_chunks()
        if isinstance(handles, pa.ChunkedArray):
            handles = handles.chunk(0) if handles.num_chunks else pa.array([], pa.string())
    if not pa.types.is_string(handles.type):
        try:
            handles = handles.cast(pa.string())
        except pa.ArrowException as error:
            raise TableSchemaError("Column receipt_handle must be text.") from error
    n = len(handles)
    offsets = np.frombuffer(handles.buffers()[1], dtype=np.int32)[
        handles.offset : handles.offset + n + 1
    ]
    wrong = np.diff(offsets) != _WIDTH
    if handles.null_count or wrong.any():
        row = int(np.argmax(wrong)) if wrong.any() else 0
        raise ReceiptHandleError(f"Row {row} is not a receipt handle.")
    if n == 0:
        digits = np.zeros((0, _LAYOUT.itemsize, 2), dtype=np.uint8)
    else:
        data = np.frombuffer(handles.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
        digits = _NIBBLES[data].reshape(n, _LAYOUT.itemsize, 2)
    if digits.size and digits.max() == 255:
        row = int(np.argmax(digits.reshape(n, -1).max(axis=1) == 255))
        raise ReceiptHandleError(f"Row {row} is not a receipt handle.")
    packed = (digits[:, :, 0] << 4) | digits[:, :, 1]
    rows = np.ascontiguousarray(packed).view(_LAYOUT).reshape(n)
    return Receipts(
        rows["group_id"].astype(np.int32),
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["delivery"].astype(np.int64),
    )
