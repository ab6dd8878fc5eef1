"""An offset range of a queue for one task, read from segment files and from the broker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql.datasource import InputPartition

from rmq_pipeline.archive.segment_file import open_segment
from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source.options import Address

#: Rows of the first page, as the size of bodies is unknown; later pages have about _PAGE_BYTES.
_FIRST_ROWS: Final = 64
_PAGE_ROWS: Final = 20_000
_PAGE_BYTES: Final = 16 << 20
#: Columns that segment files do not have.
_OF_PLACE: Final = ("topic", "queue_id")


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets [start, end) in one segment file or, without a file, at the broker."""

    start: int
    end: int
    #: A path or a URI.
    file: str | None = None
    #: The offset of the file's first row.
    base: int = 0


@dataclass(frozen=True)
class QueuePartition(InputPartition):
    """Messages of one queue for one task; pieces in offset order."""

    address: Address
    topic: str
    topic_id: int
    queue_id: int
    pieces: tuple[Piece, ...]
    #: True: expired messages raise an error; False: they are skipped.
    fail_on_data_loss: bool

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the messages by offset, in several tables with these columns in this order.

        Raises:
            IllegalOffsetError: messages have expired since planning, and fail_on_data_loss is set.
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
            # The segment was replaced and deleted, or is on another machine; the broker can read
            # it.
            yield from self._pages(client, piece, columns=columns)
            return
        with file:
            yield from rows_of(file, piece, columns=columns)

    def _pages(self, client: Client, piece: Piece, *, columns: list[str]) -> Iterator[pa.Table]:
        if client.describe_topic(self.topic)["topic_id"] != self.topic_id:
            raise IllegalOffsetError(f"Topic {self.topic} was deleted and created again.")
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
        """Return the first retained offset; the messages before it have just expired."""
        queue = client.describe_topic(self.topic)["offsets"][self.queue_id]
        low = int(queue["min_offset"])
        if self.fail_on_data_loss or low <= at:
            why = "has expired" if at < low else "is not there"
            raise IllegalOffsetError(
                f"Offset {at} of queue {self.queue_id} of topic {self.topic} {why}; the queue"
                f" retains offsets {low} to {queue['max_offset']}."
            )
        return low


def opened(path: str) -> pq.ParquetFile | None:
    """Open a segment; return None if it does not exist."""
    files, inside = fs.FileSystem.from_uri(path)
    try:
        return open_segment(files.open_input_file(inside))
    except FileNotFoundError:
        return None


def rows_of(file: pq.ParquetFile, piece: Piece, *, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the messages of a piece by row group; reads only the row groups that it overlaps."""
    footer = file.metadata
    counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    starts = piece.base + np.cumsum([0, *counts])
    for group in range(len(counts)):
        low, high = max(int(starts[group]), piece.start), min(int(starts[group + 1]), piece.end)
        if low < high:
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
            yield table.slice(low - int(starts[group]), high - low)
