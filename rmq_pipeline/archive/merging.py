"""Merging of small segments into a large one: the file work, which any process can do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from rmq_pipeline import checked_parquet
from rmq_pipeline.archive.read_failure import read_failure
from rmq_pipeline.archive.root import Root, opened
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import SegmentFile, open_segment, place, sync_names
from rmq_pipeline.errors import CorruptLogError


@dataclass(frozen=True, slots=True)
class Merger:
    """Adjacent segments of one queue, in offset order, to be merged into one."""

    #: Address of the archive's root.
    root: str
    inputs: tuple[Segment, ...]
    #: Total size of the inputs.
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the merger as JSON, for a process that reaches the broker by Flight."""
        paths = [each.relative for each in self.inputs]
        return {"root": self.root, "inputs": paths, "bytes": self.bytes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the merger from the result of ``to_json``."""
        inputs = tuple(Segment.from_path(path) for path in found["inputs"])
        return cls(found["root"], inputs, found["bytes"])

    def run(self) -> Segment:
        """Write the merged segment and return it; ``show`` later adds the name that globs see.

        Raises:
            CorruptLogError: an input is damaged; no merged file is left.
            StorageError: an input cannot be read, or offsets between inputs are missing.
            OSError: writing failed.
        """
        return merge(opened(self.root), self.inputs)


def merge(root: Root, inputs: Sequence[Segment]) -> Segment:
    """Write adjacent segments of a queue, in offset order, as one; see ``Merger.run``."""
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
    for table in _row_groups(root, segment):
        file.append(table)


def _row_groups(root: Root, segment: Segment) -> Iterator[pa.Table]:
    path = place(root, segment)
    try:
        with root.open(path) as opened_file, open_segment(opened_file) as parquet:
            if parquet.metadata.num_rows != segment.rows:
                raise CorruptLogError(
                    f"{path} holds {parquet.metadata.num_rows} messages, not {segment.rows}."
                )
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise read_failure(error, root, path=path, read=checked_parquet.count_rows) from error


def check(root: Root, segment: Segment) -> None:
    """Read a whole segment to verify it.

    Raises:
        CorruptLogError: the segment is damaged.
        StorageError: the segment cannot be read at present.
    """
    for _ in _row_groups(root, segment):
        pass
