"""What a window asks of the broker: the client's verbs, from wherever they are answered."""

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from rmq_pipeline.lake.publication import SinkVerbs

#: Name and epoch of an open window.
Fence = tuple[str, int]


class Verbs(SinkVerbs, Protocol):
    """The part of the verbs that a window uses; flight.client.Client has them all."""

    def describe_topic(self, name: str) -> dict[str, Any]:
        """A topic's settings and queues."""
        ...

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int,
        invisible_duration_ms: int,
        filter: str,
        filter_type: str,
        wait_ms: int,
        client_id: str,
        window: Fence | None,
    ) -> pa.Table:
        """Lease messages, schema.RECEIVED."""
        ...

    def settle(
        self,
        group: str,
        outcomes: pa.Table,
        *,
        settle_id: str,
        window: Fence | None,
        publish: Mapping[str, pa.Table] | None,
        sink_files: pa.Table | None,
        state: pa.Table | None,
        topic: str,
    ) -> dict[str, Any]:
        """Settle deliveries and what came of them, all or none."""
        ...

    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None
    ) -> pa.Table | None:
        """The state of message groups."""
        ...

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Which effects were carried out, schema.SEEN."""
        ...

    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool
    ) -> dict[str, Any]:
        """Open the only window of this name, or say who has it."""
        ...

    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Let the window end later."""
        ...

    def close_window(self, name: str, *, epoch: int) -> None:
        """End the window."""
        ...
