"""A stretch of a message queue, as one task reads it: segments itself, the rest from the broker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql.datasource import InputPartition

from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source.options import Address

#: The first page asked for, of bodies of any size; the next ones are of about so many bytes.
_FIRST_ROWS: Final = 64
_PAGE_ROWS: Final = 20_000
_PAGE_BYTES: Final = 16 << 20
#: The columns that no file has.
_OF_PLACE: Final = ("topic", "queue_id")


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets [start, end), in a file or, without one, at the broker."""

    start: int
    end: int
    #: A path or a URI.
    file: str | None = None
    #: The offset of the file's first row.
    base: int = 0


@dataclass(frozen=True)
class Stretch(InputPartition):
    """Messages of one queue, for one task; pieces in the order of offsets."""

    address: Address
    topic: str
    topic_id: int
    queue_id: int
    pieces: tuple[Piece, ...]
    #: Expired messages are an error, not a gap.
    fail_on_data_loss: bool

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The messages by offset, a part at a time; ``columns`` in their order.

        Raises:
            IllegalOffsetError: messages have expired meanwhile, and data loss is an error.
        """
        stored = [name for name in columns if name not in _OF_PLACE]
        place = {"topic": self.topic, "queue_id": self.queue_id}
        with self.address.connect() as client:
            for piece in self.pieces:
                for table in self._read(client, piece, columns=stored):
                    constants = {
                        name: pa.repeat(pa.scalar(value), table.num_rows)
                        for name, value in place.items()
                    }
                    arrays = [
                        constants[name] if name in constants else table.column(name)
                        for name in columns
                    ]
                    yield pa.table(arrays, names=list(columns))

    def _read(self, client: Client, piece: Piece, *, columns: list[str]) -> Iterator[pa.Table]:
        file = None if piece.file is None else opened(piece.file)
        if file is None:
            # Replaced and past its grace, or not on this machine: the broker knows where it is.
            yield from self._pages(client, piece, columns=columns)
            return
        with file:
            yield from rows_of(file, piece, columns=columns)

    def _pages(self, client: Client, piece: Piece, *, columns: list[str]) -> Iterator[pa.Table]:
        if client.describe_topic(self.topic)["topic_id"] != self.topic_id:
            raise IllegalOffsetError(f"Topic {self.topic} was deleted and made again.")
        at, limit = piece.start, _FIRST_ROWS
        while at < piece.end:
            asked = min(limit, piece.end - at)
            try:
                page = client.read(self.topic, self.queue_id, offset=at, limit=asked)
            except IllegalOffsetError:
                at = self._skipped(client, at)
                continue
            if not page.num_rows:
                raise IllegalOffsetError(
                    f"Queue {self.queue_id} of topic {self.topic} ends at {at}, not {piece.end}."
                )
            yield page.select(columns)
            at += page.num_rows
            fitting = _PAGE_BYTES * page.num_rows // max(1, page.nbytes)
            limit = max(1, min(_PAGE_ROWS, fitting, 8 * limit))

    def _skipped(self, client: Client, at: int) -> int:
        """Where messages are kept again after ``at``; what was there has just expired."""
        queue = client.describe_topic(self.topic)["offsets"][self.queue_id]
        low = int(queue["min_offset"])
        if self.fail_on_data_loss or low <= at:
            raise IllegalOffsetError(
                f"Offset {at} of queue {self.queue_id} of topic {self.topic} is not kept:"
                f" those from {low} to {queue['max_offset']} are."
            )
        return low


def opened(path: str) -> pq.ParquetFile | None:
    """A segment; None when it is not there."""
    files, inside = fs.FileSystem.from_uri(path)
    try:
        return pq.ParquetFile(files.open_input_file(inside))
    except FileNotFoundError:
        return None


def rows_of(file: pq.ParquetFile, piece: Piece, *, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The messages of a piece, a row group at a time; only those that it touches are read."""
    footer = file.metadata
    counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    starts = piece.base + np.cumsum([0, *counts])
    for group in range(len(counts)):
        low, high = max(int(starts[group]), piece.start), min(int(starts[group + 1]), piece.end)
        if low < high:
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
            yield table.slice(low - int(starts[group]), high - low)
