"""Verbs: segments and the archive."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.access.rights import UPKEEP, Rights, on_topic
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import archiving, arguments, lookup, state_copy
from rmq_pipeline.errors import RequestError
from rmq_pipeline.verb import Window


class Archiving(Opened):
    """Verbs for segments and the archive."""

    @verb(rights=UPKEEP, repeatable=True)
    def compact(
        self,
        topic: str | None = None,
        *,
        limit_bytes: int = limits.COMPACT_SPARK_BYTES,
        window: Window | None = None,
    ) -> dict[str, int]:
        """Merge small neighbouring segments in the broker's process.

        Args:
            topic: merge segments of this topic only.
            limit_bytes: stop after the merge that reaches this many input bytes.
            window: refuse the call when this window has been taken over.

        Returns:
            {"compactions", "inputs", "rows", "bytes_before", "bytes"}.
        """
        return archiving.compact(self._engine, topic=topic, limit_bytes=limit_bytes, window=window)

    @verb(rights=UPKEEP, repeatable=True)
    def plan_compaction(
        self, topic: str | None = None, *, limit_bytes: int = limits.COMPACT_SPARK_BYTES
    ) -> list[dict[str, Any]]:
        """Return the merges that are due: {"root", "inputs", "bytes"} of each.

        Another process does them with archive.segment_file.Merger, then calls ``replace_segments``.
        """
        mergers = archiving.plan(self._engine, topic=topic, limit_bytes=limit_bytes)
        return [each.to_json() for each in mergers]

    @verb(rights=UPKEEP, repeatable=True)
    def replace_segments(
        self, removed: Sequence[str], *, added: str, window: Window | None = None
    ) -> dict[str, int]:
        """Register a merged segment in place of its inputs.

        Args:
            removed: paths of the inputs.
            added: path of the merged segment, which exists.
            window: refuse the call when this window has been taken over.

        Returns:
            The same as ``compact``.

        Raises:
            RequestError: the inputs are not registered any more; the merged file is deleted.
            StorageError: the file does not hold what its name says; it is deleted.
            FencedError: a newer window has taken over.
        """
        arguments.texts([*removed, added], "removed and added")
        try:
            old, new = [Segment.from_path(path) for path in removed], Segment.from_path(added)
        except ValueError as error:
            raise RequestError(f"A path is not that of a segment: {error}.") from error
        return archiving.replace_segments(self._engine, old, added=new, window=window)

    @verb(rights=on_topic("sub"), repeatable=True, on_standby=True)
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
        """Return the first messages with a key, an id or a time, in the order of storing.

        Args:
            topic: topic to search.
            key: one of the message's keys.
            message_id: the message's id.
            from_ms: stored at this time or later.
            to_ms: stored before this time.
            limit: number of messages at most.
            with_body: read bodies, too; otherwise they are null. The answer then has fewer
                messages if their bodies exceed 64 MiB, but at least one.

        Returns:
            schema.READ.

        Raises:
            RequestError: neither a key, nor an id, nor a time is given.
        """
        named = arguments.text_or_none(key, "key"), arguments.text_or_none(message_id, "message_id")
        for name, at_ms in (("from_ms", from_ms), ("to_ms", to_ms)):
            if at_ms is not None:
                arguments.time_ms(at_ms, name)
        asked = (*named, from_ms, to_ms, limit, with_body)
        return lookup.find(self._engine, topic, wanted=lookup.Wanted(*asked))

    @verb(rights=Rights(cluster="get"), repeatable=True, on_standby=True)
    def archive(self) -> dict[str, Any]:
        """Return the size of the archive.

        Returns:
            {"root", "files", "rows", "bytes", "topics": [{"topic", "files", "rows", "bytes",
            "min_stored_at_ms", "max_stored_at_ms", "replaced_files"}]}.
        """
        return archiving.facts(self._engine)

    @verb(rights=UPKEEP, repeatable=True)
    def expire(self, *, window: Window | None = None) -> dict[str, int]:
        """Delete messages that their topics no longer retain, and files whose grace period is over.

        Returns:
            {"segments", "rows", "bytes", "held_back", "deleted_files"}.
        """
        return archiving.expire(self._engine, window=window)

    @verb(rights=UPKEEP, repeatable=True)
    def copy_state(self) -> dict[str, Any]:
        """Copy the database to a folder of the home, for `rmq backup`.

        Dispatch waits meanwhile; sends, receives and settles go on. One copy at a time, which
        replaces the copy before.

        Returns:
            {"folder", "position", "bytes", "waited_ms"}: the name of the folder in ``.state-copy``,
            the log position of the copy, and how long dispatch waited.

        Raises:
            BusyError: another copy is under way.
            StoreFullError: the disk has no space for it.
        """
        return state_copy.copy_state(self._engine)
