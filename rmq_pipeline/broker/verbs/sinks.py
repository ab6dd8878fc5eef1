"""Verbs: files of sinks."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.access.rights import on_group
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import sinks
from rmq_pipeline.lake.manifest import named_below
from rmq_pipeline.store.events import Kind
from rmq_pipeline.verb import Window


class Sinks(Opened):
    """Verbs for files of sinks."""

    @verb(rights=on_group("get"), repeatable=True, on_standby=True)
    def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
        """Return the files that belong to a group's sink, in the order they were added.

        Files whose paths are not below the sink are left out and reported in the log.

        Args:
            group: consumer group of the sink.
            removed: return the files that were replaced in the last 30 days instead.

        Returns:
            schema.SINK_FILE, epoch, at_ms, version; of removed files removed_version and
            removed_at_ms, too. The schema's metadata has the ``version`` of the sink and the
            broker's time, ``at_ms``.
        """
        group_id = self._engine.state.group(group).group_id
        self._engine.dispatched(self._engine.state.changed(Kind.SINK_FILE, group_id))
        version, listed = self._engine.database.sink_files(group_id, removed=removed)
        facts = {"version": str(version), "at_ms": str(self._engine.clock.now_ms())}
        return named_below(listed, sink=group).replace_schema_metadata(facts)

    @verb(rights=on_group("update"), repeatable=True)
    def replace_sink_files(
        self,
        group: str,
        *,
        replacement_id: str,
        add: pa.Table,
        remove: Sequence[str],
        partitions: Sequence[str] = (),
        window: Window | None = None,
        reason: str = "",
    ) -> dict[str, Any]:
        """Replace files of a group's sink by others, all or none.

        The call may run while a window of the group is open; the window goes on to settle.

        Args:
            group: consumer group of the sink.
            replacement_id: repeating a replacement under its id returns the same answer and does
                nothing.
            add: schema.SINK_FILE, files that exist; may be empty.
            remove: paths of files that belong to the sink; may be empty.
            partitions: partitions that are replaced as a whole: the call is refused if they have
                other files.
            window: name and epoch of the window that does the work.
            reason: text for the view ``sink_replacements``.

        Returns:
            {"version", "added", "removed"}: of the sink, and the paths.

        Raises:
            SinkChangedError: the sink does not have these files; nothing was changed.
            FencedError: a newer window of that name has taken over.
        """
        return sinks.replace_sink_files(
            self._engine,
            group,
            replacement_id=replacement_id,
            add=add,
            remove=remove,
            partitions=partitions,
            window=window,
            reason=reason,
        )
