"""Files of sinks: which count, and how others come to count instead."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker.settling import replacing
from rmq_pipeline.broker.verbs.opened import Opened


class Sinks(Opened):
    """The files that settles and replacements have named."""

    def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
        """The files that count in a group's sink, or, of the last 30 days, those that did.

        The metadata of the schema says which version of the sink this is, and what time it is.
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

        It goes beside a living window of the group, whose settles go on to count. Asked again
        under its id it is answered the same, and nothing is changed.
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
