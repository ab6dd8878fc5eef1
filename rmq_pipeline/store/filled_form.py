"""Serialized batches that are filled in place: of few rows, making them costs more than the rows.

A record batch of a fixed schema without nulls in its numbers and without texts is, serialized, the
same bytes for every batch of one length but for the numbers themselves.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Numbers = npt.NDArray[np.signedinteger]


class FilledForm:
    """The serialized form of batches of ``rows`` rows; texts are null. For any thread."""

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        arrays = [
            pa.nulls(rows, field.type)
            if field.type == pa.string()
            else pa.array(np.zeros(rows, field.type.to_pandas_dtype()))
            for field in schema
        ]
        payload = pa.RecordBatch.from_arrays(arrays, schema=schema).serialize()
        batch = pa.ipc.read_record_batch(payload, schema)
        self._rows: Final = rows
        self._bytes: Final = payload.to_pybytes()
        self._places: Final = [
            (field.type.to_pandas_dtype(), column.buffers()[1].address - payload.address)
            for field, column in zip(schema, batch.columns, strict=True)
            if field.type != pa.string()
        ]

    def copy(self) -> tuple[pa.Buffer, list[_Numbers]]:
        """A new payload, and the columns of numbers in it, to be filled in."""
        payload = bytearray(self._bytes)
        columns = [np.frombuffer(payload, dtype, self._rows, at) for dtype, at in self._places]
        return pa.py_buffer(payload), columns
