"""Arrow transport: tables between the driver and its tasks, inside rows that Spark moves.

A table of any columns travels as Arrow IPC: a small one inside the row, a large one as a file that
the other side maps into memory. No column is converted to Spark's types, and large tables do not
pass through the JVM. If driver and tasks share no folder, every table travels inside the row.
"""

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Address, below, is_uri, split

#: Largest table inside a row where files can be used instead; about 5,000 messages of 200 bytes.
INLINE_BYTES: Final = 1 << 20


class PackedTable(NamedTuple):
    """A table as Arrow IPC bytes, or as the path or URI of its file."""

    payload: bytes | None
    path: str | None


class Given(NamedTuple):
    """Part of a micro-batch for a task, in one row because Spark may distribute rows freely."""

    part: int
    messages: bytes | None
    messages_path: str | None
    #: Both None: no message group has state.
    state: bytes | None
    state_path: str | None


class Answer(NamedTuple):
    """A table that the handling of a part produced."""

    part: int
    kind: str
    #: The topic, if the table is messages to publish.
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
#: ANSWER as a Spark schema.
ANSWER_DDL: Final = "part int, kind string, name string, payload binary, path string"


def pack(table: pa.Table, folder: Address | None, *, label: str) -> PackedTable:
    """Encode a table for the transport.

    Args:
        table: of any columns.
        folder: a folder or URI that both sides reach; None: there is none.
        label: start of the name of a file.
    """
    if folder is None or table.nbytes <= INLINE_BYTES:
        buffer = pa.BufferOutputStream()
        _write(table, buffer)
        return PackedTable(buffer.getvalue().to_pybytes(), None)
    # Spark may run a task twice: each attempt writes files of its own.
    if not isinstance(folder, Path):
        name = f"{label}-{secrets.token_hex(6)}.arrow"
        at(folder).write(name, partial(_write, table))
        return PackedTable(None, str(below(folder, name)))
    with NamedTemporaryFile(
        "wb", dir=folder, prefix=f"{label}-", suffix=".arrow", delete=False
    ) as file:
        _write(table, file)
    return PackedTable(None, file.name)


def unpack(payload: bytes | None, path: str | None) -> pa.Table:
    """Return the table; its bytes are not copied."""
    if path is not None and is_uri(path):
        folder, name = split(path)
        return pa.ipc.open_file(at(folder).load(name)).read_all()
    if path is not None:
        with pa.memory_map(path) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    return pa.ipc.open_file(pa.py_buffer(payload)).read_all()


def write(table: pa.Table, path: Address) -> str:
    """Write a table to an Arrow file that tasks read; return the path or URI."""
    if not isinstance(path, Path):
        folder, name = split(path)
        at(folder).write(name, partial(_write, table.combine_chunks()))
        return path
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return str(path)


def to_batch(rows: Sequence[Given] | Sequence[Answer], schema: pa.Schema) -> pa.RecordBatch:
    """Return one or more rows as a record batch of GIVEN or ANSWER."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def given(batch: pa.RecordBatch) -> list[Given]:
    """Return the parts in a batch of GIVEN."""
    return [Given(*row) for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]


def answers(table: pa.Table) -> list[Answer]:
    """Return the answers in a table of ANSWER."""
    return [Answer(*row) for row in zip(*(c.to_pylist() for c in table.columns), strict=True)]


def _write(table: pa.Table, sink: object) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
