"""What consumers ask of the broker: the verbs of a client, or of a broker in the same process."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

from rmq_pipeline.pulled import Pulled

#: Receipts of deliveries: a table with the column receipt_handle, or the handles themselves.
Receipts: TypeAlias = pa.Table | Sequence[str]


class MembershipVerbs(Protocol):
    """Being a member of a group, and owning queues in it."""

    def heartbeat(
        self,
        group: str,
        client_id: str,
        *,
        topics: Sequence[str],
        details: Mapping[str, Any],
        known_version: int = -1,
        wait_ms: int = 0,
    ) -> dict[str, Any]:
        """Be a member, and learn of the others: {"version", "members", "resets"}."""
        ...

    def leave(self, group: str, client_id: str) -> None:
        """Be no member any more; its queue locks end."""
        ...

    def describe_topic(self, name: str) -> dict[str, Any]:
        """Its fields, and min_offset and max_offset per queue."""
        ...

    def describe_group(self, name: str) -> dict[str, Any]:
        """Its fields, its members."""
        ...

    def lock_queues(
        self,
        group: str,
        topic: str,
        *,
        queue_ids: Sequence[int],
        client_id: str,
        duration_ms: int = 60_000,
    ) -> list[int]:
        """The queues of these that this client holds now."""
        ...

    def unlock_queues(
        self, group: str, topic: str, *, queue_ids: Sequence[int], client_id: str
    ) -> list[int]:
        """Let queues go."""
        ...


class OffsetVerbs(Protocol):
    """Reading by offset, and keeping offsets at the broker."""

    def pull(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        limit: int = 32,
        max_bytes: int = ...,
        filter: str = "*",
        filter_type: str = "tag",
        wait_ms: int = 0,
    ) -> Pulled:
        """Messages of several queues from a position in each on, and where to go on."""
        ...

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """The first offset stored at or after a time; max_offset when there is none."""
        ...

    def start_offsets(
        self, group: str, topic: str, *, where: Literal["last", "first"] | int
    ) -> dict[int, int]:
        """Committed offsets of all queues; those without one begin at ``where``."""
        ...

    def committed_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int]]:
        """The committed offset of every queue, -1 for none, and how often it was reset."""
        ...

    def commit_offsets(
        self,
        group: str,
        topic: str,
        *,
        offsets: Mapping[int, tuple[int, int]],
        client_id: str = "",
        resets: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Move committed offsets from where they are expected; where they are then."""
        ...


class DeliveryVerbs(Protocol):
    """Receiving by lease, and settling."""

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        invisible_duration_ms: int = 60_000,
        filter: str = "*",
        filter_type: str = "tag",
        wait_ms: int = 0,
        client_id: str = "",
        queue_ids: Sequence[int] | None = None,
    ) -> pa.Table:
        """Lease messages, schema.RECEIVED."""
        ...

    def ack(self, receipts: Receipts) -> None:
        """Settle deliveries as done, all or none."""
        ...

    def settle(self, group: str, outcomes: pa.Table) -> dict[str, Any]:
        """Settle deliveries, each as schema.OUTCOME says, all or none."""
        ...

    def change_invisible_duration(self, receipts: Receipts, duration_ms: int) -> pa.Table:
        """Let leases end ``duration_ms`` from now; the new receipts, row for row."""
        ...

    def release(self, receipts: Receipts) -> None:
        """Give deliveries back at once, the attempt not counted, all or none."""
        ...

    def forward_to_dead_letter_queue(self, receipts: Receipts, *, reason: str = "") -> None:
        """Give deliveries up, all or none."""
        ...


class Verbs(MembershipVerbs, OffsetVerbs, DeliveryVerbs, Protocol):
    """All of them."""
