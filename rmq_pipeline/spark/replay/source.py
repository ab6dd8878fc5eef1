"""The messages of a topic that a replay may read, as of its start."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from rmq_pipeline.spark.replay.settled import PLACE, Settled
from rmq_pipeline.spark.replay.topic_log import Segment, Stored, TopicLog, frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Source:
    """Segments, and the files of unsealed messages."""

    spark: "SparkSession"
    log: TopicLog
    #: The files, and their folder.
    tail: list[Stored]
    folder: Path
    settled: Settled

    def files(self, keep: Callable[[Segment], bool]) -> list[Stored]:
        """Return the files of the selected segments, and the tail."""
        kept = (segment for segment in self.log.segments if keep(segment))
        paths = (
            Stored(f"{self.log.root}/{each.path}", each.queue_id, each.base, each.end)
            for each in kept
        )
        return [*paths, *self.tail]

    def of(self, keep: Callable[[Segment], bool]) -> "DataFrame | None":
        """Return settled messages of segments and the tail, not yet read; None if there are none.

        Args:
            keep: selects the segments.
        """
        segments = [segment for segment in self.log.segments if keep(segment)]
        messages = frame(
            self.spark, self.log, segments=segments, tail=self.tail, folder=self.folder
        )
        return None if messages is None else self._settled(messages)

    def _settled(self, messages: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        queue, offset = F.col("queue_id"), F.col("queue_offset")
        bounds = (
            (queue == queue_id) & (offset < cursor)
            for queue_id, cursor in self.settled.cursors.items()
        )
        chosen = messages.filter(reduce(lambda one, other: one | other, bounds, F.lit(False)))
        if not self.settled.open.num_rows:
            return chosen
        left = F.broadcast(self.spark.createDataFrame(self.settled.open))
        return chosen.join(left, PLACE.names, "left_anti")
