"""The archive: looking up messages in it, merging its files, letting old ones go."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.stored import compaction, finding, retention, tending
from rmq_pipeline.broker.verbs.opened import Opened, Window
from rmq_pipeline.errors import RequestError


class Archiving(Opened):
    """What runs do with segments."""

    def compact(
        self,
        topic: str | None = None,
        *,
        limit_bytes: int = limits.COMPACT_SPARK_BYTES,
        window: Window | None = None,
    ) -> dict[str, int]:
        """Merge small neighbouring segments in the broker's process; a report."""
        return compaction.compact(self._engine, topic=topic, limit_bytes=limit_bytes, window=window)

    def plan_compaction(
        self, topic: str | None = None, *, limit_bytes: int = limits.COMPACT_SPARK_BYTES
    ) -> list[dict[str, Any]]:
        """What is to be merged, for another process to do: root, inputs (paths), bytes of each."""
        mergers = compaction.plan(self._engine, topic=topic, limit_bytes=limit_bytes)
        return [each.to_json() for each in mergers]

    def replace_segments(
        self, removed: Sequence[str], *, added: str, window: Window | None = None
    ) -> dict[str, int]:
        """Let a merged segment, which is in its place, count instead of its inputs; a report."""
        arguments.texts([*removed, added], "removed and added")
        try:
            old, new = [Segment.from_path(path) for path in removed], Segment.from_path(added)
        except ValueError as error:
            raise RequestError(f"That is no path of a segment: {error}.") from error
        return compaction.replace_segments(self._engine, old, added=new, window=window)

    def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        message_id: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        limit: int = 100,
        with_body: bool = False,
    ) -> pa.Table:
        """The first messages of a topic with a key, an id, a time, in the order of storing.

        Args:
            from_ms: stored then or later; and before ``to_ms``.

        Returns:
            schema.READ; body is null unless it is asked for.
        """
        named = arguments.text_or_none(key, "key"), arguments.text_or_none(message_id, "message_id")
        asked = (*named, from_ms, to_ms, limit, with_body)
        return finding.find(self._engine, topic, wanted=finding.Wanted(*asked))

    def archive(self) -> dict[str, Any]:
        """What is in the archive: root, files, rows, bytes, and the same of each topic."""
        return tending.facts(self._engine)

    def expire(self, *, window: Window | None = None) -> dict[str, int]:
        """Let go of what topics no longer keep, delete files whose grace is over; a report."""
        return retention.expire(self._engine, window=window)
