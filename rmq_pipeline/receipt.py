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


#: What is no pair of hex digits.
_NO_BYTE: Final = 256


def _bytes_of_digits() -> npt.NDArray[np.uint16]:
    """The byte of each two digits, taken as they lie in memory."""
    nibbles = np.full(256, _NO_BYTE, dtype=np.uint16)
    for digits in (b"0123456789ABCDEF", b"0123456789abcdef"):
        nibbles[list(digits)] = np.arange(16)
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    high, low = nibbles[pairs[:, 0]], nibbles[pairs[:, 1]]
    return np.where((high | low) >= _NO_BYTE, np.uint16(_NO_BYTE), high << 4 | low)


_BYTES: Final = _bytes_of_digits()


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
    width = _LAYOUT.itemsize
    data = handles.buffers()[2] if n else b""
    pairs = np.frombuffer(data, np.uint16, n * width, int(offsets[0]) if n else 0)
    values = np.take(_BYTES, pairs)
    if n and values.max() >= _NO_BYTE:
        row = int(np.argmax(values >= _NO_BYTE)) // width
        raise ReceiptHandleError(f"Row {row} is not a receipt handle.")
    rows = values.astype(np.uint8).view(_LAYOUT)
    return Receipts(
        rows["group_id"].astype(np.int32),
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["delivery"].astype(np.int64),
    )
