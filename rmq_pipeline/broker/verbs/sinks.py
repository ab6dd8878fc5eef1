"""Files of sinks: which count, and how others come to count instead."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker.settling import replacing
from rmq_pipeline.broker.verbs.opened import Opened


class Sinks(Opened):
    """The files that settles and replacements have named."""

    def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
        """The files that count in a group's sink, in the order they came to.

        Args:
            removed: those that were replaced instead; for 30 days they are known.

        Returns:
            schema.SINK_FILE, epoch, at_ms, version; of removed ones also removed_version,
            removed_at_ms. The metadata of the schema says under ``version`` which version of the
            sink this is, and under ``at_ms`` what time it is there.
        """
        group_id = self._engine.state.group(group).group_id
        self._engine.dispatched()
        version, listed = self._engine.database.sink_files(group_id, removed=removed)
        facts = {"version": str(version), "at_ms": str(self._engine.clock.now_ms())}
        return listed.replace_schema_metadata(facts)

    def replace_sink_files(
        self,
        group: str,
        *,
        replacement_id: str,
        add: pa.Table,
        remove: Sequence[str],
        partitions: Sequence[str] = (),
        window: tuple[str, int] | None = None,
        reason: str = "",
    ) -> dict[str, Any]:
        """Let files of a group's sink count instead of others: all of it, or nothing.

        It goes beside a living window of the group, whose settles go on to count.

        Args:
            replacement_id: asked again under it, it is answered the same and nothing is changed.
            add: schema.SINK_FILE, files that are there; may be empty.
            remove: paths that count; may be empty.
            partitions: those that are replaced whole: refused when other files of theirs count.
            window: name and epoch of the window whose work it is.
            reason: for the view ``sink_replacements``.

        Returns:
            {"version", "added", "removed"}: of the sink, and the paths.

        Raises:
            SinkChangedError: the sink is not as this supposes; nothing was changed.
            FencedError: a newer window of that name has taken over.
        """
        return replacing.replace_sink_files(
            self._engine,
            group,
            replacement_id=replacement_id,
            add=add,
            remove=remove,
            partitions=partitions,
            window=window,
            reason=reason,
        )
