"""The archive, from another process."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.flight.calls import Calls, Window


class Archiving(Calls):
    """The verbs of segments."""

    def compact(
        self,
        topic: str | None = None,
        *,
        limit_bytes: int = limits.COMPACT_SPARK_BYTES,
        window: Window | None = None,
    ) -> dict[str, int]:
        """Merge small neighbouring segments in the broker's process.

        Args:
            topic: of one topic only.
            limit_bytes: of what is merged; one merger more at most.
            window: refused when it has been taken over.

        Returns:
            {"compactions", "inputs", "rows", "bytes_before", "bytes"}.
        """
        return self._facts("compact", topic=topic, limit_bytes=limit_bytes, window=window)

    def plan_compaction(
        self, topic: str | None = None, *, limit_bytes: int = limits.COMPACT_SPARK_BYTES
    ) -> list[dict[str, Any]]:
        """What is to be merged: {"root", "inputs", "bytes"} of each.

        Another process does it (archive.merging.Merger), and then calls ``replace_segments``.
        """
        args = {"topic": topic, "limit_bytes": limit_bytes}
        return list(self._connection.call("plan_compaction", args))

    def replace_segments(
        self, removed: Sequence[str], *, added: str, window: Window | None = None
    ) -> dict[str, int]:
        """Let a merged segment count instead of its inputs; what ``compact`` returns.

        Raises:
            RequestError: the inputs do not count any more; the merged file is deleted.
            StorageError: it does not hold what its name says; it is deleted.
            FencedError: a newer window has taken over.
        """
        return self._facts("replace_segments", removed=list(removed), added=added, window=window)

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
            topic: to look through.
            key: one of their keys.
            message_id: theirs.
            from_ms: stored then or later,
            to_ms: and before then.
            limit: this many at most.
            with_body: read the bodies, too; they are null else.

        Returns:
            schema.READ.

        Raises:
            RequestError: nothing is asked for.
        """
        return self._table(
            "find",
            topic=topic,
            key=key,
            message_id=message_id,
            from_ms=from_ms,
            to_ms=to_ms,
            limit=limit,
            with_body=with_body,
        )

    def archive(self) -> dict[str, Any]:
        """What is in the archive.

        Returns:
            {"root", "files", "rows", "bytes", "topics": [{"topic", "files", "rows", "bytes",
            "min_stored_at_ms", "max_stored_at_ms", "replaced_files"}]}.
        """
        return self._facts("archive")

    def expire(self, *, window: Window | None = None) -> dict[str, int]:
        """Let go of messages that their topics no longer keep, and delete files past their grace.

        Returns:
            {"segments", "rows", "bytes", "held_back", "deleted_files"}.
        """
        return self._facts("expire", window=window)
