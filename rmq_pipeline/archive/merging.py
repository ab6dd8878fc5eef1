"""Small segments become a large one: the work on files, which any process may do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.archive.root import Root, opened
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import SegmentFile, place, sync_names
from rmq_pipeline.errors import StorageError


@dataclass(frozen=True, slots=True)
class Merger:
    """Neighbouring segments of one queue, in offset order, that are to become one."""

    #: Where the archive is.
    root: str
    inputs: tuple[Segment, ...]
    #: Of the inputs.
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """As it crosses the table door."""
        paths = [each.relative for each in self.inputs]
        return {"root": self.root, "inputs": paths, "bytes": self.bytes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """What ``to_json`` gave."""
        inputs = tuple(Segment.from_path(path) for path in found["inputs"])
        return cls(found["root"], inputs, found["bytes"])

    def run(self) -> Segment:
        """Write the large one under its names, but for the one that globs see; what it is.

        Raises:
            StorageError: an input cannot be read, or is not the next one.
            OSError: writing failed.
        """
        return merge(opened(self.root), self.inputs)


def merge(root: Root, inputs: Sequence[Segment]) -> Segment:
    """Write neighbouring segments of a queue, in offset order, as one; see ``Merger.run``."""
    first = inputs[0]
    file = SegmentFile(root, first.topic, topic_id=first.topic_id, queue_id=first.queue_id)
    try:
        for segment in inputs:
            _append(file, root, segment=segment)
        file.close()
        merged = file.publish()
    except BaseException:
        file.abort()
        raise
    sync_names(root, [merged])
    return merged


def _append(file: SegmentFile, root: Root, *, segment: Segment) -> None:
    path = place(root, segment)
    try:
        with root.open(path) as opened_file, pq.ParquetFile(opened_file) as parquet:
            for group in range(parquet.num_row_groups):
                file.append(parquet.read_row_group(group, use_threads=False))
    except (FileNotFoundError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
