"""Receipt handles: which delivery of which message a settle speaks of, as 56 hex digits.

The delivery number is drawn at random for each receive, so a handle cannot be guessed and one of an
older lease never fits a newer one.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import ReceiptHandleError, RocketMQError, TableSchemaError
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
    rows = rows_behind(handles, _LAYOUT, column="receipt_handle", error=ReceiptHandleError)
    return Receipts(
        rows["group_id"].astype(np.int32),
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["delivery"].astype(np.int64),
    )


def rows_behind(
    handles: pa.Array | pa.ChunkedArray,
    layout: np.dtype[np.void],
    *,
    column: str,
    error: type[RocketMQError],
) -> npt.NDArray[np.void]:
    """The rows of ``layout`` that these texts are, two hex digits a byte.

    Args:
        column: what the texts are called in an error.
        error: raised when one is null or no such row.
    """
    if isinstance(handles, pa.ChunkedArray):
        handles = handles.combine_chunks()
        if isinstance(handles, pa.ChunkedArray):
            handles = handles.chunk(0) if handles.num_chunks else pa.array([], pa.string())
    if not pa.types.is_string(handles.type):
        try:
            handles = handles.cast(pa.string())
        except pa.ArrowException as cause:
            raise TableSchemaError(f"Column {column} must be text.") from cause
    n, width = len(handles), layout.itemsize
    offsets = np.frombuffer(handles.buffers()[1], dtype=np.int32)[
        handles.offset : handles.offset + n + 1
    ]
    wrong = np.diff(offsets) != 2 * width
    if handles.null_count or wrong.any():
        row = int(np.argmax(wrong)) if wrong.any() else 0
        raise error(f"Row {row} is not a {column.replace('_', ' ')}.")
    data = handles.buffers()[2] if n else b""
    pairs = np.frombuffer(data, np.uint16, n * width, int(offsets[0]) if n else 0)
    values = np.take(_BYTES, pairs)
    if n and values.max() >= _NO_BYTE:
        row = int(np.argmax(values >= _NO_BYTE)) // width
        raise error(f"Row {row} is not a {column.replace('_', ' ')}.")
    return values.astype(np.uint8).view(layout)
