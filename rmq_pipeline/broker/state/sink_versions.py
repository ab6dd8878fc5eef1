"""Versions of sinks: each settle that names files, and each replacement, makes a new one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.store.events import Kind

SINK_KINDS: Final = (Kind.SINK_FILE, Kind.SINK_REPLACED)


class SinkVersion(NamedTuple):
    """Version of a sink, the set of files that count."""

    #: Number of all settles with files and all replacements; 0: none yet.
    version: int = 0
    #: Version of its last replacement. Only a replacement makes files stop counting.
    replaced: int = 0


@dataclass(slots=True)
class SinkVersions:
    """Sink versions of all groups."""

    _of: dict[int, SinkVersion] = field(default_factory=dict)

    def of(self, group_id: int) -> SinkVersion:
        """Return the version of a group's sink."""
        return self._of.get(group_id, SinkVersion())

    def load(self, group_id: int, *, version: int, replaced: int) -> None:
        """Set the version that the state tables hold."""
        self._of[group_id] = SinkVersion(version, replaced)

    def apply(self, events: EventRows) -> None:
        """Set the version that a settle with files, or a replacement, has made."""
        version = int(events.column("delivery", np.int64).max())
        replaced = version if events.kind == Kind.SINK_REPLACED else self.of(events.group_id)[1]
        self._of[events.group_id] = SinkVersion(version, replaced)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop the versions of deleted groups."""
        for group_id in group_ids:
            self._of.pop(group_id, None)
