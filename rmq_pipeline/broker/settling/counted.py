"""Versions of sinks: each settle that names files, and each replacement, is one."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.store.events import Kind

SINK_KINDS: Final = (Kind.SINK_FILE, Kind.SINK_REPLACED)


class SinkVersion(NamedTuple):
    """Which files of a sink count."""

    #: Of all that ever happened to it; 0: nothing.
    version: int = 0
    #: That of its last replacement: files stop counting only then.
    replaced: int = 0


@dataclass(slots=True)
class SinkVersions:
    """The version of each group's sink."""

    _of: dict[int, SinkVersion] = field(default_factory=dict)

    def of(self, group_id: int) -> SinkVersion:
        """The version of a group's sink."""
        return self._of.get(group_id, SinkVersion())

    def load(self, group_id: int, *, version: int, replaced: int) -> None:
        """As the tables say."""
        self._of[group_id] = SinkVersion(version, replaced)

    def apply(self, events: EventRows) -> None:
        """Files came to count, and others not to."""
        version = int(events.column("delivery", np.int64).max())
        replaced = version if events.kind == Kind.SINK_REPLACED else self.of(events.group_id)[1]
        self._of[events.group_id] = SinkVersion(version, replaced)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Groups were deleted."""
        for group_id in group_ids:
            self._of.pop(group_id, None)
