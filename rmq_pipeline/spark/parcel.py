"""Tables on their way between the driver and its tasks, inside rows that Spark moves.

A table of any columns travels as Arrow IPC: a small one inside the row, a large one as a file
beside it that the other side maps into memory. So no column passes through Spark's own types, and
the large ones do not pass through the JVM.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple

import pyarrow as pa

#: What fits into a row; about 5,000 messages of 200 bytes.
INLINE_BYTES: Final = 1 << 20


class Parcel(NamedTuple):
    """A table as its bytes or as the path of its file."""

    payload: bytes | None
    path: str | None


class Given(NamedTuple):
    """A part of a micro-batch for a task; one row, since Spark may spread rows as it likes."""

    part: int
    messages: bytes | None
    messages_path: str | None
    #: Both None: no message group has state.
    state: bytes | None
    state_path: str | None


class Answer(NamedTuple):
    """A table that came of a part."""

    part: int
    kind: str
    #: The topic, of messages to publish.
    name: str
    payload: bytes | None
    path: str | None


GIVEN: Final = pa.schema(
    [
        ("part", pa.int32()),
        ("messages", pa.binary()),
        ("messages_path", pa.string()),
        ("state", pa.binary()),
        ("state_path", pa.string()),
    ]
)
ANSWER: Final = pa.schema(
    [
        ("part", pa.int32()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("payload", pa.binary()),
        ("path", pa.string()),
    ]
)
#: The same in Spark's words.
ANSWER_DDL: Final = "part int, kind string, name string, payload binary, path string"


def pack(table: pa.Table, folder: Path, *, label: str) -> Parcel:
    """Make a table ready to travel; ``folder`` is one that both sides reach."""
    if table.nbytes <= INLINE_BYTES:
        buffer = pa.BufferOutputStream()
        _write(table, buffer)
        return Parcel(buffer.getvalue().to_pybytes(), None)
    # A task may be run twice: each attempt writes files of its own.
    with NamedTemporaryFile(
        "wb", dir=folder, prefix=f"{label}-", suffix=".arrow", delete=False
    ) as file:
        _write(table, file)
    return Parcel(None, file.name)


def unpack(payload: bytes | None, path: str | None) -> pa.Table:
    """The table of a parcel; its bytes are not copied."""
    if path is not None:
        with pa.memory_map(path) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    return pa.ipc.open_file(pa.py_buffer(payload)).read_all()


def write(table: pa.Table, path: Path) -> str:
    """An Arrow file that tasks map into memory; its path."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return str(path)


def to_batch(rows: Sequence[Given] | Sequence[Answer], schema: pa.Schema) -> pa.RecordBatch:
    """Rows, at least one, as a record batch of GIVEN or ANSWER."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def given(batch: pa.RecordBatch) -> list[Given]:
    """The parts in a batch of GIVEN."""
    return [Given(*row) for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]


def answers(table: pa.Table) -> list[Answer]:
    """The answers in a table of ANSWER."""
    return [Answer(*row) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]


def _write(table: pa.Table, sink: object) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
