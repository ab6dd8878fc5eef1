"""Tables on their way between the driver and its tasks, as rows of one Spark schema.

A table of any columns travels as Arrow IPC: a small one inside the row, a large one as a file
beside it that the other side maps into memory. So no column passes through Spark's own types, and
the large ones do not pass through the JVM.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple

import pyarrow as pa

#: What fits into a row; about 5,000 messages of 200 bytes.
INLINE_BYTES: Final = 1 << 20

PARCEL: Final = pa.schema(
    [
        ("part", pa.int32()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("payload", pa.binary()),
        ("path", pa.string()),
    ]
)
#: The same in Spark's words.
PARCEL_DDL: Final = "part int, kind string, name string, payload binary, path string"


class Parcel(NamedTuple):
    """A table: which part of a batch it belongs to, what it is, and its bytes or file."""

    part: int
    kind: str
    name: str
    payload: bytes | None
    path: str | None


def pack(table: pa.Table, folder: Path, *, part: int, kind: str, name: str = "") -> Parcel:
    """Make a table ready to travel; ``folder`` is one that both sides reach."""
    if table.nbytes <= INLINE_BYTES:
        buffer = pa.BufferOutputStream()
        _write(table, buffer)
        return Parcel(part, kind, name, buffer.getvalue().to_pybytes(), None)
    # A task may be run twice: each attempt writes files of its own.
    with NamedTemporaryFile(
        "wb", dir=folder, prefix=f"{part}-{kind}-", suffix=".arrow", delete=False
    ) as file:
        _write(table, file)
    return Parcel(part, kind, name, None, file.name)


def unpack(parcel: Parcel) -> pa.Table:
    """The table; its bytes are not copied."""
    if parcel.path is not None:
        with pa.memory_map(parcel.path) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    return pa.ipc.open_file(pa.py_buffer(parcel.payload)).read_all()


def to_batch(parcels: Iterable[Parcel]) -> pa.RecordBatch:
    """Parcels as rows, PARCEL."""
    columns = zip(*parcels, strict=True)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, PARCEL, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PARCEL)


def from_rows(rows: pa.RecordBatch | pa.Table) -> list[Parcel]:
    """The parcels of rows, PARCEL."""
    return [Parcel(*row) for row in zip(*(c.to_pylist() for c in rows.columns), strict=True)]


def _write(table: pa.Table, sink: object) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
