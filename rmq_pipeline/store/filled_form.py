"""Serialized batches that are filled in place: for few rows, serializing costs more than copying.

Consider two record batches of the same schema and length. If their numbers have no nulls and all
texts are null, their serialized forms differ only in the numbers.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Numbers = npt.NDArray[np.signedinteger]


class FilledForm:
    """Serialized template for batches of ``rows`` rows; texts are null. Thread-safe."""

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
        """Return a new payload and its number columns as writable arrays."""
        payload = bytearray(self._bytes)
        columns = [np.frombuffer(payload, dtype, self._rows, at) for dtype, at in self._places]
        return pa.py_buffer(payload), columns
