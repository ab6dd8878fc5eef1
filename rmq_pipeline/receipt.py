"""Receipt handles: 56 hex digits that identify one delivery of a message.

Each receive draws a random delivery number. A handle can therefore not be guessed, and the handle
of an earlier lease never matches a later one.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import RecallError, ReceiptHandleError, RocketMQError, TableSchemaError
from rmq_pipeline.message import Int32s, Int64s, offsets_of, texts_of_bytes

_LAYOUT: Final = np.dtype(
    [
        ("delivery", ">i8"),
        ("queue_offset", ">i8"),
        ("queue_id", ">i4"),
        ("topic_id", ">i4"),
        ("group_id", ">i4"),
    ]
)

#: Marks two characters that are not hex digits.
_NO_BYTE: Final = 256


def _bytes_of_digits() -> npt.NDArray[np.uint16]:
    """Return the byte for each pair of hex digits, indexed by their 16 bits in memory."""
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
        """Return the receipts of these rows."""
        return Receipts(
            self.group_id[rows],
            self.topic_id[rows],
            self.queue_id[rows],
            self.queue_offset[rows],
            self.delivery[rows],
        )


def encode(receipts: Receipts) -> pa.StringArray:
    """Return the handles of receipts."""
    rows = np.empty(len(receipts), dtype=_LAYOUT)
    rows["delivery"] = receipts.delivery
    rows["queue_offset"] = receipts.queue_offset
    rows["queue_id"] = receipts.queue_id
    rows["topic_id"] = receipts.topic_id
    rows["group_id"] = receipts.group_id
    return texts_of_bytes(rows.view(np.uint8).reshape(len(rows), _LAYOUT.itemsize))


def decode(handles: pa.Array | pa.ChunkedArray) -> Receipts:
    """Return the receipts of handles.

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
    """Return the rows of ``layout`` that texts of hex digits encode.

    Args:
        column: name of the texts in an error.
        error: raised if a text is null or malformed.
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
    if not n:  # an empty column may come without buffers
        return np.zeros(0, layout)
    offsets = offsets_of(handles)
    wrong = np.diff(offsets) != 2 * width
    if handles.null_count or wrong.any():
        raise _no_handle(error, int(np.argmax(wrong)) if wrong.any() else 0, column=column)
    pairs = np.frombuffer(handles.buffers()[2], np.uint16, n * width, int(offsets[0]))
    values = np.take(_BYTES, pairs)
    if values.max() >= _NO_BYTE:
        raise _no_handle(error, int(np.argmax(values >= _NO_BYTE)) // width, column=column)
    return values.astype(np.uint8).view(layout)


def _no_handle(error: type[RocketMQError], row: int, *, column: str) -> RocketMQError:
    return error(
        f"Row {row} is not a {column.replace('_', ' ')}.",
        remedy=f"Pass the {column} exactly as the broker returned it.",
    )


_RECALL_LAYOUT: Final = np.dtype(
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


def encode_recall(handles: RecallHandles) -> pa.StringArray:
    """Return the handles as texts."""
    rows = np.empty(len(handles), dtype=_RECALL_LAYOUT)
    for name in _RECALL_LAYOUT.names or ():
        rows[name] = getattr(handles, name)
    return texts_of_bytes(rows.view(np.uint8).reshape(len(rows), _RECALL_LAYOUT.itemsize))


def decode_recall(texts: pa.Array | pa.ChunkedArray) -> RecallHandles:
    """Return the decoded handles.

    Raises:
        RecallError: a text is null or was not made by ``encode_recall``.
    """
    rows = rows_behind(texts, _RECALL_LAYOUT, column="recall_handle", error=RecallError)
    return RecallHandles(
        rows["topic_id"].astype(np.int32),
        rows["queue_id"].astype(np.int32),
        rows["queue_offset"].astype(np.int64),
        rows["message_id_hash"].astype(np.int64),
    )
